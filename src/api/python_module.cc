// horovod._core: the C interface for Python, and nothing above it. Names, dtypes and defaults are the bindings'
// business; operations and handles are in python_operations.h, the short way of small ones in python_plain.h, memory of
// the engine in python_memory.h, encryption in python_tls.h, the life cycle and the module itself are here.
#include <new>
#include <string>
#include <vector>

#include "api/python_operations.h"
#include "api/python_plain_arrays.h"
#include "api/python_plain_tensors.h"
#include "api/python_tls.h"

namespace horovod::python {
namespace {

// ---- Life cycle -----------------------------------------------------------------------------------------------------

bool to_ints(PyObject* sequence, std::vector<int>* values) {
  const Py_ssize_t n = PySequence_Size(sequence);
  if (n < 0) return false;
  values->resize(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    if (item == nullptr) return false;
    const bool good = to_int(item, &(*values)[static_cast<size_t>(i)]);
    Py_DECREF(item);
    if (!good) return false;
  }
  return true;
}

bool to_process_sets(PyObject* sequence, std::vector<int>* sizes, std::vector<int>* ranks) {
  const Py_ssize_t n = PySequence_Size(sequence);
  if (n < 0) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    std::vector<int> members;
    const bool good = item != nullptr && to_ints(item, &members);
    Py_XDECREF(item);
    if (!good) return false;
    sizes->push_back(static_cast<int>(members.size()));
    ranks->insert(ranks->end(), members.begin(), members.end());
  }
  return true;
}

// A sequence of strings; the pointers are valid as long as the strings.
bool to_names(PyObject* sequence, std::vector<std::string>* names) {
  const Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    const char* text = item == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(item, nullptr);
    if (text != nullptr) names->emplace_back(text);
    Py_XDECREF(item);
    if (text == nullptr) return false;
  }
  return true;
}

PyObject* init(PyObject* args, PyObject* keywords) {
  static const char* names[] = {"rank",
                                "size",
                                "local_rank",
                                "local_size",
                                "cross_rank",
                                "cross_size",
                                "segment_fd",
                                "hosts",
                                "host_of",
                                "pids",
                                "links",
                                "controls",
                                "link_sessions",
                                "control_sessions",
                                "alive_fds",
                                "doorbells",
                                "arena_fds",
                                "process_sets",
                                "fusion_threshold",
                                "cache_capacity",
                                "heartbeat_timeout",
                                "stall_warning",
                                "stall_shutdown",
                                "allreduce_ring",
                                "log_level",
                                "log_hide_time",
                                nullptr};
  hvd_config config = {};
  config.struct_size = sizeof(config);
  PyObject *py_hosts, *py_host_of, *py_pids, *py_links, *py_controls, *py_alive_fds, *py_doorbells, *py_arena_fds;
  PyObject *py_link_sessions, *py_control_sessions, *py_sets;
  long long fusion_threshold = 0;
  if (PyArg_ParseTupleAndKeywords(
          args, keywords, "$iiiiiiiOOOOOOOOOOOLidddpip:init", const_cast<char**>(names), &config.rank, &config.size,
          &config.local_rank, &config.local_size, &config.cross_rank, &config.cross_size, &config.segment_fd, &py_hosts,
          &py_host_of, &py_pids, &py_links, &py_controls, &py_link_sessions, &py_control_sessions, &py_alive_fds,
          &py_doorbells, &py_arena_fds, &py_sets, &fusion_threshold, &config.cache_capacity, &config.heartbeat_timeout,
          &config.stall_warning, &config.stall_shutdown, &config.allreduce_ring, &config.log_level,
          &config.log_hide_time) == 0) {
    return nullptr;
  }
  std::vector<std::string> host_names;
  std::vector<hvd_tls*> link_sessions, control_sessions;
  std::vector<int> host_of, pids, links, controls, alive_fds, doorbells, arena_fds, set_sizes, set_ranks;
  if (!to_names(py_hosts, &host_names) || !to_ints(py_host_of, &host_of) || !to_ints(py_pids, &pids) ||
      !to_ints(py_links, &links) || !to_ints(py_controls, &controls) || !to_ints(py_alive_fds, &alive_fds) ||
      !to_ints(py_doorbells, &doorbells) || !to_ints(py_arena_fds, &arena_fds) ||
      !to_sessions(py_link_sessions, &link_sessions) || !to_sessions(py_control_sessions, &control_sessions) ||
      !to_process_sets(py_sets, &set_sizes, &set_ranks)) {
    return nullptr;
  }
  const size_t size = config.size > 0 ? static_cast<size_t>(config.size) : 0;
  const size_t local_size = config.local_size > 0 ? static_cast<size_t>(config.local_size) : 0;
  const struct {
    const char* name;
    size_t count, expected;
  } lists[] = {{"host_of", host_of.size(), size},
               {"pids", pids.size(), size},
               {"links", links.size(), size},
               {"controls", controls.size(), host_names.size()},
               {"link_sessions", link_sessions.size(), size},
               {"control_sessions", control_sessions.size(), host_names.size()},
               {"alive_fds", alive_fds.size(), local_size},
               {"doorbells", doorbells.size(), 2 * local_size},
               {"arena_fds", arena_fds.size(), local_size}};
  for (const auto& list : lists) {
    if (list.count == list.expected) continue;
    PyErr_Format(PyExc_ValueError, "init: expected %zu %s, got %zu.", list.expected, list.name, list.count);
    return nullptr;
  }
  std::vector<const char*> host_texts;
  for (const std::string& name : host_names) host_texts.push_back(name.c_str());
  config.n_hosts = static_cast<int32_t>(host_texts.size());
  config.hosts = host_texts.data();
  config.host_of = host_of.data();
  config.pids = pids.data();
  config.links = links.data();
  config.controls = controls.data();
  config.link_sessions = link_sessions.data();
  config.control_sessions = control_sessions.data();
  config.alive_fds = alive_fds.data();
  config.doorbells = doorbells.data();
  config.arena_fds = arena_fds.data();
  config.n_process_sets = static_cast<int32_t>(set_sizes.size());
  config.process_set_sizes = set_sizes.data();
  config.process_set_ranks = set_ranks.data();
  config.fusion_threshold = fusion_threshold;
  PyThreadState* thread = PyEval_SaveThread();
  const hvd_status status = hvd_init(&config);
  PyEval_RestoreThread(thread);
  return status == HVD_OK ? none() : raise_status(status, hvd_last_error());
}

