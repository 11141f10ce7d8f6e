// Vectors of elements, and the formats in which elements lie in memory. Included once by each instruction set's source
// file, which defines before it:
//   HVD_VECTOR_BYTES  the width of its registers: 16, 32 or 64
// Everything is in an anonymous namespace and nothing of the standard library is called: what is compiled for AVX-512
// must never be the copy that the linker keeps for everybody.
#ifndef HOROVOD_KERNELS_VECTORS_H_
#define HOROVOD_KERNELS_VECTORS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hvd {
namespace {

inline constexpr size_t kVectorBytes = HVD_VECTOR_BYTES;

template <typename E>
struct VectorOf {
  typedef E type __attribute__((vector_size(kVectorBytes)));
};
template <typename E>
using Vector = typename VectorOf<E>::type;
using Bits = Vector<uint32_t>;

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename E>
inline Vector<E> splat(E value) {
  return Vector<E>{} + value;
}

// Memory may be unaligned, even for the element type.
template <typename V>
inline V load(const char* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(V));
  return vector;
}

template <typename V>
inline void store(char* to, V vector) {
  __builtin_memcpy(to, &vector, sizeof(V));
}

// The vector whose lane number i is lane number choose(i) of a and b, counted through.
template <size_t n_lanes, typename V, typename Choose>
inline auto shuffled(const V& a, const V& b, Choose) {
  return [&]<size_t... lane>(std::index_sequence<lane...>) {
    return __builtin_shufflevector(a, b, Choose{}(lane)...);
  }(std::make_index_sequence<n_lanes>());
}
template <typename V>
inline constexpr size_t kLanes = sizeof(V) / sizeof(V{}[0]);

// Even lanes of one vector and odd lanes of the other, each where it was.
template <typename V>
inline V even_and_odd(V even, V odd) {
  if constexpr (kVectorBytes == 16 && sizeof(even[0]) == 2) {  // SSE2 has no instruction for it
    return bits_as<V>((bits_as<Bits>(even) & 0xffffu) | (bits_as<Bits>(odd) & 0xffff0000u));
  } else {
    return shuffled<kLanes<V>>(even, odd, [](size_t i) { return i % 2 == 0 ? i : i + kLanes<V>; });
  }
}

// Which NaN an addition or a multiplication gives depends on the processor and on the order in which the compiler
// placed the operands. So every NaN is made the same one before it is stored: quiet, positive, without payload.
template <typename E>
inline Vector<E> canonical(Vector<E> value) {
  if constexpr (sizeof(E) == 4) {
    return value == value ? value : bits_as<Vector<E>>(splat<uint32_t>(0x7fc00000u));
  } else {
    return value == value ? value : bits_as<Vector<E>>(splat<uint64_t>(0x7ff8000000000000u));
  }
}

// ---- Formats -------------------------------------------------------------------------------------------------------
//
// Element: the type in memory. Lane: the type computed with. Wide: the lanes of kVectorBytes of memory, which load
// widens and store rounds.

template <typename E>
struct PlainFormat {
  using Element = E;
  using Lane = E;
  using Wide = Vector<E>;

  static Wide load(const char* from) { return hvd::load<Wide>(from); }
  static void store(char* to, Wide wide) {
    if constexpr (std::is_floating_point_v<E>) wide = canonical<E>(wide);
    hvd::store(to, wide);
  }
};

// The float32 lanes of one vector of halves. Which half is in which lane is the format's choice; in_order brings them
// into the order of memory.
struct TwoFloats {
  Vector<float> first, second;
};

// From the elements of even and odd number.
inline TwoFloats interleaved(TwoFloats wide) {
  constexpr size_t kN = kLanes<Vector<float>>;
  return {shuffled<kN>(wide.first, wide.second, [](size_t i) { return i / 2 + i % 2 * kN; }),
          shuffled<kN>(wide.first, wide.second, [](size_t i) { return kN / 2 + i / 2 + i % 2 * kN; })};
}

