// The arithmetic of one batch: which kernels, which factors.
#ifndef HOROVOD_COLLECTIVES_ARITHMETIC_H_
#define HOROVOD_COLLECTIVES_ARITHMETIC_H_

#include <vector>

#include "collectives/batch.h"
#include "collectives/neutral.h"
#include "kernels/kernels.h"

namespace hvd {

class Arithmetic {
 public:
  Arithmetic(const Batch& batch, int members)
      : dtype_(batch.dtype),
        reduce_op_(batch.reduce_op),
        element_(dtype_bytes(batch.dtype)),
        prescale_(batch.prescale),
        scale_copy_(kernels().scale_copy[batch.dtype]),
        fold_(kernels().fold[batch.dtype][batch.reduce_op]) {
    finish_.factor = batch.postscale;
    if (batch.reduce_op != HVD_AVERAGE) return;
    if (is_integer(batch.dtype)) {
      finish_.divisor = members;
    } else {
      finish_.factor /= members;
    }
  }

  // Copies a part of an input on its way to the others; where there is none, the neutral element.
  void copy_in(std::byte* to, const std::byte* from, size_t bytes) const {
    if (from == nullptr) {
      fill_neutral(to, bytes, dtype_, reduce_op_);
    } else if (prescale_ == 1.0) {
      copy_bytes(to, from, bytes);
    } else {
      scale_copy_(to, from, bytes / element_, prescale_);
    }
  }

  // Folds some members' part without finishing it: others' are still to come.
  void fold_partly(std::byte* to, const std::vector<const void*>& sources, size_t bytes) const {
    fold_(to, sources.data(), static_cast<int>(sources.size()), bytes / element_, Finish{});
  }

  // Folds the same part of all members, in their order.
  void fold(std::byte* to, const std::vector<const void*>& sources, size_t bytes) const {
    fold_(to, sources.data(), static_cast<int>(sources.size()), bytes / element_, finish_);
  }

 private:
  static bool is_integer(hvd_dtype dtype) { return dtype <= HVD_INT64 || dtype == HVD_UINT32 || dtype == HVD_UINT64; }

  const hvd_dtype dtype_;
  const hvd_reduce_op reduce_op_;
  const size_t element_;
  const double prescale_;
  void (*const scale_copy_)(void*, const void*, size_t, double);
  void (*const fold_)(void*, const void* const*, int, size_t, const Finish&);
  Finish finish_;
};

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_ARITHMETIC_H_
