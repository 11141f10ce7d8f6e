// What every processor of the architecture has: SSE2 on x86-64; NEON with its conversions of float16 on AArch64.
#define HVD_VECTOR_BYTES 16
#include "kernels/kernels_impl.h"
#include "kernels/tables.h"

namespace hvd {

constexpr Kernels kBaselineKernels = make_table("baseline");

}  // namespace hvd