struct BFloat16Format {
  using Element = uint16_t;
  using Lane = float;
  using Wide = TwoFloats;
  static constexpr int16_t kInfinity = 0x7f80;
  static constexpr int16_t kNan = 0x7fc0;

  // A 32-bit lane of memory holds two elements, each the upper half of a float32: no shuffling needed.
  static Wide load(const char* from) {
    const Bits pairs = hvd::load<Bits>(from);
    return {bits_as<Vector<float>>(pairs << 16), bits_as<Vector<float>>(pairs & 0xffff0000u)};
  }
  static Wide in_order(Wide wide) { return interleaved(wide); }

  // To nearest even, on 16-bit lanes: all elements at once. Overflow carries into the exponent: infinity.
  static void store(char* to, Wide wide) {
    using Unsigned = Vector<uint16_t>;
    using Signed = Vector<int16_t>;
    const Bits first = bits_as<Bits>(wide.first), second = bits_as<Bits>(wide.second);
    const auto upper = even_and_odd(bits_as<Unsigned>(first >> 16), bits_as<Unsigned>(second));
    const auto lower = even_and_odd(bits_as<Unsigned>(first), bits_as<Unsigned>(second << 16));
    const Signed above_tie = bits_as<Signed>(lower ^ uint16_t{0x8000});  // 0: a tie, which goes up from odd
    const Signed minus_odd = -bits_as<Signed>(upper & uint16_t{1});
    const Unsigned nearest = upper - bits_as<Unsigned>(above_tie > minus_odd);  // a true lane is -1
    // The upper half shows every NaN: it came from a bfloat16, or arithmetic made it quiet.
    const Signed magnitude = bits_as<Signed>(upper & uint16_t{0x7fff});
    hvd::store(to, magnitude > int16_t{kInfinity} ? splat<uint16_t>(kNan) : nearest);
  }
};

struct Float16Format {
  using Element = uint16_t;
  using Lane = float;
  using Wide = TwoFloats;
  static constexpr int16_t kInfinity = 0x7c00;
  static constexpr int16_t kNan = 0x7e00;

#if HVD_VECTOR_BYTES == 64 && defined(__AVX512F__)
  // All lanes are asked for by mask only because gcc 12 warns of an uninitialised variable inside the plain forms.
  static constexpr __mmask16 kAll = 0xffff;

  static Wide load(const char* from) { return {load_half(from), load_half(from + 32)}; }
  static Wide in_order(Wide wide) { return wide; }
  static void store(char* to, Wide wide) {
    store_half(to, wide.first);
    store_half(to + 32, wide.second);
  }

 private:
  static Vector<float> load_half(const char* from) {
    return bits_as<Vector<float>>(_mm512_maskz_cvtph_ps(kAll, hvd::load<__m256i>(from)));
  }
  static void store_half(char* to, Vector<float> value) {
    const __m512 floats = bits_as<__m512>(canonical<float>(value));
    hvd::store(to, _mm512_maskz_cvtps_ph(kAll, floats, _MM_FROUND_TO_NEAREST_INT));
  }
#elif HVD_VECTOR_BYTES == 32 && defined(__F16C__)
  static Wide load(const char* from) { return {load_half(from), load_half(from + 16)}; }
  static Wide in_order(Wide wide) { return wide; }
  static void store(char* to, Wide wide) {
    store_half(to, wide.first);
    store_half(to + 16, wide.second);
  }

 private:
  static Vector<float> load_half(const char* from) {
    return bits_as<Vector<float>>(_mm256_cvtph_ps(hvd::load<__m128i>(from)));
  }
  static void store_half(char* to, Vector<float> value) {
    hvd::store(to, _mm256_cvtps_ph(bits_as<__m256>(canonical<float>(value)), _MM_FROUND_TO_NEAREST_INT));
  }
#elif HVD_VECTOR_BYTES == 16 && defined(__aarch64__)
  static Wide load(const char* from) { return {load_half(from), load_half(from + 8)}; }
  static Wide in_order(Wide wide) { return wide; }
  static void store(char* to, Wide wide) {
    store_half(to, wide.first);
    store_half(to + 8, wide.second);
  }

