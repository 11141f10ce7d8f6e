// Memory of the engine as Python objects with the buffer protocol. Arrays made over one keep it alive; when the last of
// them is gone it is freed.
//   horovod._core.SharedMemory   made by Python, from hvd_alloc
//   horovod._core.Rows           made by the engine: the result of an allgather or alltoall
//   horovod._core.RowsMemory     the same without what is known of the rows, under an array that knows it
// None takes part in garbage collection, so making one runs no other Python code. Included by python_module.cc
// alone.
#ifndef HOROVOD_API_PYTHON_MEMORY_H_
#define HOROVOD_API_PYTHON_MEMORY_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <vector>

#include "api/horovod.h"

namespace horovod::python {

// What both begin with.
struct Memory {
  PyObject_HEAD void* memory;
  Py_ssize_t bytes;
};

struct SharedMemory {
  Memory base;
};

struct Rows {
  Memory base;
  std::vector<int64_t>* shape;
  std::vector<int64_t>* received;
};

inline PyTypeObject* rows_type = nullptr;
inline PyTypeObject* rows_memory_type = nullptr;

template <typename Object>
Object* allocate(PyTypeObject* type) {
  const auto function = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return reinterpret_cast<Object*>(function(type, 0));
}

inline void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

inline int memory_getbuffer(PyObject* object, Py_buffer* view, int flags) {
  static char nothing;  // an empty result need not have memory, but a buffer has an address
  auto* self = reinterpret_cast<Memory*>(object);
  return PyBuffer_FillInfo(view, object, self->memory != nullptr ? self->memory : &nothing, self->bytes, 0, flags);
}

// ---- SharedMemory ---------------------------------------------------------------------------------------------------

inline PyObject* shared_memory_new(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t bytes = 0;
  if (PyArg_ParseTuple(args, "n:SharedMemory", &bytes) == 0) return nullptr;
  if (bytes < 0) {
    PyErr_Format(PyExc_ValueError, "SharedMemory: a size of %zd bytes.", bytes);
    return nullptr;
  }
  void* memory = hvd_alloc(static_cast<size_t>(bytes));
  if (memory == nullptr) {
    PyErr_SetString(PyExc_MemoryError, hvd_last_error());
    return nullptr;
  }
  auto* self = allocate<SharedMemory>(type);
  if (self == nullptr) {
    hvd_free(memory);
    return nullptr;
  }
  self->base.memory = memory;
  self->base.bytes = bytes;
  return reinterpret_cast<PyObject*>(self);
}

inline void shared_memory_dealloc(PyObject* object) {
  hvd_free(reinterpret_cast<SharedMemory*>(object)->base.memory);
  deallocate(object);
}

inline PyObject* make_shared_memory_type() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(shared_memory_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(shared_memory_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(memory_getbuffer)},
      {Py_tp_doc, const_cast<char*>("SharedMemory(bytes)\n\nZeroed memory that the ranks of this host can read.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.SharedMemory", sizeof(SharedMemory), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

inline Py_ssize_t bytes_of(const hvd_result& result, Py_ssize_t element_bytes) {
  Py_ssize_t bytes = element_bytes;
  for (int32_t i = 0; i < result.ndim; ++i) bytes *= result.shape[i];
  return bytes;
}

// Takes the memory of `result`, whose elements have `element_bytes`; frees it if there is no memory for the object.
inline PyObject* make_rows(const hvd_result& result, Py_ssize_t element_bytes) {
  auto* self = allocate<Rows>(rows_type);  // zeroed
  if (self == nullptr) {
    hvd_free_data(result.data);
    return nullptr;
  }
  self->base.memory = result.data;
  self->base.bytes = bytes_of(result, element_bytes);
  try {
    self->shape = new std::vector<int64_t>(result.shape, result.shape + result.ndim);
    self->received = new std::vector<int64_t>(result.received, result.received + result.n_received);
  } catch (const std::bad_alloc&) {
    Py_DECREF(reinterpret_cast<PyObject*>(self));
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(self);
}

// As make_rows.
inline PyObject* make_rows_memory(const hvd_result& result, Py_ssize_t element_bytes) {
  auto* self = allocate<Memory>(rows_memory_type);
  if (self == nullptr) {
    hvd_free_data(result.data);
    return nullptr;
  }
  self->memory = result.data;
  self->bytes = bytes_of(result, element_bytes);
  return reinterpret_cast<PyObject*>(self);
}

inline void rows_memory_dealloc(PyObject* object) {
  hvd_free_data(reinterpret_cast<Memory*>(object)->memory);
  deallocate(object);
}

inline void rows_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Rows*>(object);
  hvd_free_data(self->base.memory);
  delete self->shape;
  delete self->received;
  deallocate(object);
}

inline PyObject* tuple_of(const int64_t* numbers, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr || PyTuple_SetItem(tuple, i, number) != 0) {
      Py_DECREF(tuple);
      return nullptr;
    }
  }
  return tuple;
}

inline PyObject* tuple_of(const std::vector<int64_t>& numbers) {
  return tuple_of(numbers.data(), static_cast<Py_ssize_t>(numbers.size()));
}

inline PyObject* rows_shape(PyObject* object, void*) { return tuple_of(*reinterpret_cast<Rows*>(object)->shape); }
inline PyObject* rows_received(PyObject* object, void*) { return tuple_of(*reinterpret_cast<Rows*>(object)->received); }

inline PyObject* make_rows_type() {
  static PyGetSetDef attributes[] = {
      {"shape", rows_shape, nullptr, "The shape of the result.", nullptr},
      {"received", rows_received, nullptr, "How many rows came from each member.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(rows_dealloc)},
      {Py_tp_getset, attributes},
      {Py_bf_getbuffer, reinterpret_cast<void*>(memory_getbuffer)},
      {Py_tp_doc, const_cast<char*>("The memory that the engine made for the result of an allgather or alltoall.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.Rows", sizeof(Rows), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromSpec(&spec);
  rows_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

inline PyObject* make_rows_memory_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(rows_memory_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(memory_getbuffer)},
      {Py_tp_doc, const_cast<char*>("The memory under the result of an allgather or alltoall.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.RowsMemory", sizeof(Memory), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromSpec(&spec);
  rows_memory_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_MEMORY_H_
