// Operations of horovod._core: starting, running, waiting, handles. Included by python_module.cc alone.
//
// Who keeps the memory alive
//   An operation reads and writes memory that belongs to Python objects. `Held` is the set of references (and exported
//   buffers) of one operation; it is given up only when the operation has ended:
//   - run():     on the stack of the call. If an exception interrupts the wait (Ctrl-C), it moves to `abandoned`, which
//                is swept by the next submission and by shutdown().
//   - submit():  in `records`, by handle, until wait() has returned the result or the error. shutdown() ends every
//                operation: it keeps each outcome for a later wait() and gives up the memory.
//   Both tables are guarded by the GIL. They are never destroyed: at interpreter exit the objects may be gone before
//   us.
//
// What an operation returns
//   Mostly an object that was handed in (`Held::result`). Of an allgather or alltoall the engine makes the result: then
//   that object is a function, called with the Rows, or None for the Rows themselves. Join and HVD_ADD_PROCESS_SET
//   return a number. The engine gives its part once, so it is kept (`Held::given`) for all threads that wait.
//   Of other operations by pointer the object may be a function too, called without arguments once the operation has
//   ended well, by each wait() and with the GIL: a binding copies out of a temporary there.
//
// No destructor here touches Python: a daemon thread that takes the GIL back while the interpreter ends is unwound by
// pthread_exit, without the GIL.
#ifndef HOROVOD_API_PYTHON_OPERATIONS_H_
#define HOROVOD_API_PYTHON_OPERATIONS_H_

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/python_memory.h"
#include "api/python_requests.h"

namespace horovod::python {

constexpr int64_t kSliceMs = 100;  // how long Ctrl-C may go unnoticed

inline PyObject* internal_error = nullptr;
inline PyObject* mismatch_error = nullptr;

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
  delete[] std::exchange(held->buffers, nullptr);
  held->n_buffers = 0;
  Py_CLEAR(held->keep_alive);
  Py_CLEAR(held->result);
  Py_CLEAR(held->given);
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

// ---- Results --------------------------------------------------------------------------------------------------------

constexpr Py_ssize_t kElementBytes[] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2, 4, 8, 8, 16, 1, 1};
static_assert(sizeof(kElementBytes) / sizeof(kElementBytes[0]) == HVD_DTYPES, "one entry per hvd_dtype");

// Takes what the engine made for an operation that has ended well. Runs no other Python code. False: an exception is
// set.
inline bool receive(hvd_handle handle, Held* held) {
  const bool rows = gives_rows(held->op);
  if ((!rows && !gives_number(held->op)) || held->given != nullptr) return true;
  hvd_result result = {};
  result.struct_size = sizeof(result);
  const hvd_status status = hvd_take_result(handle, &result);
  if (status != HVD_OK) {
    raise_status(status, hvd_last_error());
    return false;
  }
  held->given = rows ? make_rows(result, kElementBytes[held->dtype]) : PyLong_FromLong(result.value);
  return held->given != nullptr;
}

// What the operation returns. Takes the references; may run Python code.
inline PyObject* finish(bool calls_result, PyObject* result, PyObject* given) {
  PyObject* made = given != nullptr ? given : result;
  if (calls_result) {
    made = PyObject_CallFunctionObjArgs(result, given, nullptr);  // if given is null, without arguments
    Py_XDECREF(given);
    Py_DECREF(result);
  } else if (given != nullptr) {
    Py_XDECREF(result);
  }
  return made;
}

// ---- Starting and running -------------------------------------------------------------------------------------------

inline PyObject* start(const hvd_request& request, Held* held) {
  hvd_handle handle = 0;
  const hvd_status status = hvd_submit(&request, &handle);
  if (status != HVD_OK) {
    raise_status(status, hvd_last_error());
    give_up(held);
    return nullptr;
  }
  records[handle].held = *held;
  return PyLong_FromLongLong(handle);
}

// Runs an operation to its end with the GIL released. False: an exception is set, and `held` is given up, or kept as
// long as the engine uses the memory.
inline bool complete(const hvd_request& request, Held* held, hvd_handle* handle) {
  *handle = 0;
  PyThreadState* thread = PyEval_SaveThread();
  hvd_status status = hvd_run(&request, kSliceMs, handle);
  PyEval_RestoreThread(thread);
  if (status == HVD_PENDING) {
    status = wait_in_slices(*handle);
    if (status == HVD_PENDING) {  // interrupted
      abandoned.push_back({*handle, *held});
      return false;
    }
  }
  if (status == HVD_OK) return true;
  raise_status(status, hvd_last_error());
  if (*handle != 0) hvd_release(*handle);
  give_up(held);
  return false;
}

inline PyObject* run(const hvd_request& request, Held* held) {
  hvd_handle handle = 0;
  if (!complete(request, held, &handle)) return nullptr;
  const bool good = receive(handle, held);
  if (handle != 0) hvd_release(handle);
  PyObject* result = std::exchange(held->result, nullptr);
  PyObject* given = std::exchange(held->given, nullptr);
  give_up(held);
  if (good) return finish(held->calls_result, result, given);
  Py_XDECREF(result);
  return nullptr;
}

// Calls `act` (start or run) on the parsed request; gives up what was taken if parsing failed.
template <typename Act>
PyObject* with_pointers(const char* function, PyObject* const* args, Py_ssize_t count, Act act) {
  int64_t shape[HVD_MAX_DIMS];
  std::vector<int64_t> splits;
  hvd_request request;
  Held held;
  if (!abandoned.empty()) sweep_abandoned();
  if (parse_pointers(function, args, count, shape, &splits, &request, &held)) return act(request, &held);
  give_up(&held);
  return nullptr;
}

