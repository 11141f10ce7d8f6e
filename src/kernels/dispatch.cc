// Which of the tables this processor (and its operating system, which must save the wide registers) can run.
#include "kernels/kernels.h"
#include "kernels/tables.h"

namespace hvd {

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> tables = {&kBaselineKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    tables.push_back(&kAvx2Kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      tables.push_back(&kAvx512Kernels);
    }
  }
#endif
  return tables;
}

const Kernels& kernels() {
  static const Kernels& best = *all_kernels().back();
  return best;
}

}  // namespace hvd
