// horovod._core.TlsSession: one end of an encrypted connection, for the meeting of the ranks; then the engine takes it.
// Included by python_module.cc alone.
#ifndef HOROVOD_API_PYTHON_TLS_H_
#define HOROVOD_API_PYTHON_TLS_H_

#include <vector>

#include "api/python_operations.h"

namespace horovod::python {

struct TlsSession {
  PyObject_HEAD hvd_tls* session;
};

inline PyTypeObject* tls_session_type = nullptr;

inline hvd_tls* session_of(PyObject* object) { return reinterpret_cast<TlsSession*>(object)->session; }

inline PyObject* tls_session_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* library = nullptr;
  int listening = 0;
  const char* key = nullptr;
  Py_ssize_t key_bytes = 0;
  if (PyArg_ParseTuple(args, "spy#:TlsSession", &library, &listening, &key, &key_bytes) == 0) return nullptr;
  if (key_bytes != HVD_TLS_KEY_BYTES) {
    PyErr_Format(PyExc_ValueError, "TlsSession: a key of %zd bytes; expected %d.", key_bytes, HVD_TLS_KEY_BYTES);
    return nullptr;
  }
  hvd_tls* session = nullptr;
  const hvd_status status = hvd_tls_open(library, listening, reinterpret_cast<const uint8_t*>(key), &session);
  if (status != HVD_OK) return raise_status(status, hvd_last_error());
  auto* self = allocate<TlsSession>(type);
  if (self == nullptr) {
    hvd_tls_close(session);
    return nullptr;
  }
  self->session = session;
  return reinterpret_cast<PyObject*>(self);
}

inline void tls_session_dealloc(PyObject* object) {
  hvd_tls_close(session_of(object));
  deallocate(object);
}

// True once it is done, false while it is pending.
inline PyObject* is_done(hvd_status status) {
  if (status != HVD_OK && status != HVD_PENDING) return raise_status(status, hvd_last_error());
  return PyBool_FromLong(status == HVD_OK);
}

inline PyObject* tls_session_handshake(PyObject* self, PyObject* argument) {
  int fd = -1;
  return to_int(argument, &fd) ? is_done(hvd_tls_handshake(session_of(self), fd)) : nullptr;
}

inline PyObject* tls_session_flush(PyObject* self, PyObject* argument) {
  int fd = -1;
  return to_int(argument, &fd) ? is_done(hvd_tls_flush(session_of(self), fd)) : nullptr;
}

inline PyObject* tls_session_has_output(PyObject* self, PyObject*) {
  return PyBool_FromLong(hvd_tls_has_output(session_of(self)));
}

inline PyObject* tls_session_read(PyObject* self, PyObject* args) {
  int fd = -1;
  Py_ssize_t most = 0;
  if (PyArg_ParseTuple(args, "in:read", &fd, &most) == 0) return nullptr;
  if (most < 1) {
    PyErr_SetString(PyExc_ValueError, "TlsSession: expected to read a byte at least.");
    return nullptr;
  }
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, most);
  if (bytes == nullptr) return nullptr;
  size_t read = 0;
  const hvd_status status =
      hvd_tls_read(session_of(self), fd, PyBytes_AsString(bytes), static_cast<size_t>(most), &read);
  PyObject* result = nullptr;
  if (status == HVD_OK) {
    result = PyBytes_FromStringAndSize(PyBytes_AsString(bytes), static_cast<Py_ssize_t>(read));
  } else {
    result = status == HVD_PENDING ? none() : raise_status(status, hvd_last_error());
  }
  Py_DECREF(bytes);
  return result;
}

inline PyObject* tls_session_write(PyObject* self, PyObject* args) {
  int fd = -1;
  const char* data = nullptr;
  Py_ssize_t bytes = 0;
  if (PyArg_ParseTuple(args, "iy#:write", &fd, &data, &bytes) == 0) return nullptr;
  size_t written = 0;
  const hvd_status status = hvd_tls_write(session_of(self), fd, data, static_cast<size_t>(bytes), &written);
  if (status != HVD_OK && status != HVD_PENDING) return raise_status(status, hvd_last_error());
  return PyLong_FromSize_t(written);
}

inline PyObject* make_tls_session_type() {
  static PyMethodDef methods[] = {
      {"handshake", tls_session_handshake, METH_O,
       "handshake(fd) -> bool\n\nWhether it is done; else to be called again when the socket is ready."},
      {"read", tls_session_read, METH_VARARGS,
       "read(fd, most) -> bytes | None\n\nNone: there is nothing now. Empty: the connection has ended."},
      {"write", tls_session_write, METH_VARARGS, "write(fd, data) -> int\n\nHow many bytes it has taken."},
      {"flush", tls_session_flush, METH_O, "flush(fd) -> bool\n\nWhether all that was taken is sent."},
      {"has_output", tls_session_has_output, METH_NOARGS, "has_output() -> bool\n\nWhether flush has something to do."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(tls_session_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(tls_session_dealloc)},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("TlsSession(library, listening, key)\n\nOne end of an encrypted connection.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"horovod._core.TlsSession", sizeof(TlsSession), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  tls_session_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

// A sequence of sessions; None where there is none.
inline bool to_sessions(PyObject* sequence, std::vector<hvd_tls*>* sessions) {
  const Py_ssize_t n = PySequence_Size(sequence);
  if (n < 0) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    if (item == nullptr) return false;
    const bool good = item == Py_None || PyObject_TypeCheck(item, tls_session_type) != 0;
    sessions->push_back(good && item != Py_None ? session_of(item) : nullptr);
    Py_DECREF(item);  // the sequence has it
    if (!good) {
      PyErr_SetString(PyExc_TypeError, "expected TlsSession or None");
      return false;
    }
  }
  return true;
}

inline PyObject* py_tls_load(PyObject*, PyObject* argument) {
  const char* library = PyUnicode_AsUTF8AndSize(argument, nullptr);
  if (library == nullptr) return nullptr;
  const char* version = nullptr;
  const hvd_status status = hvd_tls_load(library, &version);
  return status == HVD_OK ? PyUnicode_FromString(version) : raise_status(status, hvd_last_error());
}

}  // namespace horovod::python
#endif  // HOROVOD_API_PYTHON_TLS_H_
