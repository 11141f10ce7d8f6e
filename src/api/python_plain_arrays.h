// NumPy's arrays for python_plain.h. Included by python_module.cc alone.
//
// An array is read where NumPy keeps its parts, instead of by the buffer protocol, which makes a description of it by
// every call. The layout is part of NumPy's binary interface (PyArrayObject_fields in its ndarraytypes.h: what every
// extension has compiled in), the same in 1.x and 2.x. It is still compared with what the buffer protocol says of two
// arrays when Horovod is imported: if anything differs, no array is plain.
#ifndef HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_
#define HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_

#include <algorithm>

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
constexpr int kWriteable = 0x0400;
constexpr int kWarnOnWrite = static_cast<int>(0x80000000U);

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
  Arrays(PyTypeObject* type, PyObject* empty, PyObject* codes, bool readable)
      : type_(type), empty_(empty), codes_(codes), readable_(readable) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_INCREF(empty);
    Py_INCREF(codes);
  }

  bool read(PyObject* array, Use use, Dense* dense) const override {
    if (Py_TYPE(array) != type_ || !readable_) return false;
    const auto* fields = reinterpret_cast<const ArrayFields*>(array);
    const int wanted = use == Use::kInPlace ? kCContiguous | kWriteable : kCContiguous;
    if ((fields->flags & (wanted | kWarnOnWrite)) != wanted || fields->ndim > HVD_MAX_DIMS) return false;
    PyObject* code = PyDict_GetItemWithError(codes_, fields->dtype);
    int32_t number = 0;
    if (code == nullptr || !plain_int(code, &number)) {
      PyErr_Clear();
      return false;
    }
    *dense = {fields->data, fields->ndim, fields->shape, static_cast<hvd_dtype>(number), fields->dtype};
    return true;
  }

  PyObject* make_output(PyObject*, const Dense& dense, int64_t rows, void** data) const override {
    int64_t extents[HVD_MAX_DIMS];
    std::copy_n(dense.shape, dense.ndim, extents);
    if (rows >= 0) extents[0] = rows;
    PyObject* shape = tuple_of(extents, dense.ndim);
    if (shape == nullptr) return nullptr;
    PyObject* output = PyObject_CallFunctionObjArgs(empty_, shape, dense.type, nullptr);
    Py_DECREF(shape);
    if (output != nullptr) *data = reinterpret_cast<const ArrayFields*>(output)->data;
    return output;
  }

  PyObject* make_result(const hvd_result& result, hvd_dtype dtype, PyObject* type) const override {
    PyObject* rows = make_rows_memory(result, kElementBytes[dtype]);
    PyObject* shape = rows == nullptr ? nullptr : tuple_of(result.shape, result.ndim);
    PyObject* array = nullptr;
    if (shape != nullptr) {
      array = PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(type_), shape, type, rows, nullptr);
    }
    Py_XDECREF(shape);
    Py_XDECREF(rows);  // the array has it
    return array;
  }

 private:
  PyTypeObject* const type_;
  PyObject* const empty_;
  PyObject* const codes_;
  const bool readable_;
};

// plain_arrays(dense, other, empty, codes, global_process_set): see _core.pyi.
inline PyObject* py_plain_arrays(PyObject*, PyObject* args) {
  PyObject *dense, *other, *empty, *codes, *global_process_set;
  if (PyArg_ParseTuple(args, "OOOO!O:plain_arrays", &dense, &other, &empty, &PyDict_Type, &codes,
                       &global_process_set) == 0) {
    return nullptr;
  }
  const bool readable = has_array_fields(dense, true) && has_array_fields(other, false);
  return make_plain(new (std::nothrow) Arrays(Py_TYPE(dense), empty, codes, readable), global_process_set);
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_PLAIN_ARRAYS_H_