 private:
  static Vector<float> load_half(const char* from) {
    return bits_as<Vector<float>>(vcvt_f32_f16(hvd::load<float16x4_t>(from)));
  }
  static void store_half(char* to, Vector<float> value) {
    hvd::store(to, vcvt_f16_f32(bits_as<float32x4_t>(canonical<float>(value))));
  }
#else
  // By integers, with the results of the instructions above to the bit. The two elements of a 32-bit lane go apart.
  static Wide load(const char* from) {
    const Bits pairs = hvd::load<Bits>(from);
    return {widened(pairs & 0xffffu), widened(pairs >> 16)};
  }
  static Wide in_order(Wide wide) { return interleaved(wide); }
  static void store(char* to, Wide wide) { hvd::store(to, rounded(wide.first) | (rounded(wide.second) << 16)); }

 private:
  using Signed = Vector<int32_t>;  // SSE2 compares signed integers only; a magnitude is never negative

  static constexpr uint32_t kBias = (127 - 15) << 23;  // between the two formats' exponents

  // The element in the lower 16 bits of each lane, the upper ones being zero.
  static Vector<float> widened(Bits half) {
    const Bits magnitude = (half & 0x7fffu) << 13;
    const Bits normal = magnitude + kBias;
    const Bits infinite_or_nan = normal + kBias;
    // A subnormal is its fraction in units of 2^-24: given the exponent in which that is the last bit, less the
    // leading one that this implies.
    const Bits one = splat<uint32_t>(kBias + (1u << 23));
    const Bits subnormal = bits_as<Bits>(bits_as<Vector<float>>(magnitude + one) - bits_as<Vector<float>>(one));
    const Signed ordered = bits_as<Signed>(magnitude);
    Bits result = ordered < splat<int32_t>(0x0400 << 13) ? subnormal : normal;
    result = ordered >= splat<int32_t>(0x7c00 << 13) ? infinite_or_nan : result;
    return bits_as<Vector<float>>(result | ((half & 0x8000u) << 16));
  }

  static Bits rounded(Vector<float> value) {
    const Bits bits = bits_as<Bits>(canonical<float>(value));
    const Bits magnitude = bits & 0x7fffffffu;
    // To nearest even; from 65520 on this carries into the exponent of infinity.
    const Bits normal = (magnitude - kBias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // The last bit of 0.5 is 2^-24, the unit of subnormals: the addition rounds.
    const Vector<float> half = splat(0.5f);
    const Bits subnormal = bits_as<Bits>(bits_as<Vector<float>>(magnitude) + half) - bits_as<Bits>(half);
    const Signed ordered = bits_as<Signed>(magnitude);
    Bits result = ordered < splat<int32_t>(0x38800000) ? subnormal : normal;             // 2^-14
    result = ordered >= splat<int32_t>(0x47800000) ? splat<uint32_t>(0x7c00u) : result;  // 65536
    result = ordered > splat<int32_t>(0x7f800000) ? splat<uint32_t>(0x7e00u) : result;   // infinity
    return result | ((bits >> 16) & 0x8000u);
  }
#endif
};

// Halves as they lie in memory, to be compared only: without widening, twice as many at a time.
template <typename Half>
struct ComparedFormat {
  using Element = uint16_t;
  using Lane = int16_t;
  using Wide = Vector<int16_t>;
  static constexpr int16_t kInfinity = Half::kInfinity;
  static constexpr int16_t kNan = Half::kNan;

  static Wide load(const char* from) { return hvd::load<Wide>(from); }
  static void store(char* to, Wide wide) { hvd::store(to, wide); }
};

}  // namespace
}  // namespace hvd
#endif  // HOROVOD_KERNELS_VECTORS_H_