PyObject* py_init(PyObject*, PyObject* args, PyObject* keywords) {
  try {
    return init(args, keywords);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* py_shutdown(PyObject*, PyObject*) {
  PyThreadState* thread = PyEval_SaveThread();
  const hvd_status status = hvd_shutdown();
  PyEval_RestoreThread(thread);
  if (status != HVD_OK && status != HVD_NOT_INITIALIZED) return raise_status(status, hvd_last_error());
  settle_records();
  return none();
}

PyObject* py_is_initialized(PyObject*, PyObject*) { return PyBool_FromLong(hvd_is_initialized()); }

PyObject* py_version(PyObject*, PyObject*) { return PyUnicode_FromString(hvd_version()); }

PyObject* py_segment_create(PyObject*, PyObject* args) {
  int local_size = 0;
  int size = 0;
  int cache_capacity = 0;
  unsigned long long generation = 0;
  unsigned long long nonce = 0;
  if (PyArg_ParseTuple(args, "iiiKK:segment_create", &local_size, &size, &cache_capacity, &generation, &nonce) == 0) {
    return nullptr;
  }
  int fd = -1;
  const hvd_status status = hvd_segment_create(local_size, size, cache_capacity, generation, nonce, &fd);
  return status == HVD_OK ? PyLong_FromLong(fd) : raise_status(status, hvd_last_error());
}

PyObject* py_segment_probe(PyObject*, PyObject* argument) {
  int fd = 0;
  uint64_t generation = 0;
  uint64_t nonce = 0;
  if (!to_int(argument, &fd)) return nullptr;
  const hvd_status status = hvd_segment_probe(fd, &generation, &nonce);
  if (status != HVD_OK) return raise_status(status, hvd_last_error());
  return Py_BuildValue("KK", static_cast<unsigned long long>(generation), static_cast<unsigned long long>(nonce));
}

PyObject* py_arena_fd(PyObject*, PyObject*) { return PyLong_FromLong(hvd_arena_fd()); }

PyObject* py_counters(PyObject*, PyObject*) {
  hvd_counters counters = {};
  counters.struct_size = sizeof(counters);
  const hvd_status status = hvd_get_counters(&counters);
  if (status != HVD_OK) return raise_status(status, hvd_last_error());
  const struct {
    const char* name;
    uint64_t value;
  } fields[] = {
      {"requests_submitted", counters.requests_submitted},
      {"requests_by_bit", counters.requests_by_bit},
      {"request_messages", counters.request_messages},
      {"log_entries", counters.log_entries},
      {"batches", counters.batches},
      {"tensors", counters.tensors},
      {"bytes_in", counters.bytes_in},
      {"chunks", counters.chunks},
      {"bytes_placed", counters.bytes_placed},
      {"doorbells", counters.doorbells},
      {"sleeps", counters.sleeps},
      {"role_changes", counters.role_changes},
      {"log_bytes", counters.log_bytes},
      {"cache_evictions", counters.cache_evictions},
      {"stall_warnings", counters.stall_warnings},
      {"net_bytes_out", counters.net_bytes_out},
      {"net_payload_out", counters.net_payload_out},
      {"net_frames_out", counters.net_frames_out},
      {"control_bytes", counters.control_bytes},
      {"control_records", counters.control_records},
      {"requests_standing", counters.requests_standing},
      {"requests_in_sequence", counters.requests_in_sequence},
  };
  PyObject* dict = PyDict_New();
  if (dict == nullptr) return nullptr;
  for (const auto& field : fields) {
    PyObject* value = PyLong_FromUnsignedLongLong(field.value);
    if (value == nullptr || PyDict_SetItemString(dict, field.name, value) != 0) {
      Py_XDECREF(value);
      Py_DECREF(dict);
      return nullptr;
    }
    Py_DECREF(value);
  }
  return dict;
}

// ---- The module -----------------------------------------------------------------------------------------------------

PyMethodDef methods[] = {
    {"submit", method(py_submit), METH_FASTCALL,
     "submit(op, name, dtype, shape, in_ptr, out_ptr, reduce_op, root, process_set, prescale, postscale, result, "
     "keep_alive[, splits]) -> handle\n\nStarts an operation; wait(handle) returns result, or result() if it can be "
     "called. ALLGATHER and ALLTOALL: it returns result(rows), or the rows if result is None. JOIN and "
     "ADD_PROCESS_SET: it returns a number."},
    {"run", method(py_run), METH_FASTCALL, "run(<as submit>) -> result\n\nRuns an operation to its end."},
    {"submit_buffers", method(py_submit_buffers), METH_FASTCALL,
     "submit_buffers(op, name, dtype, input, output, reduce_op, root, process_set, prescale, postscale[, splits]) -> "
     "handle\n\nAs submit, on objects with the buffer protocol; the result is output. ALLGATHER and ALLTOALL: output "
     "is the function that makes the result from the rows, or None."},
    {"run_buffers", method(py_run_buffers), METH_FASTCALL,
     "run_buffers(<as submit_buffers>) -> result\n\nRuns an operation to its end."},
    {"submit_all", py_submit_all, METH_O,
     "submit_all(requests) -> handles\n\nStarts an operation for each tuple of submit's arguments in a list. If one is "
     "refused those before it go on, and nobody gets their results."},
    {"submit_all_buffers", py_submit_all_buffers, METH_O,
     "submit_all_buffers(requests) -> handles\n\nAs submit_all, with submit_buffers' arguments."},
    {"poll", py_poll, METH_O, "poll(handle) -> bool\n\nWhether the operation has ended; ValueError if unknown."},
    {"wait", py_wait, METH_O, "wait(handle) -> result\n\nWaits for the operation and forgets it; None if unknown."},
    {"wait_all", method(py_wait_all), METH_FASTCALL,
     "wait_all(handles, results, errors)\n\nWaits for the handles of a list from the len(results)-th on. Appends to "
     "results what each returns; for one that has failed None, and to errors its exception."},
    {"forget", py_forget, METH_O, "forget(handle)\n\nGives up a handle without waiting for its operation."},
    {"plain_arrays", py_plain_arrays, METH_VARARGS,
     "plain_arrays(dense, other, array_api, codes, global_process_set) -> Plain\n\nThe short way for NumPy's arrays."},
    {"plain_tensors", py_plain_tensors, METH_VARARGS,
     "plain_tensors(exchange_api, type, parameter_type, empty_like, increment_version, compiler, global_process_set) "
     "-> "
     "Plain\n\nThe short way for PyTorch's tensors."},
    {"init", method(py_init), METH_VARARGS | METH_KEYWORDS, "init(**config)\n\nStarts the engine: see hvd_config."},
    {"shutdown", py_shutdown, METH_NOARGS, "shutdown()\n\nStops the engine; everything pending fails."},
    {"is_initialized", py_is_initialized, METH_NOARGS, "is_initialized() -> bool"},
    {"version", py_version, METH_NOARGS, "version() -> str\n\nThe version of the engine."},
    {"segment_create", py_segment_create, METH_VARARGS,
     "segment_create(local_size, size, cache_capacity, generation, nonce) -> fd"},
    {"segment_probe", py_segment_probe, METH_O, "segment_probe(fd) -> (generation, nonce)"},
    {"tls_load", py_tls_load, METH_O,
     "tls_load(library) -> str\n\nThe version of that libssl; HorovodInternalError if it can't be used."},
    {"arena_fd", py_arena_fd, METH_NOARGS, "arena_fd() -> fd\n\nOf this process's shared memory; -1 if it has none."},
    {"counters", py_counters, METH_NOARGS, "counters() -> dict\n\nWhat this rank's engine has done since init."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "horovod._core",
                          "The engine, for the bindings. Not a public interface.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

const struct {
  const char* name;
  int value;
} constants[] = {
    {"ALLREDUCE", HVD_ALLREDUCE},
    {"ALLGATHER", HVD_ALLGATHER},
    {"BROADCAST", HVD_BROADCAST},
    {"ALLTOALL", HVD_ALLTOALL},
    {"REDUCESCATTER", HVD_REDUCESCATTER},
    {"BARRIER", HVD_BARRIER},
    {"JOIN", HVD_JOIN},
    {"ADD_PROCESS_SET", HVD_ADD_PROCESS_SET},
    {"REMOVE_PROCESS_SET", HVD_REMOVE_PROCESS_SET},
    {"AVERAGE", HVD_AVERAGE},
    {"SUM", HVD_SUM},
    {"ADASUM", HVD_ADASUM},
    {"MIN", HVD_MIN},
    {"MAX", HVD_MAX},
    {"PRODUCT", HVD_PRODUCT},
    {"UINT8", HVD_UINT8},
    {"INT8", HVD_INT8},
    {"UINT16", HVD_UINT16},
    {"INT16", HVD_INT16},
    {"INT32", HVD_INT32},
    {"INT64", HVD_INT64},
    {"FLOAT16", HVD_FLOAT16},
    {"FLOAT32", HVD_FLOAT32},
    {"FLOAT64", HVD_FLOAT64},
    {"BOOL", HVD_BOOL},
    {"BFLOAT16", HVD_BFLOAT16},
    {"UINT32", HVD_UINT32},
    {"UINT64", HVD_UINT64},
    {"COMPLEX64", HVD_COMPLEX64},
    {"COMPLEX128", HVD_COMPLEX128},
    {"FLOAT8_E4M3FN", HVD_FLOAT8_E4M3FN},
    {"FLOAT8_E5M2", HVD_FLOAT8_E5M2},
};

}  // namespace
}  // namespace horovod::python

PyMODINIT_FUNC PyInit__core() {
  using namespace horovod::python;
  PyObject* exceptions = PyImport_ImportModule("horovod.common.exceptions");
  if (exceptions == nullptr) return nullptr;
  internal_error = PyObject_GetAttrString(exceptions, "HorovodInternalError");
  mismatch_error = PyObject_GetAttrString(exceptions, "HorovodMismatchError");
  Py_DECREF(exceptions);
  if (internal_error == nullptr || mismatch_error == nullptr) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject* shared_memory = make_shared_memory_type();
  PyObject* rows = make_rows_type();
  PyObject* tls_session = make_tls_session_type();
  if (make_plain_type() == nullptr || make_rows_memory_type() == nullptr) {
    Py_DECREF(module);
    return nullptr;
  }
  if (shared_memory == nullptr || PyModule_AddObjectRef(module, "SharedMemory", shared_memory) != 0 ||
      rows == nullptr || PyModule_AddObjectRef(module, "Rows", rows) != 0 || tls_session == nullptr ||
      PyModule_AddObjectRef(module, "TlsSession", tls_session) != 0) {
    Py_XDECREF(shared_memory);
    Py_XDECREF(rows);
    Py_XDECREF(tls_session);
    Py_DECREF(module);
    return nullptr;
  }
  Py_DECREF(shared_memory);  // the module has it; rows_type and tls_session_type keep their own references
  for (const auto& constant : constants) {
    if (PyModule_AddIntConstant(module, constant.name, constant.value) != 0) {
      Py_DECREF(module);
      return nullptr;
    }
  }
  return module;
}
