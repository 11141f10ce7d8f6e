// How collectives copy into their outputs.
#ifndef HOROVOD_COLLECTIVES_OUTPUTS_H_
#define HOROVOD_COLLECTIVES_OUTPUTS_H_

#include <cstddef>

#include "kernels/kernels.h"

namespace hvd {

using CopyBytes = void (*)(void* dst, const void* src, size_t bytes);

// Outputs of so many bytes together are out of the caches before anybody reads them, and what was in the caches with
// them. Copying past them moves a third less.
inline constexpr size_t kPastCachesBytes = size_t{4} << 20;

inline CopyBytes copy_for_outputs(size_t bytes_of_all) {
  return bytes_of_all >= kPastCachesBytes ? copy_past_caches : copy_bytes;
}

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_OUTPUTS_H_
