// The operations that TensorFlow gets when it loads this library: their definitions, and the registration of both
// definitions and kernels, which has to happen while the library is being loaded.
//
// Every operation is stateful, so that no graph optimizer merges, folds or drops it. The collectives take lists: of one
// tensor, or of several that are run as a group. Which types they take is said by Python and by the engine: TensorFlow
// can't read the names of all of them here.
#include <exception>
#include <initializer_list>
#include <string>

#include "api/horovod.h"
#include "shims/tensorflow/kernels.h"
#include "shims/tensorflow/status.h"

namespace hvd::tensorflow {
namespace {

// The rows of a first dimension that is known only when the operation has run.
constexpr size_t kAnyNumber = static_cast<size_t>(-1);

class Shape {
 public:
  explicit Shape(TF_ShapeHandle* handle = api().NewShapeHandle()) : handle_(handle) {}
  ~Shape() { api().DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < api().ShapeInferenceContextNumInputs(context) && api().GetCode(status) == kOk; ++i) {
    const Shape shape;
    api().ShapeInferenceContextGetInput(context, i, shape, status);
    if (api().GetCode(status) == kOk) api().ShapeInferenceContextSetOutput(context, i, shape, status);
  }
}

// The output of the i-th input: its shape with another number of rows, if it has rows at all.
void other_rows(TF_ShapeInferenceContext* context, int i, TF_Status* status) {
  const Shape shape;
  api().ShapeInferenceContextGetInput(context, i, shape, status);
  if (api().GetCode(status) != kOk) return;
  if (!api().ShapeInferenceContextRankKnown(context, shape)) return;
  const int64_t rank = api().ShapeInferenceContextRank(context, shape);
  if (rank == 0) return;  // refused when it runs
  const Shape row, result, rows(api().ShapeInferenceContextVectorFromSize(context, kAnyNumber));
  api().ShapeInferenceContextSubshape(context, shape, 1, rank, row, status);
  if (api().GetCode(status) == kOk) {
    api().ShapeInferenceContextConcatenateShapes(context, rows, row, result, status);
  }
  if (api().GetCode(status) == kOk) api().ShapeInferenceContextSetOutput(context, i, result, status);
}

void gathered_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  api().ShapeInferenceContextSetUnknownShape(context, status);
  const auto inputs = static_cast<int>(api().ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < inputs && api().GetCode(status) == kOk; ++i) {
    other_rows(context, i, status);
    const Shape counts(api().ShapeInferenceContextVectorFromSize(context, kAnyNumber));
    if (api().GetCode(status) == kOk) api().ShapeInferenceContextSetOutput(context, inputs + i, counts, status);
  }
}

void exchanged_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  api().ShapeInferenceContextSetUnknownShape(context, status);
  if (api().GetCode(status) == kOk) other_rows(context, 0, status);
  const Shape counts(api().ShapeInferenceContextVectorFromSize(context, kAnyNumber));
  if (api().GetCode(status) == kOk) api().ShapeInferenceContextSetOutput(context, 1, counts, status);
}

void scattered_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  api().ShapeInferenceContextSetUnknownShape(context, status);
  for (int i = 0; i < api().ShapeInferenceContextNumInputs(context) && api().GetCode(status) == kOk; ++i) {
    other_rows(context, i, status);
  }
}

template <int outputs>
void scalars(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape scalar(api().ShapeInferenceContextScalar(context));
  for (int i = 0; i < outputs && api().GetCode(status) == kOk; ++i) {
    api().ShapeInferenceContextSetOutput(context, i, scalar, status);
  }
}

struct Definition {
  const char* name;
  std::initializer_list<const char*> attributes, inputs, outputs;
  void (*shapes)(TF_ShapeInferenceContext*, TF_Status*);
};

void define(const Definition& definition) {
  TF_OpDefinitionBuilder* const builder = api().NewOpDefinitionBuilder(definition.name);
  for (const char* text : definition.attributes) api().OpDefinitionBuilderAddAttr(builder, text);
  for (const char* text : definition.inputs) api().OpDefinitionBuilderAddInput(builder, text);
  for (const char* text : definition.outputs) api().OpDefinitionBuilderAddOutput(builder, text);
  api().OpDefinitionBuilderSetIsStateful(builder, true);
  api().OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.shapes);
  const Status status;
  api().RegisterOpDefinition(builder, status);
  status.check();
}

void add_collective(const Definition& definition, Create create) {
  define(definition);
  const Status status;
  TF_KernelBuilder* const builder =
      api().NewAsyncKernelBuilder(definition.name, "CPU", create, run_collective, delete_collective);
  api().RegisterKernelBuilder(definition.name, builder, status);
  status.check();
}

void register_all() {
  add_collective({"HorovodAllreduce",
                  {"T: list(type)", "tensor_name: string", "reduce_op: int", "prescale_bits: int",
                   "postscale_bits: int", "process_set: int"},
                  {"tensors: T"},
                  {"results: T"},
                  same_shapes},
                 create_allreduce);
  add_collective({"HorovodBroadcast",
                  {"T: list(type)", "tensor_name: string", "root_rank: int", "process_set: int"},
                  {"tensors: T"},
                  {"results: T"},
                  same_shapes},
                 create_broadcast);
  add_collective({"HorovodAllgather",
                  {"T: list(type)", "N: int", "tensor_name: string", "process_set: int"},
                  {"tensors: T"},
                  {"results: T", "received: N * int32"},
                  gathered_shapes},
                 create_allgather);
  add_collective({"HorovodAlltoall",
                  {"T: type", "tensor_name: string", "process_set: int"},
                  {"tensor: T", "splits: int32"},
                  {"result: T", "received: int32"},
                  exchanged_shapes},
                 create_alltoall);
  add_collective({"HorovodReducescatter",
                  {"T: list(type)", "tensor_name: string", "reduce_op: int", "prescale_bits: int",
                   "postscale_bits: int", "process_set: int"},
                  {"tensors: T"},
                  {"results: T"},
                  scattered_shapes},
                 create_reducescatter);
  add_collective({"HorovodJoin", {}, {}, {"last_rank: int32"}, scalars<1>}, create_join);

  const Definition place{"HorovodPlace",
                         {"process_set: int"},
                         {},
                         {"rank: int32", "local_rank: int32", "size: int32", "local_size: int32", "included: int32"},
                         scalars<5>};
  define(place);
  const Status status;
  TF_KernelBuilder* const builder = api().NewKernelBuilder(place.name, "CPU", create_place, run_place, delete_place);
  api().RegisterKernelBuilder(place.name, builder, status);
  status.check();
}

std::string registration_error() {
  try {
    find_api();
    register_all();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

const std::string& error = *new std::string(registration_error());

}  // namespace
}  // namespace hvd::tensorflow

// Why the operations could not be registered; "" if they were.
extern "C" HVD_EXPORT const char* hvd_tensorflow_error(void) { return hvd::tensorflow::error.c_str(); }
