// The element that changes nothing: what a rank without data contributes to a reduction.
#ifndef HOROVOD_COLLECTIVES_NEUTRAL_H_
#define HOROVOD_COLLECTIVES_NEUTRAL_H_

#include <cstddef>

#include "api/horovod.h"

namespace hvd {

void fill_neutral(void* data, size_t bytes, hvd_dtype dtype, hvd_reduce_op op);

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_NEUTRAL_H_
