// Operations of horovod._core: from Python arguments to hvd_request, and handles. Included by python_module.cc alone.
//
// Who keeps the memory alive
//   An operation reads and writes memory that belongs to Python objects. `Held` is the set of references (and exported
//   buffers) of one operation; it is given up only when the operation has ended:
//   - run():     on the stack of the call. If an exception interrupts the wait (Ctrl-C), it moves to `abandoned`, which
//   is
//                swept by the next submission and by shutdown().
//   - submit():  in `records`, by handle, until wait() has returned the result or the error. shutdown() ends every
//                operation: it keeps each outcome for a later wait() and gives up the memory.
//   Both tables are guarded by the GIL. They are never destroyed: at interpreter exit the objects may be gone before
//   us.
//
// No destructor here touches Python: a daemon thread that takes the GIL back while the interpreter ends is unwound by
// pthread_exit, without the GIL.
#ifndef HOROVOD_API_PYTHON_OPERATIONS_H_
#define HOROVOD_API_PYTHON_OPERATIONS_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "api/horovod.h"

namespace horovod::python {

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "shapes are handed over without conversion");

constexpr int64_t kSliceMs = 100;  // how long Ctrl-C may go unnoticed

inline PyObject* internal_error = nullptr;
inline PyObject* mismatch_error = nullptr;

struct Held {
  Py_buffer buffers[2];
  int n_buffers = 0;
  PyObject* result = nullptr;      // what the operation returns
  PyObject* keep_alive = nullptr;  // whatever else owns the memory
};

struct Record {
  Held held;
  int waiters = 0;               // threads inside hvd_wait; the last one to leave forgets the handle
  hvd_status end = HVD_PENDING;  // the outcome, once shutdown() has asked for it
  std::string message;
};

struct Abandoned {
  hvd_handle handle;
  Held held;
};

inline auto& records = *new std::unordered_map<hvd_handle, Record>();
inline auto& abandoned = *new std::vector<Abandoned>();

inline void give_up(Held* held) {
  for (int i = 0; i < held->n_buffers; ++i) PyBuffer_Release(&held->buffers[i]);
  held->n_buffers = 0;
  Py_CLEAR(held->keep_alive);
  Py_CLEAR(held->result);
}

inline PyObject* raise_status(hvd_status status, const char* message) {
  PyObject* type = status == HVD_INVALID ? PyExc_ValueError : status == HVD_MISMATCH ? mismatch_error : internal_error;
  PyErr_SetString(type, message[0] != '\0' ? message : "The operation failed without a message.");
  return nullptr;
}

inline PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Frees the memory of interrupted operations that have ended since.
inline void sweep_abandoned() {
  std::vector<Abandoned> pending;
  std::vector<Abandoned> ended;
  for (const Abandoned& operation : abandoned) {
    (hvd_poll(operation.handle) == HVD_PENDING ? pending : ended).push_back(operation);
  }
  abandoned.swap(pending);  // before give_up, which may run Python code that comes back here
  for (Abandoned& operation : ended) {
    hvd_release(operation.handle);
    give_up(&operation.held);
  }
}

// Waits for a pending handle with the GIL released. HVD_PENDING: a Python exception (a signal handler's) is set.
inline hvd_status wait_in_slices(hvd_handle handle) {
  for (;;) {
    if (PyErr_CheckSignals() != 0) return HVD_PENDING;
    PyThreadState* thread = PyEval_SaveThread();
    const hvd_status status = hvd_wait(handle, kSliceMs);
    PyEval_RestoreThread(thread);
    if (status != HVD_PENDING) return status;
  }
}

