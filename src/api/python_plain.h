// The short way of operations on plain tensors. Included by python_module.cc alone.
//
// On the long way a binding asks its tensor many questions in Python, makes the operation's name and hands everything
// to run() or submit() of python_operations.h: dozens of Python objects and calls, which take several times as long as
// the engine does for a small tensor. Here one call does the same.
//
// What keeps the two alike: what is not plain is not touched. Then these functions return NotImplemented before
// anything has happened (no unnamed operation is counted, no exception is set, nothing is started), and the binding
// goes the long way, which knows all cases and says what is wrong. Plain are
//   the tensor       of the framework's own type, in CPU memory, dense in the order of its dimensions, of a dtype that
//                    the engine has, writable if it is written to, not to be differentiated if the result is a new one
//   the name         a str
//   the process set  one that has an id
//   numbers          of Python's own types; reductions are one of those there are
//
// What differs between frameworks is a Framework: python_plain_arrays.h (NumPy), python_plain_tensors.h (PyTorch).
#ifndef HOROVOD_API_PYTHON_PLAIN_H_
#define HOROVOD_API_PYTHON_PLAIN_H_

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "api/python_operations.h"

namespace horovod::python {

// A plain tensor.
struct Dense {
  void* data;
  int32_t ndim;
  hvd_dtype dtype;
  PyObject* type;               // the framework's dtype, if it takes that to make a result; the tensor's reference
  int64_t shape[HVD_MAX_DIMS];  // a copy: another thread may give the tensor another one as soon as we release the GIL
};

enum class Use { kInput, kInPlace, kInPlaceOfMany };  // of many: the framework is told by count_changes

class Framework {
 public:
  virtual ~Framework() = default;
  // False: not plain, and no exception is set but one that must not be dropped (see drop_exception).
  virtual bool read(PyObject* tensor, Use use, Dense* dense) const = 0;
  // Tells the framework that all tensors of a tuple are written to. As read().
  virtual bool count_changes(PyObject* /*tensors*/) const { return true; }
  // A new tensor for the result of an operation on `tensor`, of its shape but for the number of rows (-1: the same).
  virtual PyObject* make_output(PyObject* tensor, const Dense& dense, int64_t rows, void** data) const = 0;
  // A new tensor with the rows of an allgather or alltoall, whose memory it takes.
  virtual PyObject* make_result(const hvd_result& result, hvd_dtype dtype, PyObject* type) const = 0;
};

// Functions for the plain tensors of one framework. They are never freed.
struct Plain {
  PyObject_HEAD const Framework* framework;
  PyObject* global_process_set;
};

// Drops an exception that only means that something is not plain. KeyboardInterrupt and the like stay.
inline void drop_exception() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) != 0) PyErr_Clear();
}

inline PyObject* not_plain() {
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_INCREF(Py_NotImplemented);
  return Py_NotImplemented;
}

inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// ---- Arguments ------------------------------------------------------------------------------------------------------

constexpr const char* kPrefixes[] = {"allreduce.", "allgather.", "broadcast.", "alltoall.", "reducescatter."};
constexpr const char* kGroupPrefix = "grouped_allreduce.";
constexpr size_t kMostOfName = 256;    // longer ones are not plain
constexpr size_t kRoomForMember = 48;  // "_<i>of<n>"

struct PlainCall {
  hvd_request request;
  char name[kMostOfName + kRoomForMember];
  PyObject* tensor;
  const Dense* dense;
};

inline bool plain_int(PyObject* object, int32_t* value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(object, &overflow);
  *value = static_cast<int32_t>(number);
  return overflow == 0 && number == *value;
}

inline bool plain_name(PyObject* object, const char* prefix, PlainCall* call) {
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const size_t before = std::strlen(prefix);
  const auto bytes = static_cast<size_t>(length);
  if (before + bytes > kMostOfName) return false;
  std::memcpy(call->name, prefix, before);
  std::memcpy(call->name + before, text, bytes);
  call->request.name = call->name;
  call->request.name_length = before + bytes;
  return true;
}

inline bool plain_set(PyObject* process_set, PyObject* global_process_set, int32_t* id) {
  static PyObject* const attribute = interned("process_set_id");
  *id = 0;
  if (process_set == global_process_set) return true;
  PyObject* value = PyObject_GetAttr(process_set, attribute);
  if (value == nullptr) drop_exception();
  const bool plain = value != nullptr && plain_int(value, id);
  Py_XDECREF(value);
  return plain;
}

