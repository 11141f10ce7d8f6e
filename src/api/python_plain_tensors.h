// PyTorch's tensors for python_plain.h. Included by python_module.cc alone.
//
// A tensor is read and made by DLPack's exchange interface, a table of C functions that its type has as
// `__dlpack_c_exchange_api__` (DLPack 1.3; PyTorch 2.13 has it). With a PyTorch without it no tensor is plain. We
// are built without PyTorch and without DLPack: what we use of it is declared here, and the version checked.
#ifndef HOROVOD_API_PYTHON_PLAIN_TENSORS_H_
#define HOROVOD_API_PYTHON_PLAIN_TENSORS_H_

#include <algorithm>
#include <cstdlib>

#include "api/python_plain.h"

namespace horovod::python {

// ---- DLPack ---------------------------------------------------------------------------------------------------------

namespace dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr uint32_t kMinorVersion = 3;
constexpr int32_t kCpu = 1;

struct Version {
  uint32_t major, minor;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensorVersioned
  Version version;
  void* manager;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;  // for another major version
  void* allocate;
  void* managed_from_object;
  int (*object_from_managed)(ManagedTensor* tensor, void** object);  // takes the tensor
  int (*tensor_from_object)(void* object, Tensor* tensor);           // what it points to is the object's
  void* current_stream;
};

// By hvd_dtype.
constexpr DataType kTypes[] = {{1, 8, 1},  {0, 8, 1},  {1, 16, 1},  {0, 16, 1}, {0, 32, 1}, {0, 64, 1},
                               {2, 16, 1}, {2, 32, 1}, {2, 64, 1},  {6, 8, 1},  {4, 16, 1}, {1, 32, 1},
                               {1, 64, 1}, {5, 64, 1}, {5, 128, 1}, {10, 8, 1}, {12, 8, 1}};
static_assert(sizeof(kTypes) / sizeof(kTypes[0]) == HVD_DTYPES, "one entry per hvd_dtype");

inline bool same(DataType a, DataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

// The table in a capsule; nullptr, without an exception, if there is none that we know.
inline const ExchangeApi* exchange_api(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  while (api != nullptr && api->version.major != kMajorVersion) api = api->previous;
  if (api == nullptr || api->version.minor < kMinorVersion || api->tensor_from_object == nullptr) return nullptr;
  return api;
}

inline bool is_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  bool dense = true;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == expected);
    expected *= tensor.shape[i];
  }
  return dense;
}

}  // namespace dlpack

// ---- Tensors --------------------------------------------------------------------------------------------------------

class Tensors : public Framework {
 public:
  // All objects are PyTorch's: see _core.pyi.
  struct Parts {
    const dlpack::ExchangeApi* api;  // or nullptr
    PyObject *type, *parameter_type, *empty_like, *increment_version, *compiler;
  };

  explicit Tensors(const Parts& parts) : torch_(parts) {
    for (PyObject* part :
         {parts.type, parts.parameter_type, parts.empty_like, parts.increment_version, parts.compiler}) {
      Py_INCREF(part);
    }
  }

  bool read(PyObject* tensor, Use use, Dense* dense) const override {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (torch_.api == nullptr || (type != torch_.type && type != torch_.parameter_type) || is_traced()) return false;
    dlpack::Tensor parts;
    if (torch_.api->tensor_from_object(tensor, &parts) != 0) {  // sparse, on an unknown device, without memory
      drop_exception();
      return false;
    }
    if (parts.device_type != dlpack::kCpu || parts.byte_offset != 0 || parts.ndim > HVD_MAX_DIMS ||
        !dlpack::is_contiguous(parts) || !find_dtype(parts.dtype, &dense->dtype)) {
      return false;
    }
    // The memory of a view by imag or conj may hold the negative of the values, which only a flag says.
    if (!is_false(PyObject_CallMethodObjArgs(tensor, is_neg_, nullptr))) return false;
    dense->data = parts.data;
    dense->ndim = parts.ndim;
    std::copy_n(parts.shape, parts.ndim, dense->shape);
    dense->type = nullptr;
    if (use == Use::kInput) return is_false(PyObject_GetAttr(tensor, requires_grad_));
    return use == Use::kInPlaceOfMany || count_change(tensor);
  }

  // Tells autograd that the tensors are written to: it finds out if the values were needed.
  bool count_changes(PyObject* tensors) const override {
    PyObject* done = PyObject_CallFunctionObjArgs(torch_.increment_version, tensors, nullptr);
    if (done == nullptr) drop_exception();
    Py_XDECREF(done);
    return done != nullptr;
  }