// ---- Requests -------------------------------------------------------------------------------------------------------

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
inline bool parse_head(PyObject* const* args, hvd_request* request) {
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

inline bool wrong_count(const char* function, Py_ssize_t expected, Py_ssize_t count) {
  if (count == expected) return false;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, %zd given", function, expected, count);
  return true;
}

// Arguments by pointer: op, name, dtype, shape, in_ptr, out_ptr, <tail>, result, keep_alive.
inline bool parse_pointers(const char* function, PyObject* const* args, Py_ssize_t count, int64_t* shape,
                           hvd_request* request, Held* held) {
  if (wrong_count(function, 13, count) || !parse_head(args, request)) return false;
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
  Py_INCREF(args[11]);
  held->result = args[11];
  Py_INCREF(args[12]);
  held->keep_alive = args[12];
  return true;
}

// A dense buffer of `object`, or a ValueError that says what is wrong with it.
inline bool get_buffer(PyObject* object, bool writable, PyObject* name, Held* held) {
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

// Arguments by buffer: op, name, dtype, input, output, <tail>. The result is the output object.
inline bool parse_buffers(const char* function, PyObject* const* args, Py_ssize_t count, hvd_request* request,
                          Held* held) {
  if (wrong_count(function, 10, count) || !parse_head(args, request)) return false;
  if (!get_buffer(args[4], true, args[1], held)) return false;
  const bool in_place = args[3] == args[4];
  if (!in_place && !get_buffer(args[3], false, args[1], held)) return false;
  const Py_buffer& output = held->buffers[0];
  const Py_buffer& input = held->buffers[in_place ? 0 : 1];
  if (input.len != output.len) {
    PyErr_Format(PyExc_ValueError, "The input of %U has %zd bytes and its output %zd; expected the same.", args[1],
                 input.len, output.len);
    return false;
  }
  request->ndim = input.ndim;
  request->shape = reinterpret_cast<const int64_t*>(input.shape);
  request->input = input.buf;
  request->output = output.buf;
  if (!parse_tail(args + 5, request)) return false;
  Py_INCREF(args[4]);
  held->result = args[4];
  return true;
}

inline PyObject* start(const hvd_request& request, Held* held) {
  if (!abandoned.empty()) sweep_abandoned();
  hvd_handle handle = 0;
  const hvd_status status = hvd_submit(&request, &handle);
  if (status != HVD_OK) {
    raise_status(status, hvd_last_error());
    give_up(held);
    return nullptr;
  }
  // The copy of a Py_buffer is good for releasing it; its shape, which may point into the original, is not used again.
  records[handle].held = *held;
  return PyLong_FromLongLong(handle);
}

inline PyObject* run(const hvd_request& request, Held* held) {
  if (!abandoned.empty()) sweep_abandoned();
  hvd_handle handle = 0;
  PyThreadState* thread = PyEval_SaveThread();
  hvd_status status = hvd_run(&request, kSliceMs, &handle);
  PyEval_RestoreThread(thread);
  if (status == HVD_PENDING) {
    status = wait_in_slices(handle);
    if (status == HVD_PENDING) {  // interrupted: the engine still uses the memory
      abandoned.push_back({handle, *held});
      return nullptr;
    }
    if (status != HVD_OK) raise_status(status, hvd_last_error());
    hvd_release(handle);
  } else if (status != HVD_OK) {
    raise_status(status, hvd_last_error());
  }
  PyObject* result = held->result;
  held->result = nullptr;
  give_up(held);
  if (status == HVD_OK) return result;
  Py_XDECREF(result);
  return nullptr;
}

// Calls `act` (start or run) on the parsed request; gives up what was taken if parsing failed.
template <typename Act>
PyObject* with_pointers(const char* function, PyObject* const* args, Py_ssize_t count, Act act) {
  int64_t shape[HVD_MAX_DIMS];
  hvd_request request;
  Held held;
  if (parse_pointers(function, args, count, shape, &request, &held)) return act(request, &held);
  give_up(&held);
  return nullptr;
}

template <typename Act>
PyObject* with_buffers(const char* function, PyObject* const* args, Py_ssize_t count, Act act) {
  hvd_request request;
  Held held;
  if (parse_buffers(function, args, count, &request, &held)) return act(request, &held);
  give_up(&held);
  return nullptr;
}

inline PyObject* py_submit(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return with_pointers("submit", args, count, start);
}
inline PyObject* py_run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return with_pointers("run", args, count, run);
}
inline PyObject* py_submit_buffers(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return with_buffers("submit_buffers", args, count, start);
}
inline PyObject* py_run_buffers(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return with_buffers("run_buffers", args, count, run);
}

// ---- Handles --------------------------------------------------------------------------------------------------------

inline PyObject* py_poll(PyObject*, PyObject* argument) {
  int64_t handle = 0;
  if (!to_int64(argument, &handle)) return nullptr;
  const auto found = records.find(handle);
  if (found == records.end()) {
    PyErr_Format(PyExc_ValueError, "Handle %lld was not created or has been cleared.", static_cast<long long>(handle));
    return nullptr;
  }
  const bool ended = found->second.end != HVD_PENDING || hvd_poll(handle) != HVD_PENDING;
  return PyBool_FromLong(ended ? 1 : 0);
}

// Ends the handle's record: its result, or the exception of `status`.
inline PyObject* conclude(std::unordered_map<hvd_handle, Record>::iterator record, hvd_status status,
                          const char* message) {
  PyObject* result = nullptr;
  if (status == HVD_OK) {
    result = record->second.held.result;
    Py_XINCREF(result);
  } else {
    raise_status(status, message);
  }
  if (record->second.waiters == 0) {
    const bool forget = record->second.end == HVD_PENDING;
    Held held = record->second.held;
    const hvd_handle handle = record->first;
    records.erase(record);  // before give_up, which may run Python code
    if (forget) hvd_release(handle);
    give_up(&held);
  }
  return result;
}

inline PyObject* py_wait(PyObject*, PyObject* argument) {
  int64_t handle = 0;
  if (!to_int64(argument, &handle)) return nullptr;
  auto record = records.find(handle);
  if (record == records.end()) return none();
  if (record->second.end != HVD_PENDING) {
    const std::string message = record->second.message;
    return conclude(record, record->second.end, message.c_str());
  }
  hvd_status status = hvd_poll(handle);
  if (status == HVD_PENDING) {
    ++record->second.waiters;
    status = wait_in_slices(handle);
    record = records.find(handle);  // still there, since we are counted; but the table may have been rehashed
    --record->second.waiters;
    if (status == HVD_PENDING) return nullptr;  // interrupted: the handle stays valid
  }
  return conclude(record, status, hvd_last_error());
}

// After hvd_shutdown: everything has ended. Keeps the outcomes for wait() and gives up the memory.
inline void settle_records() {
  sweep_abandoned();
  std::vector<Held> ended;
  for (auto& [handle, record] : records) {
    if (record.end != HVD_PENDING || record.waiters > 0) continue;
    const hvd_status end = hvd_poll(handle);
    if (end == HVD_PENDING) continue;
    record.end = end;
    record.message = hvd_last_error();
    hvd_release(handle);
    ended.push_back(record.held);
    if (end == HVD_OK) {
      ended.back().result = nullptr;
      record.held = Held{.buffers = {}, .result = record.held.result};
    } else {
      record.held = Held();
    }
  }
  for (Held& held : ended) give_up(&held);
}

}  // namespace horovod::python

#endif  // HOROVOD_API_PYTHON_OPERATIONS_H_