// op, (tensor), (name), process_set[, detail[, prescale, postscale]]; the detail is the reduction (None: an allreduce's
// default) or the root.
inline bool parse_unnamed(const Plain* self, PyObject* const* args, Py_ssize_t count, PlainCall* call) {
  int32_t op = 0;
  hvd_request& request = call->request;
  if (count < 4 || !plain_int(args[0], &op) || op < HVD_ALLREDUCE || op > HVD_REDUCESCATTER) return false;
  request = {};
  request.struct_size = sizeof(request);
  request.op = static_cast<hvd_op>(op);
  request.reduce_op = HVD_SUM;
  request.prescale = request.postscale = 1.0;
  if (!plain_set(args[3], self->global_process_set, &request.process_set)) return false;
  if (op == HVD_BROADCAST) return count == 5 && plain_int(args[4], &request.root);
  if (gives_rows(request.op)) return count == 4;
  if (count != 7) return false;
  const bool by_default = op == HVD_ALLREDUCE && args[4] == Py_None;
  int32_t reduction = HVD_AVERAGE;
  if ((!by_default && !plain_int(args[4], &reduction)) || reduction < HVD_AVERAGE || reduction > HVD_PRODUCT ||
      !PyFloat_CheckExact(args[5]) || !PyFloat_CheckExact(args[6])) {
    return false;
  }
  request.reduce_op = static_cast<hvd_reduce_op>(reduction);
  request.prescale = PyFloat_AsDouble(args[5]);
  request.postscale = PyFloat_AsDouble(args[6]);
  return true;
}

// prefix: nullptr for that of the operation.
inline bool parse_plain(const Plain* self, PyObject* const* args, Py_ssize_t count, const char* prefix,
                        PlainCall* call) {
  return parse_unnamed(self, args, count, call) &&
         plain_name(args[2], prefix != nullptr ? prefix : kPrefixes[call->request.op], call);
}

inline void set_tensor(PyObject* tensor, const Dense& dense, PlainCall* call) {
  call->tensor = tensor;
  call->dense = &dense;
  call->request.dtype = dense.dtype;
  call->request.ndim = dense.ndim;
  call->request.shape = dense.shape;
  call->request.input = dense.data;
}

// All arguments of an operation on one tensor.
inline bool parse_call(PyObject* self, PyObject* const* args, Py_ssize_t count, Use use, Dense* dense,
                       PlainCall* call) {
  const auto* plain = reinterpret_cast<Plain*>(self);
  if (!parse_plain(plain, args, count, nullptr, call)) return false;
  const hvd_op op = call->request.op;
  if (use == Use::kInPlace && op != HVD_ALLREDUCE && op != HVD_BROADCAST) return false;
  if (!abandoned.empty()) sweep_abandoned();
  if (!plain->framework->read(args[1], use, dense)) return false;
  set_tensor(args[1], *dense, call);
  return true;
}

// ---- Operations -----------------------------------------------------------------------------------------------------

using Act = PyObject* (*)(const hvd_request&, Held*);  // start or run

// Takes `output`, the result, which may be the tensor itself.
inline PyObject* act_into(PyObject* output, void* data, PlainCall* call, Act act) {
  call->request.output = data;
  Held held;
  held.op = call->request.op;
  held.dtype = call->request.dtype;
  held.result = output;
  if (output != call->tensor) {
    Py_INCREF(call->tensor);
    held.keep_alive = call->tensor;
  }
  return act(call->request, &held);
}

inline PyObject* act_in_place(PlainCall* call, Act act) {
  Py_INCREF(call->tensor);
  return act_into(call->tensor, call->dense->data, call, act);
}

// How many rows the result has; -1: as many as the tensor. False: not plain.
inline bool count_rows(const hvd_request& request, int64_t* rows) {
  *rows = -1;
  if (request.op != HVD_REDUCESCATTER) return true;
  hvd_place place = {};
  place.struct_size = sizeof(place);
  if (request.ndim == 0 || hvd_get_place(request.process_set, &place) != HVD_OK || place.set_rank < 0) return false;
  const int64_t all = request.shape[0];
  *rows = all / place.set_size + (place.set_rank < all % place.set_size ? 1 : 0);
  return true;
}

// The result is a new tensor, whose size is known.
inline PyObject* act_into_new(const Framework& framework, PlainCall* call, Act act) {
  int64_t rows = -1;
  if (!count_rows(call->request, &rows)) return not_plain();
  void* data = nullptr;
  PyObject* output = framework.make_output(call->tensor, *call->dense, rows, &data);
  if (output != nullptr) return act_into(output, data, call, act);
  drop_exception();
  return not_plain();
}

