// What a rank submits.
#ifndef HOROVOD_ENGINE_REQUEST_H_
#define HOROVOD_ENGINE_REQUEST_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "api/horovod.h"
#include "transport/errors.h"

namespace hvd {

// What all ranks must agree on for one tensor.
struct Meta {
  hvd_op op = HVD_ALLREDUCE;
  hvd_dtype dtype = HVD_UINT8;
  hvd_reduce_op reduce_op = HVD_SUM;  // HVD_SUM where it has no meaning
  int32_t root = -1;                  // global rank; -1 where it has no meaning
  double prescale = 1.0, postscale = 1.0;
  std::vector<int64_t> shape;

  bool operator==(const Meta&) const = default;
  uint64_t bytes() const;
};

const char* name_of(hvd_op op);
const char* name_of(hvd_dtype dtype);
const char* name_of(hvd_reduce_op op);
std::string shape_text(const std::vector<int64_t>& shape);

// Operations match across ranks by process set and name.
struct Key {
  int32_t set = 0;
  std::string name;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string>()(key.name) ^ (static_cast<size_t>(key.set) * 0x9E3779B97F4A7C15u);
  }
};

// One operation of this rank, from submission to its end.
struct Request {
  Key key;
  Meta meta;
  const void* input = nullptr;
  void* output = nullptr;
  hvd_callback callback = nullptr;
  void* context = nullptr;

  // Ended: status is set last, with release; error may be read by who has seen it.
  std::atomic<hvd_status> status{HVD_PENDING};
  std::string error;

  // The rest belongs to the engine, under its mutex.
  bool wanted = false;  // a thread waits for it
  bool logged = false;  // part of a batch, or of an error, in the log
  bool by_bit = false;  // submitted as an arrival in the slot of its cached id
  int id = -1;          // that id
  uint64_t round = 0;   // which round of the slot it belongs to
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_REQUEST_H_
