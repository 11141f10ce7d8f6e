// The tables that dispatch.cc chooses from: one per instruction set, each defined in the source file of that name.
#ifndef HOROVOD_KERNELS_TABLES_H_
#define HOROVOD_KERNELS_TABLES_H_

#include "kernels/kernels.h"

namespace hvd {

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;    // needs AVX2 and F16C
extern const Kernels kAvx512Kernels;  // needs AVX-512 F, BW, VL and DQ
#endif

}  // namespace hvd
#endif  // HOROVOD_KERNELS_TABLES_H_