  PyObject* make_output(PyObject* tensor, const Dense& dense, int64_t rows, void** data) const override {
    PyObject* output = nullptr;
    if (rows < 0) {
      output = PyObject_CallFunctionObjArgs(torch_.empty_like, tensor, nullptr);
    } else {
      int64_t extents[HVD_MAX_DIMS];
      std::copy_n(dense.shape, dense.ndim, extents);
      extents[0] = rows;
      PyObject* shape = tuple_of(extents, dense.ndim);
      if (shape == nullptr) return nullptr;
      output = PyObject_CallMethodObjArgs(tensor, new_empty_, shape, nullptr);
      Py_DECREF(shape);
    }
    dlpack::Tensor parts;
    if (output != nullptr && torch_.api->tensor_from_object(output, &parts) != 0) Py_CLEAR(output);
    if (output != nullptr) *data = parts.data;
    return output;
  }

  PyObject* make_result(const hvd_result& result, hvd_dtype dtype, PyObject*) const override {
    const auto ndim = static_cast<size_t>(result.ndim);
    auto* managed = static_cast<dlpack::ManagedTensor*>(
        std::malloc(sizeof(dlpack::ManagedTensor) + 2 * ndim * sizeof(int64_t)));  // shape and strides behind it
    if (managed == nullptr) {
      hvd_free_data(result.data);
      return PyErr_NoMemory();
    }
    auto* shape = reinterpret_cast<int64_t*>(managed + 1);
    int64_t* strides = shape + ndim;
    std::copy_n(result.shape, ndim, shape);
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0; stride *= std::max<int64_t>(1, shape[i])) strides[i] = stride;
    *managed = {{dlpack::kMajorVersion, dlpack::kMinorVersion},
                nullptr,
                free_managed,
                0,
                {result.data, dlpack::kCpu, 0, result.ndim, dlpack::kTypes[dtype], shape, strides, 0}};
    void* tensor = nullptr;
    return torch_.api->object_from_managed(managed, &tensor) == 0 ? static_cast<PyObject*>(tensor) : nullptr;
  }

 private:
  static bool find_dtype(dlpack::DataType type, hvd_dtype* dtype) {
    for (int code = 0; code < HVD_DTYPES; ++code) {
      *dtype = static_cast<hvd_dtype>(code);
      // Complex tensors may be conjugated, which only a flag says: they are not plain.
      if (dlpack::same(type, dlpack::kTypes[code])) return code != HVD_COMPLEX64 && code != HVD_COMPLEX128;
    }
    return false;
  }

  // Any thread may call it, without the GIL.
  static void free_managed(dlpack::ManagedTensor* self) {
    hvd_free_data(self->tensor.data);
    std::free(self);
  }

  // Takes the answer of a question.
  static bool is_false(PyObject* answer) {
    if (answer == nullptr) drop_exception();
    Py_XDECREF(answer);
    return answer == Py_False;
  }

  // Whether PyTorch runs the caller to find out what it does. (The bindings ask whether Dynamo does: it does not run
  // us.)
  bool is_traced() const {
    PyObject* flag = PyDict_GetItemWithError(torch_.compiler, compiling_flag_);
    return flag != Py_False;
  }

  bool count_change(PyObject* tensor) const {
    PyObject* tensors = PyTuple_Pack(1, tensor);
    if (tensors == nullptr) drop_exception();
    const bool counted = tensors != nullptr && count_changes(tensors);
    Py_XDECREF(tensors);
    return counted;
  }

  const Parts torch_;
  PyObject* const is_neg_ = interned("is_neg");
  PyObject* const requires_grad_ = interned("requires_grad");
  PyObject* const new_empty_ = interned("new_empty");
  PyObject* const compiling_flag_ = interned("_is_compiling_flag");
};

inline PyObject* py_plain_tensors(PyObject*, PyObject* args) {
  Tensors::Parts parts = {};
  PyObject *capsule, *global_process_set;
  if (PyArg_ParseTuple(args, "OO!O!OOO!O:plain_tensors", &capsule, &PyType_Type, &parts.type, &PyType_Type,
                       &parts.parameter_type, &parts.empty_like, &parts.increment_version, &PyDict_Type,
                       &parts.compiler, &global_process_set) == 0) {
    return nullptr;
  }
  parts.api = dlpack::exchange_api(capsule);
  return make_plain(new (std::nothrow) Tensors(parts), global_process_set);
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_PLAIN_TENSORS_H_