// The result is a new tensor, whose size the engine will find out.
inline PyObject* run_rows(const Framework& framework, const PlainCall& call) {
  Held held;
  held.op = call.request.op;
  held.dtype = call.request.dtype;
  Py_XINCREF(call.dense->type);
  held.result = call.dense->type;
  Py_INCREF(call.tensor);
  held.keep_alive = call.tensor;
  hvd_handle handle = 0;
  if (!complete(call.request, &held, &handle)) return nullptr;
  hvd_result result = {};
  result.struct_size = sizeof(result);
  const hvd_status status = hvd_take_result(handle, &result);
  PyObject* made = status == HVD_OK ? framework.make_result(result, held.dtype, held.result)
                                    : raise_status(status, hvd_last_error());
  hvd_release(handle);
  give_up(&held);
  return made;
}

inline const Framework& framework_of(PyObject* self) { return *reinterpret_cast<Plain*>(self)->framework; }

inline PyObject* py_run_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PlainCall call;
  Dense dense;
  return parse_call(self, args, count, Use::kInPlace, &dense, &call) ? act_in_place(&call, run) : not_plain();
}

inline PyObject* py_submit_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PlainCall call;
  Dense dense;
  return parse_call(self, args, count, Use::kInPlace, &dense, &call) ? act_in_place(&call, start) : not_plain();
}

inline PyObject* py_run_into_new(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PlainCall call;
  Dense dense;
  if (!parse_call(self, args, count, Use::kInput, &dense, &call)) return not_plain();
  return gives_rows(call.request.op) ? run_rows(framework_of(self), call)
                                     : act_into_new(framework_of(self), &call, run);
}

inline PyObject* py_submit_into_new(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PlainCall call;
  Dense dense;
  if (!parse_call(self, args, count, Use::kInput, &dense, &call) || gives_rows(call.request.op)) return not_plain();
  return act_into_new(framework_of(self), &call, start);
}

// ---- Groups ---------------------------------------------------------------------------------------------------------

// A tensor of a group, and where its result goes.
struct Member {
  Dense dense;
  PyObject* output = nullptr;
  void* data = nullptr;
};

// Reads all tensors and makes all outputs, so that nothing is found to be wrong when some of the group have begun.
inline bool prepare_group(const Framework& framework, PyObject* tensors, Use use, Member* members, Py_ssize_t count) {
  const bool in_place = use == Use::kInPlace;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GetItem(tensors, i);
    Member& member = members[i];
    if (!framework.read(tensor, in_place ? Use::kInPlaceOfMany : use, &member.dense)) return false;
    if (in_place) {
      Py_INCREF(tensor);
      member.output = tensor;
      member.data = member.dense.data;
    } else {
      member.output = framework.make_output(tensor, member.dense, -1, &member.data);
    }
    if (member.output == nullptr) {
      drop_exception();
      return false;
    }
  }
  return !in_place || framework.count_changes(tensors);
}

// How a member is called.
class Names {
 public:
  // By a tuple of plain names; nullptr: by the name that the call has, and its number.
  Names(const PlainCall& call, PyObject* names) : names_(names), group_length_(call.request.name_length) {}

  void set(Py_ssize_t i, Py_ssize_t count, PlainCall* call) const {
    if (names_ != nullptr) {
      plain_name(PyTuple_GetItem(names_, i), kPrefixes[call->request.op], call);
    } else {
      char* const end = call->name + group_length_;
      call->request.name_length =
          group_length_ + static_cast<size_t>(std::snprintf(end, kRoomForMember, "_%zdof%zd", i + 1, count));
    }
  }

 private:
  PyObject* const names_;
  const size_t group_length_;
};

// Starts an allreduce of each; nullptr: an exception is set. If one is refused those before it go on: see submit_each.
inline PyObject* start_group(PlainCall* call, PyObject* tensors, const Names& names, Member* members,
                             Py_ssize_t count) {
  PyObject* handles = PyList_New(0);
  bool good = handles != nullptr;
  for (Py_ssize_t i = 0; i < count && good; ++i) {
    set_tensor(PyTuple_GetItem(tensors, i), members[i].dense, call);
    names.set(i, count, call);
    PyObject* handle = act_into(std::exchange(members[i].output, nullptr), members[i].data, call, start);
    good = handle != nullptr && PyList_Append(handles, handle) == 0;
    Py_XDECREF(handle);
  }
  if (good || handles == nullptr) return handles;
  forget_all(handles);
  Py_DECREF(handles);
  return nullptr;
}

inline bool is_list(PyObject* object) { return PyList_CheckExact(object) != 0 || PyTuple_CheckExact(object) != 0; }

