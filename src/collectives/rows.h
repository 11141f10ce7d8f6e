// Tensors whose result has as many rows as the members send: allgather and alltoall.
//
// Words. A *row* is one element of the first dimension. A member's *stream* is what it sends of all tensors of the
// batch, laid end to end. How many rows each member sends is exchanged first, by one chunk (the *counts*); then every
// member knows where everything goes, allocates its outputs, and all streams move through the channel side by side.
#ifndef HOROVOD_COLLECTIVES_ROWS_H_
#define HOROVOD_COLLECTIVES_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd {

struct RowsTensor {
  const std::byte* input = nullptr;
  size_t row_bytes = 0;
  // What this member sends: one count (allgather), or one per member (alltoall).
  std::vector<int64_t> counts;
  // Called once, with the rows that come from each member; returns the memory for all of them, in the order of members.
  std::function<std::byte*(const std::vector<int64_t>& received)> allocate;
};

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_ROWS_H_
