#include "engine/request.h"

#include "collectives/batch.h"

namespace hvd {

size_t dtype_bytes(hvd_dtype dtype) {
  switch (dtype) {
    case HVD_UINT8:
    case HVD_INT8:
    case HVD_BOOL:
    case HVD_FLOAT8_E4M3FN:
    case HVD_FLOAT8_E5M2:
      return 1;
    case HVD_UINT16:
    case HVD_INT16:
    case HVD_FLOAT16:
    case HVD_BFLOAT16:
      return 2;
    case HVD_INT32:
    case HVD_UINT32:
    case HVD_FLOAT32:
      return 4;
    case HVD_INT64:
    case HVD_UINT64:
    case HVD_FLOAT64:
    case HVD_COMPLEX64:
      return 8;
    case HVD_COMPLEX128:
      return 16;
  }
  return 0;
}

uint64_t Meta::bytes() const {
  if (op != HVD_ALLREDUCE && op != HVD_BROADCAST && op != HVD_REDUCESCATTER) return 0;
  uint64_t n = dtype_bytes(dtype);
  for (const int64_t extent : shape) n *= static_cast<uint64_t>(extent);
  return n;
}

uint64_t Meta::row_bytes() const {
  uint64_t n = dtype_bytes(dtype);
  for (size_t i = 1; i < shape.size(); ++i) n *= static_cast<uint64_t>(shape[i]);
  return n;
}

const char* name_of(hvd_op op) {
  switch (op) {
    case HVD_ALLREDUCE:
      return "ALLREDUCE";
    case HVD_ALLGATHER:
      return "ALLGATHER";
    case HVD_BROADCAST:
      return "BROADCAST";
    case HVD_ALLTOALL:
      return "ALLTOALL";
    case HVD_REDUCESCATTER:
      return "REDUCESCATTER";
    case HVD_BARRIER:
      return "BARRIER";
    case HVD_JOIN:
      return "JOIN";
    case HVD_ADD_PROCESS_SET:
      return "ADD_PROCESS_SET";
    case HVD_REMOVE_PROCESS_SET:
      return "REMOVE_PROCESS_SET";
  }
  return "UNKNOWN";
}

const char* name_of(hvd_dtype dtype) {
  static constexpr const char* kNames[HVD_DTYPES] = {
      "uint8", "int8",     "uint16", "int16",  "int32",     "int64",      "float16",       "float32",    "float64",
      "bool",  "bfloat16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"};
  return kNames[dtype];
}

const char* name_of(hvd_reduce_op op) {
  static constexpr const char* kNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return kNames[op];
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + (shape[i] == kAnyRows ? "*" : std::to_string(shape[i]));
  }
  return text + "]";
}

}  // namespace hvd
