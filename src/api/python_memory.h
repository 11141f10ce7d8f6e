// horovod._core.SharedMemory: memory from hvd_alloc as an object with the buffer protocol. Arrays made over it keep it
// alive; when the last of them is gone it is freed.
#ifndef HOROVOD_API_PYTHON_MEMORY_H_
#define HOROVOD_API_PYTHON_MEMORY_H_

#include "api/python_operations.h"

namespace horovod::python {

struct SharedMemory {
  PyObject_HEAD void* memory;
  Py_ssize_t bytes;
};

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
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<SharedMemory*>(allocate(type, 0));
  if (self == nullptr) {
    hvd_free(memory);
    return nullptr;
  }
  self->memory = memory;
  self->bytes = bytes;
  return reinterpret_cast<PyObject*>(self);
}

inline void shared_memory_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  hvd_free(reinterpret_cast<SharedMemory*>(object)->memory);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

inline int shared_memory_getbuffer(PyObject* object, Py_buffer* view, int flags) {
  auto* self = reinterpret_cast<SharedMemory*>(object);
  return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 0, flags);
}

inline PyObject* make_shared_memory_type() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(shared_memory_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(shared_memory_dealloc)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(shared_memory_getbuffer)},
      {Py_tp_doc, const_cast<char*>("SharedMemory(bytes)\n\nZeroed memory that the ranks of this host can read.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.SharedMemory", sizeof(SharedMemory), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_MEMORY_H_
