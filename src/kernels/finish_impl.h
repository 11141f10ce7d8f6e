// What happens to a folded value before it is stored: see Finish in kernels.h. Included by kernels_impl.h.
#ifndef HOROVOD_KERNELS_FINISH_IMPL_H_
#define HOROVOD_KERNELS_FINISH_IMPL_H_

#include <limits>

#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace hvd {
namespace {

// Floating types: in the registers, before the one rounding.
template <typename Format>
class Scaling {
  using Wide = typename Format::Wide;

 public:
  explicit Scaling(double factor) : scales_(factor != 1.0), factor_(static_cast<typename Format::Lane>(factor)) {}

  bool is_identity() const { return !scales_; }

  Wide operator()(Wide wide) const {
    if (!scales_) return wide;
    if constexpr (std::is_same_v<Wide, TwoFloats>) {
      return {wide.first * factor_, wide.second * factor_};
    } else {
      return wide * factor_;
    }
  }

 private:
  bool scales_;
  typename Format::Lane factor_;
};

template <typename Format>
struct Unchanged {
  bool is_identity() const { return true; }
  typename Format::Wide operator()(typename Format::Wide wide) const { return wide; }
};

// Integers: in the registers where they are only divided, by a power of two or, up to 32 bits, by any number. The
// quotient goes toward zero.
template <typename E>
class ShiftDivision {
  using Unsigned = Vector<std::make_unsigned_t<E>>;

 public:
  static bool can_divide_by(int64_t divisor) {
    return (divisor & (divisor - 1)) == 0 && __builtin_ctzll(static_cast<uint64_t>(divisor)) < 8 * int{sizeof(E)};
  }
  explicit ShiftDivision(int64_t divisor) : shift_(__builtin_ctzll(static_cast<uint64_t>(divisor))) {}

  bool is_identity() const { return false; }

  // The magnitude is shifted: rounds toward zero and needs no arithmetic shift, which AVX2 lacks for 64 bits.
  Vector<E> operator()(Vector<E> value) const {
    const Unsigned negative = bits_as<Unsigned>(value < 0);
    const Unsigned magnitude = (bits_as<Unsigned>(value) ^ negative) - negative;
    return bits_as<Vector<E>>(((magnitude >> shift_) ^ negative) - negative);
  }

 private:
  int shift_;
};

// Multiplies by the reciprocal, which is rounded up: so where the quotient is an integer the product is not less. Where
// it is not, the next integer is 1 / divisor away at least, and with float32 for dividends of 16 bits or double for 32
// the error is less than a tenth of that.
template <typename E>
class ReciprocalDivision {
  using Real = std::conditional_t<sizeof(E) == 4, double, float>;
  static constexpr Real kAboveOne = 1 + std::numeric_limits<Real>::epsilon();

 public:
  explicit ReciprocalDivision(int64_t divisor)
      : reciprocal_(static_cast<Real>(1.0 / static_cast<double>(divisor)) * kAboveOne) {}

  bool is_identity() const { return false; }

  Vector<E> operator()(Vector<E> value) const {
    if constexpr (sizeof(E) == 4) {
      // Through int32_t also for uint32_t, as there is no other conversion before AVX-512: the quotient fits, since
      // the divisor is 3 at least.
      typedef double Doubles __attribute__((vector_size(2 * kVectorBytes)));
      using Signed = Vector<int32_t>;
      constexpr uint32_t kCentre = std::is_signed_v<E> ? 0 : 0x80000000u;
      const auto centred = bits_as<Signed>(bits_as<Bits>(value) ^ kCentre);
      const Doubles dividend = __builtin_convertvector(centred, Doubles) + double{kCentre};
      return bits_as<Vector<E>>(__builtin_convertvector(dividend * reciprocal_, Signed));
    } else {
      // The elements within each 32-bit lane, one after the other.
      constexpr int kBits = 8 * sizeof(E);
      using Extended = Vector<std::conditional_t<std::is_signed_v<E>, int32_t, uint32_t>>;
      Bits result{};
      for (int up = 32 - kBits; up >= 0; up -= kBits) {
        const Extended dividend = bits_as<Extended>(bits_as<Bits>(value) << up) >> (32 - kBits);
        const auto product = __builtin_convertvector(bits_as<Vector<int32_t>>(dividend), Vector<float>) * reciprocal_;
        result |= bits_as<Bits>(__builtin_convertvector(product, Vector<int32_t>)) << (32 - kBits) >> up;
      }
      return bits_as<Vector<E>>(result);
    }
  }

 private:
  Real reciprocal_;
};

template <typename E>
inline E saturate(double value) {
  constexpr E kLowest = std::numeric_limits<E>::min();
  constexpr E kHighest = std::numeric_limits<E>::max();
  value = value == value ? value : 0.0;
  if constexpr (sizeof(E) == 8) {  // double(kHighest) is one too many
    if (value >= (std::is_signed_v<E> ? 0x1p63 : 0x1p64)) return kHighest;
    if (value < double{kLowest}) return kLowest;
  } else {
    value = value < double{kLowest} ? double{kLowest} : value;
    value = value > double{kHighest} ? double{kHighest} : value;
  }
  return static_cast<E>(value);
}

template <typename E>
inline E finish_integer(E value, const Finish& finish) {
  if constexpr (sizeof(E) == 8) {
    if (finish.factor == 1.0) return value / static_cast<E>(finish.divisor);
  }
  // Also the plain division of narrower types: a quotient that is no integer can't be rounded to one if the dividend
  // has 32 bits. Doubles divide faster than integers, several at a time.
  return saturate<E>(static_cast<double>(value) * finish.factor / static_cast<double>(finish.divisor));
}

// Integers, otherwise: over the folded array, which has their type already. Written for the compiler to vectorise.
template <typename E>
void finish_integers(char* dst, const char* src, size_t count, const Finish& finish) {
  const Finish local = finish;
#pragma GCC ivdep  // dst may equal src, but nothing else of it
  for (size_t i = 0; i < count; ++i) {
    store(dst + i * sizeof(E), finish_integer(load<E>(src + i * sizeof(E)), local));
  }
}

}  // namespace
}  // namespace hvd
#endif  // HOROVOD_KERNELS_FINISH_IMPL_H_
