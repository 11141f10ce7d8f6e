// What the kernels should give, one element at a time, in the most obvious way: by the definition of each type, without
// tricks on bits. Nothing here is shared with src/kernels but the meaning of Finish.
#ifndef HOROVOD_TESTS_KERNELS_REFERENCE_H_
#define HOROVOD_TESTS_KERNELS_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"

namespace hvd::reference {

using Bytes = std::vector<uint8_t>;

template <typename E>
struct Plain {
  using Value = E;
  static constexpr size_t kSize = sizeof(E);

  static E decode(const uint8_t* from) {
    E value;
    std::memcpy(&value, from, sizeof(E));
    return value;
  }
  static void encode(E value, uint8_t* to) {
    if constexpr (std::is_floating_point_v<E>) {
      if (std::isnan(value)) value = std::copysign(std::numeric_limits<E>::quiet_NaN(), E{1});
    }
    std::memcpy(to, &value, sizeof(E));
  }
};

// A 16-bit float by its definition: sign, exponent, fraction.
template <int kFractionBits>
struct Half {
  using Value = float;
  static constexpr size_t kSize = 2;
  static constexpr int kExponentBits = 15 - kFractionBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kFractionBits;

  static float decode_bits(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fff;
    const int exponent = static_cast<int>(magnitude >> kFractionBits);
    const uint32_t fraction = magnitude & ((1u << kFractionBits) - 1);
    double value;
    if (magnitude > kInfinity) {
      return std::numeric_limits<float>::quiet_NaN();
    } else if (magnitude == kInfinity) {
      value = std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, 1 - kBias - kFractionBits);
    } else {
      value = std::ldexp(fraction + (1u << kFractionBits), exponent - kBias - kFractionBits);
    }
    return static_cast<float>(bits & 0x8000 ? -value : value);
  }

  static uint32_t encode_bits(float value) {
    if (std::isnan(value)) return kInfinity | (1u << (kFractionBits - 1));
    const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | kInfinity;
    const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
    // In units of the last place. Fraction, leading one and exponent add up, also where rounding carries.
    const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, kFractionBits - exponent)));
    const uint32_t bits = units + (static_cast<uint32_t>(exponent + kBias - 1) << kFractionBits);
    return sign | std::min(bits, kInfinity);
  }

  static float decode(const uint8_t* from) { return decode_bits(Plain<uint16_t>::decode(from)); }
  static void encode(float value, uint8_t* to) {
    Plain<uint16_t>::encode(static_cast<uint16_t>(encode_bits(value)), to);
  }
};
using Float16 = Half<10>;
using BFloat16 = Half<7>;

struct Bool : Plain<uint8_t> {};

template <typename E>
struct Complex {
  using Part = E;
  using Value = std::complex<E>;
  static constexpr size_t kSize = 2 * sizeof(E);

  static Value decode(const uint8_t* from) { return {Plain<E>::decode(from), Plain<E>::decode(from + sizeof(E))}; }
  static void encode(Value value, uint8_t* to) {
    Plain<E>::encode(value.real(), to);
    Plain<E>::encode(value.imag(), to + sizeof(E));
  }
};
template <typename V>
inline constexpr bool kIsComplex = false;
template <typename E>
inline constexpr bool kIsComplex<std::complex<E>> = true;

template <typename Type, typename V>
V combine(hvd_reduce_op op, V a, V b) {
  if constexpr (std::is_same_v<Type, Bool>) {
    return op == HVD_MIN || op == HVD_PRODUCT ? a && b : a || b;
  } else if constexpr (kIsComplex<V>) {
    // Not by std::complex, whose product replaces some NaNs by infinities.
    if (op != HVD_PRODUCT) return {a.real() + b.real(), a.imag() + b.imag()};
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else if (op == HVD_MIN || op == HVD_MAX) {
    if (a != a || b != b) return a != a ? a : b;
    return (op == HVD_MIN ? b < a : b > a) ? b : a;
  } else if constexpr (std::is_integral_v<V>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<V>(op == HVD_PRODUCT ? x * y : x + y);
  } else {
    return op == HVD_PRODUCT ? a * b : a + b;
  }
}

template <typename Type, typename V>
V finished(V value, const Finish& finish) {
  if constexpr (std::is_same_v<Type, Bool>) {
    return value;
  } else if constexpr (std::is_floating_point_v<V>) {
    return finish.factor == 1.0 ? value : value * static_cast<V>(finish.factor);
  } else if constexpr (kIsComplex<V>) {
    return {finished<Type>(value.real(), finish), finished<Type>(value.imag(), finish)};
  } else {
    if (finish.factor == 1.0) return static_cast<V>(value / finish.divisor);
    const double scaled = static_cast<double>(value) * finish.factor / static_cast<double>(finish.divisor);
    if (std::isnan(scaled)) return 0;
    if (scaled >= static_cast<double>(std::numeric_limits<V>::max())) return std::numeric_limits<V>::max();
    if (scaled <= static_cast<double>(std::numeric_limits<V>::min())) return std::numeric_limits<V>::min();
    return static_cast<V>(scaled);
  }
}

template <typename Type>
Bytes reference_fold(hvd_reduce_op op, const std::vector<Bytes>& sources, const Finish& finish) {
  if (sources.size() == 1 && finish.factor == 1.0 && finish.divisor == 1) return sources[0];
  Bytes result(sources[0].size());
  for (size_t at = 0; at < result.size(); at += Type::kSize) {
    auto value = Type::decode(&sources[0][at]);
    for (size_t s = 1; s < sources.size(); ++s) value = combine<Type>(op, value, Type::decode(&sources[s][at]));
    Type::encode(finished<Type>(value, finish), &result[at]);
  }
  return result;
}

// ---- Adasum --------------------------------------------------------------------------------------------------------

struct Sums {
  double dot = 0, a_squared = 0, b_squared = 0;
};

// Element i to partial sum i % 8; these in pairs, the pairs in pairs, both halves together.
template <typename Type>
Sums reference_adasum_sums(const Bytes& a, const Bytes& b, const Sums& before) {
  const auto total = [](const Bytes& x, const Bytes& y) {
    double partial[8] = {};
    for (size_t i = 0; i < x.size() / Type::kSize; ++i) {
      partial[i % 8] += double{Type::decode(&x[i * Type::kSize])} * double{Type::decode(&y[i * Type::kSize])};
    }
    for (size_t n = 8; n > 1; n /= 2) {
      for (size_t i = 0; i < n / 2; ++i) partial[i] = partial[2 * i] + partial[2 * i + 1];
    }
    return partial[0];
  };
  return {before.dot + total(a, b), before.a_squared + total(a, a), before.b_squared + total(b, b)};
}

template <typename Type>
Bytes reference_adasum_combine(const Bytes& a, const Bytes& b, double ca, double cb) {
  using Value = typename Type::Value;
  Bytes result(a.size());
  for (size_t at = 0; at < a.size(); at += Type::kSize) {
    const Value from_a = static_cast<Value>(ca) * Type::decode(&a[at]);
    const Value from_b = static_cast<Value>(cb) * Type::decode(&b[at]);
    Type::encode(from_a + from_b, &result[at]);
  }
  return result;
}

}  // namespace hvd::reference
#endif  // HOROVOD_TESTS_KERNELS_REFERENCE_H_
