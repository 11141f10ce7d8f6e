// Tensors whose result has as many rows as the members send: allgather and alltoall.
#ifndef HOROVOD_COLLECTIVES_ROWS_H_
#define HOROVOD_COLLECTIVES_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd {

// A *row* is one element of the first dimension.
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
