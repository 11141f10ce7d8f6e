// Requests of horovod._core: from Python arguments to hvd_request. Included by python_operations.h alone.
#ifndef HOROVOD_API_PYTHON_REQUESTS_H_
#define HOROVOD_API_PYTHON_REQUESTS_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <vector>

#include "api/horovod.h"

namespace horovod::python {

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "shapes are handed over without conversion");

// What keeps the memory of one operation alive, and what becomes of its result: see python_operations.h.
struct Held {
  Py_buffer* buffers = nullptr;  // room for two, if any was exported
  int n_buffers = 0;
  hvd_op op = HVD_ALLREDUCE;
  hvd_dtype dtype = HVD_UINT8;
  bool calls_result = false;       // `result` is a function that makes what the operation returns
  PyObject* result = nullptr;      // what the operation returns, or that function
  PyObject* keep_alive = nullptr;  // whatever else owns the memory
  PyObject* given = nullptr;       // what the engine has made: Rows, or an int
};

inline bool gives_rows(hvd_op op) { return op == HVD_ALLGATHER || op == HVD_ALLTOALL; }
inline bool gives_number(hvd_op op) { return op == HVD_JOIN || op == HVD_ADD_PROCESS_SET; }

inline bool to_int64(PyObject* object, int64_t* value) {
  *value = PyLong_AsLongLong(object);
  return *value != -1 || PyErr_Occurred() == nullptr;
}

inline bool to_int(PyObject* object, int* value) {
  const long number = PyLong_AsLong(object);
  if (number == -1 && PyErr_Occurred() != nullptr) return false;
  if (number < INT32_MIN || number > INT32_MAX) {
    PyErr_SetString(PyExc_OverflowError, "expected a 32-bit integer");
    return false;
  }
  *value = static_cast<int>(number);
  return true;
}

inline bool to_double(PyObject* object, double* value) {
  *value = PyFloat_AsDouble(object);
  return *value != -1.0 || PyErr_Occurred() == nullptr;
}

inline bool to_pointer(PyObject* object, void** value) {
  *value = PyLong_AsVoidPtr(object);
  return *value != nullptr || PyErr_Occurred() == nullptr;
}

// op, name, dtype: the first three arguments of every kind of request.
inline bool parse_head(PyObject* const* args, hvd_request* request, Held* held) {
  int op = 0;
  int dtype = 0;
  Py_ssize_t length = 0;
  if (!to_int(args[0], &op)) return false;
  request->name = PyUnicode_AsUTF8AndSize(args[1], &length);
  if (request->name == nullptr || !to_int(args[2], &dtype)) return false;
  request->struct_size = sizeof(hvd_request);
  request->op = static_cast<hvd_op>(op);
  request->name_length = static_cast<size_t>(length);
  request->dtype = static_cast<hvd_dtype>(dtype);
  request->callback = nullptr;
  request->context = nullptr;
  request->splits = nullptr;
  request->n_splits = 0;
  request->allocate = nullptr;
  held->op = request->op;
  held->dtype = request->dtype;
  return true;
}

// reduce_op, root, process_set, prescale, postscale.
inline bool parse_tail(PyObject* const* args, hvd_request* request) {
  int reduce_op = 0;
  if (!to_int(args[0], &reduce_op)) return false;
  request->reduce_op = static_cast<hvd_reduce_op>(reduce_op);
  return to_int(args[1], &request->root) && to_int(args[2], &request->process_set) &&
         to_double(args[3], &request->prescale) && to_double(args[4], &request->postscale);
}

// splits, the last argument, which may be left out: None or a sequence of integers.
inline bool parse_splits(PyObject* sequence, std::vector<int64_t>* splits, hvd_request* request) {
  if (sequence == Py_None) return true;
  const Py_ssize_t n = PySequence_Size(sequence);
  if (n < 0) return false;
  try {
    splits->resize(static_cast<size_t>(n));
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    const bool good = item != nullptr && to_int64(item, &(*splits)[static_cast<size_t>(i)]);
    Py_XDECREF(item);
    if (!good) return false;
  }
  request->splits = splits->data();
  request->n_splits = static_cast<int32_t>(n);
  return true;
}

