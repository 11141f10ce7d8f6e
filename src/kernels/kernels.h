// Arithmetic on arrays: scale while copying, fold the same range of several ranks into one, and Adasum's part of it.
//
// One table of functions per instruction set, chosen once at run time. All of them give the same bits:
//   - The fold goes from the first source to the last. Half types are widened to float32, folded there and rounded
//     once, to nearest even; what is too large for the type becomes infinity. No fused multiply-add.
//   - Integers wrap in their own type.
//   - A complex number is its real and its imaginary part, each of which is rounded as above; a product is
//     (ac - bd, ad + bc), also of infinities.
//   - Min and Max of a NaN and anything are NaN; of 0.0 and -0.0 they are the one that came first.
//   - Every NaN that is computed is the quiet, positive one without payload, whatever NaN went in. Only where there
//     is nothing to compute (one source and nothing to finish) the bytes are copied as they are.
// Pointers need not be aligned, not even to the element. count may be 0.
#ifndef HOROVOD_KERNELS_KERNELS_H_
#define HOROVOD_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "api/horovod.h"

namespace hvd {

inline constexpr int kDTypes = HVD_DTYPES;
inline constexpr int kReduceOps = 6;

// What happens to the folded value before it is rounded to the element type.
//   floating types: value * factor; complex types: both parts * factor
//   integers: value / divisor toward zero if factor is 1, else trunc(double(value) * factor / divisor), saturating;
//     NaN becomes 0
struct Finish {
  double factor = 1.0;
  int64_t divisor = 1;  // positive; floating and complex types: already part of factor
};

struct Kernels {
  const char* name;
  // As memcpy. See copy_bytes().
  void (*copy)(void* dst, const void* src, size_t bytes);
  // The same for what nobody reads soon: it does not fetch what it overwrites, and leaves the caches to others.
  void (*copy_past_caches)(void* dst, const void* src, size_t bytes);
  // dst[i] = src[i] * factor (integers: trunc in double, saturating). dst may equal src. Null: not supported.
  void (*scale_copy[kDTypes])(void* dst, const void* src, size_t count, double factor);
  // dst[i] = finish(sources[0][i] op sources[1][i] op ...). dst may equal any source. Null: not supported.
  // HVD_AVERAGE folds as HVD_SUM: the division is in finish.
  // Complex types have no Min and Max. float8 types have nothing: they are only moved.
  // HVD_BOOL (bytes 0 and 1): Sum and Max are or, Product and Min are and; finish is ignored.
  void (*fold[kDTypes][kReduceOps])(void* dst, const void* const* sources, int n_sources, size_t count,
                                    const Finish& finish);
  // Adds dot(a, b), |a|^2 and |b|^2 to the three sums, all in double: element i to partial sum i % 8, these then in
  // pairs. The sums depend on how an array is cut into calls: ranks that must agree cut it alike. Null: not supported.
  void (*adasum_sums[kDTypes])(const void* a, const void* b, size_t count, double sums[3]);
  // dst[i] = ca * a[i] + cb * b[i]. float64 in double; float32 and halves in float32, also ca and cb (beyond its range:
  // infinity), and halves are rounded once, at the end. dst may equal a or b. Null: not supported.
  void (*adasum_combine[kDTypes])(void* dst, const void* a, const void* b, size_t count, double ca, double cb);
};

// The best table for this processor.
const Kernels& kernels();
// All tables that this processor can run, the baseline first: for tests.
std::vector<const Kernels*> all_kernels();

// As memcpy, for payload. glibc copies more than some KiB by `rep movsb`, which AMD's Zen 3 and 4 run three to five
// times slower than a loop when the two addresses are not aligned alike; NumPy's arrays begin 16 bytes into a page.
inline constexpr size_t kLittle = 2048;
inline void copy_bytes(void* dst, const void* src, size_t bytes) {
  if (bytes < kLittle) {
    std::memcpy(dst, src, bytes);
  } else {
    kernels().copy(dst, src, bytes);
  }
}
inline void copy_past_caches(void* dst, const void* src, size_t bytes) {
  if (bytes < kLittle) {
    std::memcpy(dst, src, bytes);
  } else {
    kernels().copy_past_caches(dst, src, bytes);
  }
}

}  // namespace hvd
#endif  // HOROVOD_KERNELS_KERNELS_H_
