// The arithmetic of Adasum on one pair of vectors: three sums, from which the caller makes two coefficients, and the
// linear combination of the vectors with them. Included by kernels_impl.h.
#ifndef HOROVOD_KERNELS_ADASUM_IMPL_H_
#define HOROVOD_KERNELS_ADASUM_IMPL_H_

#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace hvd {
namespace {

// ---- Sums ----------------------------------------------------------------------------------------------------------
//
// Element number i of the array goes to partial sum number i % 8, whatever the width of vectors. The partial sums are
// one, two or four vectors; four vectors of double are read at a time, which is eight elements or a multiple.

inline constexpr size_t kPartials = 8;
inline constexpr size_t kPartialVectors = kPartials / kLanes<Vector<double>>;

struct FourDoubles {
  Vector<double> parts[4];
};

template <typename Format>
inline constexpr size_t kFourDoublesBytes = 4 * kLanes<Vector<double>> * sizeof(typename Format::Element);

inline FourDoubles widened(TwoFloats floats) {
  // Whole vectors are converted, as gcc makes pieces of anything smaller.
  typedef double Doubles __attribute__((vector_size(2 * kVectorBytes)));
  constexpr size_t kHalf = kLanes<Vector<double>>;
  const auto first = __builtin_convertvector(floats.first, Doubles);
  const auto second = __builtin_convertvector(floats.second, Doubles);
  const auto lower = [](size_t i) { return i; };
  const auto upper = [](size_t i) { return i + kHalf; };
  return {{shuffled<kHalf>(first, first, lower), shuffled<kHalf>(first, first, upper),
           shuffled<kHalf>(second, second, lower), shuffled<kHalf>(second, second, upper)}};
}

// In the order of memory.
template <typename Format>
inline FourDoubles load_doubles(const char* from) {
  if constexpr (std::is_same_v<typename Format::Wide, TwoFloats>) {
    return widened(Format::in_order(Format::load(from)));
  } else if constexpr (std::is_same_v<typename Format::Lane, float>) {
    return widened({Format::load(from), Format::load(from + kVectorBytes)});
  } else {
    return {{Format::load(from), Format::load(from + kVectorBytes), Format::load(from + 2 * kVectorBytes),
             Format::load(from + 3 * kVectorBytes)}};
  }
}

struct PartialSums {
  Vector<double> vectors[kPartialVectors] = {};

  void add_products(const FourDoubles& a, const FourDoubles& b) {
    for (size_t k = 0; k < 4; ++k) vectors[k % kPartialVectors] += a.parts[k] * b.parts[k];
  }

  double total() const {
    double p[kPartials];
    __builtin_memcpy(p, vectors, sizeof(p));
    return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
  }
};

inline double canonical_sum(double sum) { return canonical<double>(splat(sum))[0]; }

template <typename Format>
void adasum_sums(const void* a_pointer, const void* b_pointer, size_t count, double sums[3]) {
  constexpr size_t kStep = kFourDoublesBytes<Format>;
  const char* a = static_cast<const char*>(a_pointer);
  const char* b = static_cast<const char*>(b_pointer);
  const size_t bytes = count * sizeof(typename Format::Element);
  PartialSums dot, a_squared, b_squared;
  const auto add = [&](const char* a_from, const char* b_from) {
    const FourDoubles x = load_doubles<Format>(a_from), y = load_doubles<Format>(b_from);
    dot.add_products(x, y);
    a_squared.add_products(x, x);
    b_squared.add_products(y, y);
  };
  size_t at = 0;
  for (; at + kStep <= bytes; at += kStep) add(a + at, b + at);
  if (at < bytes) {  // zeros change no sum: a partial sum is never -0.0
    char a_filled_up[kStep] = {}, b_filled_up[kStep] = {};
    __builtin_memcpy(a_filled_up, a + at, bytes - at);
    __builtin_memcpy(b_filled_up, b + at, bytes - at);
    add(a_filled_up, b_filled_up);
  }
  sums[0] = canonical_sum(sums[0] + dot.total());
  sums[1] = canonical_sum(sums[1] + a_squared.total());
  sums[2] = canonical_sum(sums[2] + b_squared.total());
}

// ---- Combination ---------------------------------------------------------------------------------------------------

template <typename Format>
void adasum_combine(void* dst_pointer, const void* a_pointer, const void* b_pointer, size_t count, double ca,
                    double cb) {
  using Lane = typename Format::Lane;
  char* dst = static_cast<char*>(dst_pointer);
  const char* a = static_cast<const char*>(a_pointer);
  const char* b = static_cast<const char*>(b_pointer);
  const Lane a_factor = static_cast<Lane>(ca), b_factor = static_cast<Lane>(cb);
  const auto combine = [=](char* to, const char* a_from, const char* b_from) {
    const auto x = Format::load(a_from), y = Format::load(b_from);
    if constexpr (std::is_same_v<typename Format::Wide, TwoFloats>) {
      Format::store(to, {x.first * a_factor + y.first * b_factor, x.second * a_factor + y.second * b_factor});
    } else {
      Format::store(to, x * a_factor + y * b_factor);
    }
  };
  const size_t bytes = count * sizeof(typename Format::Element);
  size_t at = 0;
  for (; at + kVectorBytes <= bytes; at += kVectorBytes) combine(dst + at, a + at, b + at);
  if (at < bytes) {
    char a_filled_up[kVectorBytes] = {}, b_filled_up[kVectorBytes] = {};
    __builtin_memcpy(a_filled_up, a + at, bytes - at);
    __builtin_memcpy(b_filled_up, b + at, bytes - at);
    combine(a_filled_up, a_filled_up, b_filled_up);
    __builtin_memcpy(dst + at, a_filled_up, bytes - at);
  }
}

}  // namespace
}  // namespace hvd
#endif  // HOROVOD_KERNELS_ADASUM_IMPL_H_
