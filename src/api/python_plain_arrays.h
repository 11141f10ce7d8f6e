// NumPy's arrays for python_plain.h. Included by python_module.cc alone.
//
// An array is read where NumPy keeps its parts, instead of by the buffer protocol, which makes a description of it by
// every call, and made by NumPy's table of C functions. Both are NumPy's binary interface, which every extension has
// compiled in and which is the same in 1.x and 2.x: PyArrayObject_fields of its ndarraytypes.h, and _ARRAY_API. What is
// used of it is declared here. The table has a version, and the layout is compared with what the buffer protocol says
// of two arrays when Horovod is imported: if anything differs, no array is plain.
#ifndef HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_
#define HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_

#include <algorithm>
#include <iterator>

#include "api/python_plain.h"

namespace horovod::python {

struct ArrayFields {
  PyObject_HEAD char* data;
  int ndim;
  int64_t* shape;
  int64_t* strides;
  PyObject* base;
  PyObject* dtype;
  int flags;
};

constexpr int kCContiguous = 0x0001;
constexpr int kAligned = 0x0100;
constexpr int kWriteable = 0x0400;
constexpr int kWarnOnWrite = static_cast<int>(0x80000000U);

// The functions of _ARRAY_API that we use, and the versions of which they are part. Both take a reference of the second
// argument.
constexpr unsigned kArrayVersions[] = {0x01000009, 0x02000000};
using GetVersion = unsigned (*)();
using NewFromDtype = PyObject* (*)(PyTypeObject* type, PyObject* dtype, int ndim, const int64_t* shape,
                                   const int64_t* strides, void* data, int flags, PyObject* like);
using SetBase = int (*)(PyObject* array, PyObject* base);
struct ArrayFunctions {
  NewFromDtype new_from_dtype = nullptr;
  SetBase set_base = nullptr;
};

// None, without an exception, if this is no such table.
inline ArrayFunctions array_functions(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, nullptr) == 0) return {};
  auto* table = static_cast<void**>(PyCapsule_GetPointer(capsule, nullptr));
  const unsigned version = reinterpret_cast<GetVersion>(table[0])();
  if (std::find(std::begin(kArrayVersions), std::end(kArrayVersions), version) == std::end(kArrayVersions)) return {};
  return {reinterpret_cast<NewFromDtype>(table[94]), reinterpret_cast<SetBase>(table[282])};
}

// Whether the fields of an array are what the buffer protocol and the attribute `dtype` say.
inline bool has_array_fields(PyObject* array, bool dense_and_writable) {
  const auto* fields = reinterpret_cast<const ArrayFields*>(array);
  PyObject* dtype = PyObject_GetAttrString(array, "dtype");
  Py_buffer view;
  if (dtype == nullptr || PyObject_GetBuffer(array, &view, PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    Py_XDECREF(dtype);
    return false;
  }
  const int flags = dense_and_writable ? kCContiguous | kWriteable : 0;
  const bool same = fields->data == view.buf && fields->ndim == view.ndim && fields->dtype == dtype &&
                    std::equal(view.shape, view.shape + view.ndim, fields->shape) &&
                    std::equal(view.strides, view.strides + view.ndim, fields->strides) &&
                    (fields->flags & (kCContiguous | kWriteable | kWarnOnWrite)) == flags;
  PyBuffer_Release(&view);
  Py_DECREF(dtype);
  return same;
}

class Arrays : public Framework {
 public:
  // `codes`: the engine's code of each dtype; may grow.
  Arrays(PyTypeObject* type, PyObject* codes, ArrayFunctions numpy, bool readable)
      : type_(type), codes_(codes), numpy_(numpy), readable_(readable) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_INCREF(codes);
  }

  bool read(PyObject* array, Use use, Dense* dense) const override {
    if (Py_TYPE(array) != type_ || !readable_) return false;
    const auto* fields = reinterpret_cast<const ArrayFields*>(array);
    const int wanted = use == Use::kInput ? kCContiguous : kCContiguous | kWriteable;
    if ((fields->flags & (wanted | kWarnOnWrite)) != wanted || fields->ndim > HVD_MAX_DIMS) return false;
    PyObject* code = PyDict_GetItemWithError(codes_, fields->dtype);
    int32_t number = 0;
    if (code == nullptr || !plain_int(code, &number)) {
      drop_exception();
      return false;
    }
    dense->data = fields->data;
    dense->ndim = fields->ndim;
    dense->dtype = static_cast<hvd_dtype>(number);
    dense->type = fields->dtype;
    std::copy_n(fields->shape, fields->ndim, dense->shape);
    return true;
  }

  PyObject* make_output(PyObject*, const Dense& dense, int64_t rows, void** data) const override {
    int64_t extents[HVD_MAX_DIMS];
    std::copy_n(dense.shape, dense.ndim, extents);
    if (rows >= 0) extents[0] = rows;
    Py_INCREF(dense.type);
    PyObject* output = numpy_.new_from_dtype(type_, dense.type, dense.ndim, extents, nullptr, nullptr, 0, nullptr);
    if (output != nullptr) *data = reinterpret_cast<const ArrayFields*>(output)->data;
    return output;
  }

  PyObject* make_result(const hvd_result& result, hvd_dtype dtype, PyObject* type) const override {
    PyObject* memory = make_rows_memory(result, kElementBytes[dtype]);
    if (memory == nullptr) return nullptr;
    Py_INCREF(type);
    PyObject* array = numpy_.new_from_dtype(type_, type, result.ndim, result.shape, nullptr, result.data,
                                            kCContiguous | kAligned | kWriteable, nullptr);
    if (array == nullptr) {
      Py_DECREF(memory);
    } else if (numpy_.set_base(array, memory) != 0) {
      Py_CLEAR(array);
    }
    return array;
  }

 private:
  PyTypeObject* const type_;
  PyObject* const codes_;
  const ArrayFunctions numpy_;
  const bool readable_;
};

// plain_arrays(dense, other, array_api, codes, global_process_set): see _core.pyi.
inline PyObject* py_plain_arrays(PyObject*, PyObject* args) {
  PyObject *dense, *other, *array_api, *codes, *global_process_set;
  if (PyArg_ParseTuple(args, "OOOO!O:plain_arrays", &dense, &other, &array_api, &PyDict_Type, &codes,
                       &global_process_set) == 0) {
    return nullptr;
  }
  const ArrayFunctions numpy = array_functions(array_api);
  const bool readable =
      numpy.new_from_dtype != nullptr && has_array_fields(dense, true) && has_array_fields(other, false);
  return make_plain(new (std::nothrow) Arrays(Py_TYPE(dense), codes, numpy, readable), global_process_set);
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_
