// The functions of TensorFlow's C API that the operations need, declared here and found at run time: the package is
// built without TensorFlow, and one binary serves all its versions.
//
// They are in libtensorflow_framework.so.2, which TensorFlow's Python package has loaded before it loads us.
#ifndef HOROVOD_SHIMS_TENSORFLOW_API_H_
#define HOROVOD_SHIMS_TENSORFLOW_API_H_

#include <cstddef>
#include <cstdint>

namespace hvd::tensorflow {

// TensorFlow's types, of which we see only pointers.
struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

// TF_DataType and TF_Code, as far as we use them; the numbers are part of TensorFlow's file formats.
enum DataType : int {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kHalf = 19,
  kUint32 = 22,
  kUint64 = 23,
  kFloat8E5m2 = 24,
  kFloat8E4m3fn = 25,
};
enum Code : int {
  kOk = 0,
  kUnknown = 2,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
};

// One line for each function: what it returns, its name without "TF_", its arguments.
#define HVD_TENSORFLOW_FUNCTIONS(F)                                                                                  \
  F(TF_Status*, NewStatus, (void))                                                                                   \
  F(void, DeleteStatus, (TF_Status*))                                                                                \
  F(void, SetStatus, (TF_Status*, Code, const char*))                                                                \
  F(Code, GetCode, (const TF_Status*))                                                                               \
  F(const char*, Message, (const TF_Status*))                                                                        \
  F(DataType, TensorType, (const TF_Tensor*))                                                                        \
  F(int, NumDims, (const TF_Tensor*))                                                                                \
  F(int64_t, Dim, (const TF_Tensor*, int))                                                                           \
  F(size_t, TensorByteSize, (const TF_Tensor*))                                                                      \
  F(void*, TensorData, (const TF_Tensor*))                                                                           \
  F(void, DeleteTensor, (TF_Tensor*))                                                                                \
  F(size_t, DataTypeSize, (DataType))                                                                                \
  F(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char*))                                                  \
  F(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                        \
  F(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                       \
  F(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                      \
  F(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                         \
  F(void, OpDefinitionBuilderSetShapeInferenceFunction,                                                              \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                                      \
  F(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                               \
  F(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                            \
  F(TF_ShapeHandle*, NewShapeHandle, (void))                                                                         \
  F(void, DeleteShapeHandle, (TF_ShapeHandle*))                                                                      \
  F(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))              \
  F(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))             \
  F(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))                             \
  F(int, ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                               \
  F(int64_t, ShapeInferenceContextRank, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                                \
  F(TF_ShapeHandle*, ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                       \
  F(TF_ShapeHandle*, ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t))                       \
  F(void, ShapeInferenceContextSubshape,                                                                             \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))                     \
  F(void, ShapeInferenceContextConcatenateShapes,                                                                    \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))                      \
  F(TF_KernelBuilder*, NewKernelBuilder,                                                                             \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*), void (*)(void*, TF_OpKernelContext*),            \
     void (*)(void*)))                                                                                               \
  F(TF_KernelBuilder*, NewAsyncKernelBuilder,                                                                        \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                                                  \
     void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*)(void*)))                          \
  F(void, RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                                       \
  F(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                      \
  F(void, OpKernelConstruction_GetAttrSize, (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*)) \
  F(void, OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))    \
  F(void, OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))          \
  F(int, NumInputs, (TF_OpKernelContext*))                                                                           \
  F(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                             \
  F(TF_Tensor*, AllocateOutput, (TF_OpKernelContext*, int, DataType, const int64_t*, int, size_t, TF_Status*))       \
  F(TF_Tensor*, ForwardInputOrAllocateOutput,                                                                        \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                              \
  F(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))

struct Api {
#define HVD_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
  HVD_TENSORFLOW_FUNCTIONS(HVD_MEMBER)
#undef HVD_MEMBER
};

// All functions. Throws std::runtime_error, whose text says what is missing, if this is no process with TensorFlow, or
// one with a version that lacks one of them.
const Api& find_api();
// The same, after find_api() has returned once.
const Api& api();

}  // namespace hvd::tensorflow
#endif  // HOROVOD_SHIMS_TENSORFLOW_API_H_