inline bool wrong_count(const char* function, Py_ssize_t expected, Py_ssize_t count) {
  if (count == expected || count == expected + 1) return false;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd or %zd positional arguments, %zd given", function, expected,
               expected + 1, count);
  return true;
}

// Arguments by pointer: op, name, dtype, shape, in_ptr, out_ptr, <tail>, result, keep_alive[, splits].
inline bool parse_pointers(const char* function, PyObject* const* args, Py_ssize_t count, int64_t* shape,
                           std::vector<int64_t>* splits, hvd_request* request, Held* held) {
  if (wrong_count(function, 13, count) || !parse_head(args, request, held)) return false;
  const Py_ssize_t ndim = PyTuple_Size(args[3]);
  if (ndim < 0) return false;
  if (ndim > HVD_MAX_DIMS) {
    PyErr_Format(PyExc_ValueError, "%U has %zd dimensions; at most %d are supported.", args[1], ndim, HVD_MAX_DIMS);
    return false;
  }
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    if (!to_int64(PyTuple_GetItem(args[3], i), &shape[i])) return false;
  }
  request->ndim = static_cast<int32_t>(ndim);
  request->shape = shape;
  void* input = nullptr;
  if (!to_pointer(args[4], &input) || !to_pointer(args[5], &request->output) || !parse_tail(args + 6, request)) {
    return false;
  }
  request->input = input;
  if (count == 14 && !parse_splits(args[13], splits, request)) return false;
  Py_INCREF(args[11]);
  held->result = args[11];
  held->calls_result = !gives_number(request->op) && PyCallable_Check(args[11]) != 0;
  Py_INCREF(args[12]);
  held->keep_alive = args[12];
  return true;
}

// A dense buffer of `object`, or a ValueError that says what is wrong with it.
inline bool get_buffer(PyObject* object, bool writable, PyObject* name, Held* held) {
  if (held->buffers == nullptr) held->buffers = new (std::nothrow) Py_buffer[2];
  if (held->buffers == nullptr) {
    PyErr_NoMemory();
    return false;
  }
  Py_buffer* view = &held->buffers[held->n_buffers];
  if (PyObject_GetBuffer(object, view, writable ? PyBUF_ND | PyBUF_WRITABLE : PyBUF_ND) == 0) {
    ++held->n_buffers;
    return true;
  }
  if (PyObject_CheckBuffer(object) == 0) return false;  // its TypeError is clear
  PyErr_Clear();
  if (writable && PyObject_GetBuffer(object, view, PyBUF_ND) == 0) {
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "Tensor is read-only, the result of %U can't be written into it.", name);
  } else {
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "Tensor is required to be contiguous. (%U; C order)", name);
  }
  return false;
}

// Arguments by buffer: op, name, dtype, input, output, <tail>[, splits]. The result is the output object; where the
// engine makes the output, `output` is the function that makes the result from it.
inline bool parse_buffers(const char* function, PyObject* const* args, Py_ssize_t count, std::vector<int64_t>* splits,
                          hvd_request* request, Held* held) {
  if (wrong_count(function, 10, count) || !parse_head(args, request, held)) return false;
  const bool rows = gives_rows(request->op);
  request->output = nullptr;
  if (!rows) {
    if (!get_buffer(args[4], true, args[1], held)) return false;
    request->output = held->buffers[0].buf;
  }
  const bool in_place = args[3] == args[4];
  if (!in_place && !get_buffer(args[3], false, args[1], held)) return false;
  const Py_buffer& input = held->buffers[held->n_buffers - 1];
  // The engine knows how many rows of a reducescatter are ours, and so does the binding.
  const Py_ssize_t room = rows ? input.len : held->buffers[0].len;
  if (request->op == HVD_REDUCESCATTER ? input.len < room : input.len != room) {
    PyErr_Format(PyExc_ValueError, "The input of %U has %zd bytes and its output %zd; expected the same.", args[1],
                 input.len, room);
    return false;
  }
  request->ndim = input.ndim;
  request->shape = reinterpret_cast<const int64_t*>(input.shape);
  request->input = input.buf;
  if (!parse_tail(args + 5, request)) return false;
  if (count == 11 && !parse_splits(args[10], splits, request)) return false;
  Py_INCREF(args[4]);
  held->result = args[4];
  held->calls_result = rows && args[4] != Py_None;
  return true;
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_REQUESTS_H_
