// The payload of one batch: tensors of one dtype laid end to end, without copying them together.
#ifndef HOROVOD_COLLECTIVES_BATCH_H_
#define HOROVOD_COLLECTIVES_BATCH_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "api/horovod.h"
#include "collectives/rows.h"

namespace hvd {

size_t dtype_bytes(hvd_dtype dtype);

class Batch {
 public:
  hvd_op op = HVD_ALLREDUCE;
  hvd_dtype dtype = HVD_UINT8;
  hvd_reduce_op reduce_op = HVD_SUM;
  int root = -1;  // member index
  double prescale = 1.0, postscale = 1.0;
  std::vector<RowsTensor> rows;  // allgather, alltoall, reducescatter: the tensors by rows

  // Without input this member contributes the neutral element.
  void add(const void* input, void* output, size_t bytes) {
    tensors_.push_back({static_cast<const std::byte*>(input), static_cast<std::byte*>(output), bytes_, bytes});
    bytes_ += bytes;
  }
  size_t bytes() const { return bytes_; }
  size_t tensors() const { return tensors_.size(); }
  size_t start(size_t tensor) const { return tensors_[tensor].start; }
  size_t bytes(size_t tensor) const { return tensors_[tensor].bytes; }
  const std::byte* input(size_t tensor) const { return tensors_[tensor].input; }
  std::byte* output(size_t tensor) const { return tensors_[tensor].output; }

  // Calls f(input, output, offset from lo, bytes) for each tensor's part of [lo, hi), in order.
  template <typename F>
  void for_pieces(size_t lo, size_t hi, F&& f) const {
    auto tensor = std::partition_point(tensors_.begin(), tensors_.end(),
                                       [lo](const Tensor& t) { return t.start + t.bytes <= lo; });
    for (; tensor != tensors_.end() && tensor->start < hi; ++tensor) {
      const size_t from = std::max(lo, tensor->start), to = std::min(hi, tensor->start + tensor->bytes);
      const size_t skip = from - tensor->start;
      if (from < to)
        f(tensor->input == nullptr ? nullptr : tensor->input + skip, tensor->output + skip, from - lo, to - from);
    }
  }

 private:
  struct Tensor {
    const std::byte* input;
    std::byte* output;
    size_t start, bytes;
  };
  std::vector<Tensor> tensors_;
  size_t bytes_ = 0;
};

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_BATCH_H_
