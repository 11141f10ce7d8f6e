// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq.
#define HVD_VECTOR_BYTES 64
#include "kernels/kernels_impl.h"
#include "kernels/tables.h"

namespace hvd {

constexpr Kernels kAvx512Kernels = make_table("avx512");

}  // namespace hvd
