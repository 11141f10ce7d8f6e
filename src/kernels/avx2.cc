// Compiled with -mavx2 -mf16c.
#define HVD_VECTOR_BYTES 32
#include "kernels/kernels_impl.h"
#include "kernels/tables.h"

namespace hvd {

constexpr Kernels kAvx2Kernels = make_table("avx2");

}  // namespace hvd
