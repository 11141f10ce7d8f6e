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
#include "engine/result_memory.h"
#include "transport/errors.h"

namespace hvd {

// In Meta::shape: a first dimension that may differ between ranks and from time to time (allgather, alltoall).
inline constexpr int64_t kAnyRows = -1;

// What all ranks must agree on for one tensor.
struct Meta {
  hvd_op op = HVD_ALLREDUCE;
  hvd_dtype dtype = HVD_UINT8;
  hvd_reduce_op reduce_op = HVD_SUM;  // HVD_SUM where it has no meaning
  int32_t root = -1;                  // global rank, or the id of a set to remove; -1 where it has no meaning
  double prescale = 1.0, postscale = 1.0;
  std::vector<int64_t> shape;  // HVD_ADD_PROCESS_SET: the ranks

  bool operator==(const Meta&) const = default;
  uint64_t bytes() const;      // 0 where it is not the same on all ranks
  uint64_t row_bytes() const;  // of one element of the first dimension
};

// Whether the result's first dimension is known only when all ranks have said how many rows they send.
inline bool moves_rows(hvd_op op) { return op == HVD_ALLGATHER || op == HVD_ALLTOALL; }

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

// The names of operations that have none of their own.
inline constexpr const char* kJoinName = "join.noname";
inline constexpr const char* kChangeSetsName = "process_sets.noname";

// One operation of this rank, from submission to its end. What is needed of each member of a batch comes first, in a
// cache line or two.
struct Request {
  // Ended: status is set last, with release; error may be read by who has seen it.
  std::atomic<hvd_status> status{HVD_PENDING};

  // The engine's own, under its mutex.
  int id = -1;               // cached, by which it was submitted
  bool wanted = false;       // a thread waits for it
  bool logged = false;       // part of a batch, or of an error, in the log
  bool by_bit = false;       // submitted as an arrival in the slot of its id
  bool in_sequence = false;  // submitted as the next of a sequence, or held back because it is not the next
  uint64_t bytes = 0;        // as its metadata have it
  uint64_t order = 0;        // submitted under this standing order instead

  const void* input = nullptr;
  void* output = nullptr;
  hvd_callback callback = nullptr;
  void* context = nullptr;
  uint64_t round = 0;  // the engine's: which round of the slot, or which submission of the sequence it is, from 0 on

  Key key;
  Meta meta;
  // allgather, reducescatter: this rank's rows. alltoall: the rows for each member.
  std::vector<int64_t> counts;
  int64_t rows = 0;
  hvd_allocate allocate = nullptr;

  // What it gave; written before status.
  ResultMemory data;
  std::vector<int64_t> result_shape, received;
  int32_t value = 0;
  std::string error;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_REQUEST_H_