// names: as Names has them.
inline PyObject* submit_members(PyObject* self, PyObject* tensors, PyObject* names, Use use, PlainCall* call) {
  const Py_ssize_t size = PyTuple_Size(tensors);
  const std::unique_ptr<Member[]> members(new (std::nothrow) Member[static_cast<size_t>(size)]);
  const bool plain = members != nullptr && prepare_group(framework_of(self), tensors, use, members.get(), size);
  PyObject* handles = plain ? start_group(call, tensors, Names(*call, names), members.get(), size) : not_plain();
  for (Py_ssize_t i = 0; i < size && members != nullptr; ++i) Py_XDECREF(members[i].output);
  return handles;
}

inline PyObject* submit_group(PyObject* self, PyObject* const* args, Py_ssize_t count, Use use) {
  PlainCall call;
  if (!parse_plain(reinterpret_cast<Plain*>(self), args, count, kGroupPrefix, &call) ||
      call.request.op != HVD_ALLREDUCE || !is_list(args[1])) {
    return not_plain();
  }
  if (!abandoned.empty()) sweep_abandoned();
  PyObject* tensors = PySequence_Tuple(args[1]);  // one that stays as it is
  if (tensors == nullptr) return nullptr;
  PyObject* handles = submit_members(self, tensors, nullptr, use, &call);
  Py_DECREF(tensors);
  return handles;
}

inline bool are_plain_names(PyObject* names, PlainCall* call) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
    if (!plain_name(PyTuple_GetItem(names, i), kPrefixes[call->request.op], call)) return false;
  }
  return true;
}

// As a group, but each has a name of its own, which it would have if it was started alone.
inline PyObject* py_submit_each_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PlainCall call;
  if (!parse_unnamed(reinterpret_cast<Plain*>(self), args, count, &call) || call.request.op != HVD_ALLREDUCE ||
      !is_list(args[1]) || !is_list(args[2])) {
    return not_plain();
  }
  if (!abandoned.empty()) sweep_abandoned();
  PyObject* tensors = PySequence_Tuple(args[1]);
  PyObject* names = tensors == nullptr ? nullptr : PySequence_Tuple(args[2]);
  PyObject* handles = nullptr;
  if (names != nullptr) {
    const bool plain = PyTuple_Size(names) == PyTuple_Size(tensors) && are_plain_names(names, &call);
    handles = plain ? submit_members(self, tensors, names, Use::kInPlace, &call) : not_plain();
  }
  Py_XDECREF(tensors);
  Py_XDECREF(names);
  return handles;
}

inline PyObject* py_submit_group_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return submit_group(self, args, count, Use::kInPlace);
}

inline PyObject* py_submit_group_into_new(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return submit_group(self, args, count, Use::kInput);
}

// ---- The type -------------------------------------------------------------------------------------------------------

inline PyTypeObject* plain_type = nullptr;

// Takes the framework, which is null if there was no memory for it.
inline PyObject* make_plain(const Framework* framework, PyObject* global_process_set) {
  if (framework == nullptr) return PyErr_NoMemory();
  auto* self = allocate<Plain>(plain_type);
  if (self == nullptr) {
    delete framework;
    return nullptr;
  }
  self->framework = framework;
  Py_INCREF(global_process_set);
  self->global_process_set = global_process_set;
  return reinterpret_cast<PyObject*>(self);
}

template <typename Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline PyObject* make_plain_type() {
  static PyMethodDef methods[] = {
      {"run_in_place", method(py_run_in_place), METH_FASTCALL,
       "run_in_place(op, tensor, name, process_set, detail[, prescale, postscale])\n\nRuns an operation and returns "
       "the "
       "tensor; NotImplemented, and nothing was done, if an argument is not plain. detail: reduction or root."},
      {"submit_in_place", method(py_submit_in_place), METH_FASTCALL,
       "submit_in_place(<as run_in_place>) -> handle | NotImplemented"},
      {"run_into_new", method(py_run_into_new), METH_FASTCALL,
       "run_into_new(op, tensor, name, process_set[, detail[, prescale, postscale]])\n\nAs run_in_place, but returns a "
       "new tensor."},
      {"submit_into_new", method(py_submit_into_new), METH_FASTCALL,
       "submit_into_new(<as run_into_new>) -> handle | NotImplemented"},
      {"submit_group_in_place", method(py_submit_group_in_place), METH_FASTCALL,
       "submit_group_in_place(op, tensors, <as run_in_place>) -> handles | NotImplemented"},
      {"submit_each_in_place", method(py_submit_each_in_place), METH_FASTCALL,
       "submit_each_in_place(op, tensors, names, <as run_in_place>) -> handles | NotImplemented"},
      {"submit_group_into_new", method(py_submit_group_into_new), METH_FASTCALL,
       "submit_group_into_new(op, tensors, <as run_into_new>) -> handles | NotImplemented"},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("The short way of operations on the plain tensors of a framework.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.Plain", sizeof(Plain), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromSpec(&spec);
  plain_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_PLAIN_H_