template <typename Act>
PyObject* with_buffers(const char* function, PyObject* const* args, Py_ssize_t count, Act act) {
  std::vector<int64_t> splits;
  hvd_request request;
  Held held;
  if (!abandoned.empty()) sweep_abandoned();
  if (parse_buffers(function, args, count, &splits, &request, &held)) return act(request, &held);
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

// ---- Groups ---------------------------------------------------------------------------------------------------------

inline PyObject* py_forget(PyObject*, PyObject* argument);

// While an exception is set: nobody will wait for the operations of a list of handles.
inline void forget_all(PyObject* handles) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (Py_ssize_t i = 0; i < PyList_Size(handles); ++i) {
    Py_XDECREF(py_forget(nullptr, PyList_GetItem(handles, i)));
  }
  PyErr_Restore(type, value, traceback);
}

// Starts an operation for each tuple of arguments in a list. If one is refused those before it go on, since other ranks
// may wait for them, but nobody gets their results.
inline PyObject* submit_each(PyObject* requests, PyObject* (*submit)(PyObject*, PyObject* const*, Py_ssize_t)) {
  constexpr Py_ssize_t kMostArguments = 14;
  const Py_ssize_t count = PyList_Size(requests);
  PyObject* handles = count < 0 ? nullptr : PyList_New(0);
  if (handles == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* request = PyList_GetItem(requests, i);
    const Py_ssize_t n = PyTuple_Size(request);
    PyObject* args[kMostArguments];
    for (Py_ssize_t a = 0; a < n && a < kMostArguments; ++a) args[a] = PyTuple_GetItem(request, a);
    PyObject* handle = n < 0 ? nullptr : submit(nullptr, args, n);
    const bool good = handle != nullptr && PyList_Append(handles, handle) == 0;
    Py_XDECREF(handle);
    if (good) continue;
    forget_all(handles);
    Py_DECREF(handles);
    return nullptr;
  }
  return handles;
}

inline PyObject* py_submit_all(PyObject*, PyObject* requests) { return submit_each(requests, py_submit); }
inline PyObject* py_submit_all_buffers(PyObject*, PyObject* requests) {
  return submit_each(requests, py_submit_buffers);
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
  const hvd_handle handle = record->first;
  const bool calls_result = record->second.held.calls_result;
  PyObject* result = nullptr;
  PyObject* given = nullptr;
  bool good = false;
  if (status != HVD_OK) {
    raise_status(status, message);
  } else if (receive(handle, &record->second.held)) {
    good = true;
    result = record->second.held.result;
    given = record->second.held.given;
    Py_XINCREF(result);
    Py_XINCREF(given);
  }
  if (record->second.waiters == 0) {
    const bool forget = record->second.end == HVD_PENDING;
    Held held = record->second.held;
    records.erase(record);  // before give_up, which may run Python code
    if (forget) hvd_release(handle);
    give_up(&held);
  }
  return good ? finish(calls_result, result, given) : nullptr;
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

// Waits for the operations of a list of handles from the len(results)-th on, and appends to `results` what each of them
// returns, for one that has failed None and to `errors` its exception. Interrupted, it can be called again.
inline PyObject* py_wait_all(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "wait_all() takes 3 positional arguments, %zd given", count);
  PyObject *handles = args[0], *results = args[1], *errors = args[2];
  for (Py_ssize_t i; (i = PyList_Size(results)) < PyList_Size(handles);) {
    if (i < 0) return nullptr;
    PyObject* result = py_wait(nullptr, PyList_GetItem(handles, i));
    if (result == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;
      PyObject *type, *error, *traceback;
      PyErr_Fetch(&type, &error, &traceback);
      PyErr_NormalizeException(&type, &error, &traceback);
      const bool kept = error != nullptr && PyList_Append(errors, error) == 0;
      Py_XDECREF(type);
      Py_XDECREF(error);
      Py_XDECREF(traceback);
      if (!kept) return nullptr;
      result = none();
    }
    const bool kept = PyList_Append(results, result) == 0;
    Py_DECREF(result);
    if (!kept) return nullptr;
  }
  return PyErr_Occurred() == nullptr ? none() : nullptr;
}

// Gives up a handle without waiting: nobody wants its result.
inline PyObject* py_forget(PyObject*, PyObject* argument) {
  int64_t handle = 0;
  if (!to_int64(argument, &handle)) return nullptr;
  const auto record = records.find(handle);
  if (record == records.end() || record->second.waiters > 0) return none();
  Held held = record->second.held;
  const bool ended = record->second.end != HVD_PENDING;
  records.erase(record);
  if (ended) {
    give_up(&held);
  } else {
    abandoned.push_back({handle, held});
  }
  return none();
}

// After hvd_shutdown: everything has ended. Keeps the outcomes for wait() and gives up the memory.
inline void settle_records() {
  sweep_abandoned();
  std::vector<Held> ended;
  for (auto& [handle, record] : records) {
    if (record.end != HVD_PENDING || record.waiters > 0) continue;
    record.end = hvd_poll(handle);
    if (record.end == HVD_PENDING) continue;
    record.message = hvd_last_error();
    if (record.end == HVD_OK && !receive(handle, &record.held)) {
      PyErr_Clear();
      record.end = HVD_SYSTEM;
      record.message = "There was no memory for the result.";
    }
    hvd_release(handle);
    ended.push_back(record.held);
    if (record.end == HVD_OK) {
      ended.back().result = ended.back().given = nullptr;
      Held kept;
      kept.op = record.held.op;
      kept.calls_result = record.held.calls_result;
      kept.result = record.held.result;
      kept.given = record.held.given;
      record.held = kept;
    } else {
      record.held = Held();
    }
  }
  for (Held& held : ended) give_up(&held);
}

}  // namespace horovod::python

#endif  // HOROVOD_API_PYTHON_OPERATIONS_H_
