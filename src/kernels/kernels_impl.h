// The kernels themselves, written once for vectors of any width. Included once by each instruction set's source file:
// see vectors.h for what it must define and why everything is in an anonymous namespace.
//
// All formats are folded by the same loops: a vector is loaded and widened, combined with those of the other sources
// from left to right, finished, rounded and stored. The last, incomplete vector goes the same way, filled up with
// zeros, so that an element's result does not depend on its place in the array.
#ifndef HOROVOD_KERNELS_KERNELS_IMPL_H_
#define HOROVOD_KERNELS_KERNELS_IMPL_H_

#include "kernels/adasum_impl.h"
#include "kernels/finish_impl.h"
#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace hvd {
namespace {

// ---- Combining two vectors -----------------------------------------------------------------------------------------

enum class Fold { kSum, kMin, kMax, kProduct, kComplexProduct, kOr, kAnd };

// Signed integers are added and multiplied as unsigned ones: they wrap.
template <typename E, bool = std::is_integral_v<E>>
struct WrappingOf {
  using type = std::make_unsigned_t<E>;
};
template <typename E>
struct WrappingOf<E, false> {
  using type = E;
};

// Even lanes are real parts, odd lanes the imaginary ones that belong to them: (ac - bd, ad + bc).
template <typename E>
inline Vector<E> complex_product(Vector<E> ab, Vector<E> cd) {
  constexpr size_t kN = kLanes<Vector<E>>;
  const auto aa = shuffled<kN>(ab, ab, [](size_t i) { return i / 2 * 2; });
  const auto bb = shuffled<kN>(ab, ab, [](size_t i) { return i / 2 * 2 + 1; });
  const auto dc = shuffled<kN>(cd, cd, [](size_t i) { return i ^ 1; });
  const Vector<E> ac_ad = aa * cd, bd_bc = bb * dc;
  return even_and_odd<Vector<E>>(ac_ad - bd_bc, ac_ad + bd_bc);
}

template <Fold fold, typename E>
inline Vector<E> combine_lanes(Vector<E> x, Vector<E> y) {
  using Wrapping = Vector<typename WrappingOf<E>::type>;
  if constexpr (fold == Fold::kSum) {
    return bits_as<Vector<E>>(bits_as<Wrapping>(x) + bits_as<Wrapping>(y));
  } else if constexpr (fold == Fold::kProduct) {
    return bits_as<Vector<E>>(bits_as<Wrapping>(x) * bits_as<Wrapping>(y));
  } else if constexpr (fold == Fold::kComplexProduct) {
    return complex_product<E>(x, y);
  } else if constexpr (fold == Fold::kMin) {
    return (x <= y) | (x != x) ? x : y;  // NaN stays; of equals (0.0 and -0.0) the first
  } else if constexpr (fold == Fold::kMax) {
    return (x >= y) | (x != x) ? x : y;
  } else if constexpr (fold == Fold::kOr) {
    return x | y;
  } else {
    return x & y;
  }
}

// Minimum and maximum of halves, which order as sign and magnitude.
template <Fold fold, typename Format>
inline Vector<int16_t> combine_compared(Vector<int16_t> x, Vector<int16_t> y) {
  using Halves = Vector<int16_t>;
  const Halves x_magnitude = x & int16_t{0x7fff}, y_magnitude = y & int16_t{0x7fff};
  const Halves x_negative = x >> 15, y_negative = y >> 15;
  const Halves x_value = (x_magnitude ^ x_negative) - x_negative;  // both zeros are 0
  const Halves y_value = (y_magnitude ^ y_negative) - y_negative;
  const Halves picked = (fold == Fold::kMin ? x_value <= y_value : x_value >= y_value) ? x : y;
  const Halves is_nan = (x_magnitude > Format::kInfinity) | (y_magnitude > Format::kInfinity);
  return is_nan ? splat<int16_t>(Format::kNan) : picked;
}

template <Fold fold, typename Format>
inline typename Format::Wide combine(typename Format::Wide x, typename Format::Wide y) {
  using Lane = typename Format::Lane;
  if constexpr (std::is_same_v<typename Format::Wide, TwoFloats>) {
    return {combine_lanes<fold, Lane>(x.first, y.first), combine_lanes<fold, Lane>(x.second, y.second)};
  } else if constexpr (requires { Format::kNan; }) {
    return combine_compared<fold, Format>(x, y);
  } else {
    return combine_lanes<fold, Lane>(x, y);
  }
}

// ---- Copying --------------------------------------------------------------------------------------------------------

// A store that does not fetch the line first. `to` is aligned to the vector.
inline void store_past_caches(char* to, Vector<uint8_t> vector) {
#if HVD_VECTOR_BYTES == 64 && defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(vector));
#elif HVD_VECTOR_BYTES == 32 && defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(vector));
#elif HVD_VECTOR_BYTES == 16 && defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(vector));
#else
  store(to, vector);
#endif
}

template <bool past_caches>
inline void copy_vectors(void* dst_pointer, const void* src_pointer, size_t bytes) {
  using V = Vector<uint8_t>;
  constexpr size_t kStep = 4 * kVectorBytes;
  constexpr auto put = past_caches ? store_past_caches : store<V>;
  char* dst = static_cast<char*>(dst_pointer);
  const char* src = static_cast<const char*>(src_pointer);
  size_t at = 0;
  if (bytes >= kVectorBytes) {  // so that all other stores are aligned
    store(dst, load<V>(src));
    at = kVectorBytes - reinterpret_cast<uintptr_t>(dst) % kVectorBytes;
  }
  for (; at + kStep <= bytes; at += kStep) {
    const V a = load<V>(src + at), b = load<V>(src + at + kVectorBytes);
    const V c = load<V>(src + at + 2 * kVectorBytes), d = load<V>(src + at + 3 * kVectorBytes);
    put(dst + at, a);
    put(dst + at + kVectorBytes, b);
    put(dst + at + 2 * kVectorBytes, c);
    put(dst + at + 3 * kVectorBytes, d);
  }
#if defined(__x86_64__)
  if (past_caches) _mm_sfence();  // such stores are in no order with those that tell of them
#endif
  if (at < bytes) __builtin_memcpy(dst + at, src + at, bytes - at);
}

// ---- The loops -----------------------------------------------------------------------------------------------------

// With more than two sources the intermediate values of a block stay in L1, and every source is read by blocks:
// hundreds of streams at once would be too many for the prefetcher.
inline constexpr size_t kAccumulatorBytes = 4096;

// Of two sources what comes soon is fetched: processors do that by themselves, but stop at the end of a page. (What is
// fetched beyond the end of an array does no harm.)
inline constexpr size_t kCacheLine = 64, kPrefetchBytes = 2048;
static_assert(kCacheLine % kVectorBytes == 0);

template <Fold fold, typename Format, typename End>
inline void fold_block(char* dst, const char* const* sources, int n_sources, size_t offset, size_t bytes,
                       const End& end) {
  using Wide = typename Format::Wide;
  Wide accumulator[kAccumulatorBytes / sizeof(Wide)];
  const char* first = sources[0] + offset;
  const char* second = sources[1] + offset;
  Wide* value = accumulator;
  for (size_t at = 0; at < bytes; at += kVectorBytes) {
    *value++ = combine<fold, Format>(Format::load(first + at), Format::load(second + at));
  }
  for (int s = 2; s < n_sources - 1; ++s) {
    const char* source = sources[s] + offset;
    value = accumulator;
    for (size_t at = 0; at < bytes; at += kVectorBytes, ++value) {
      *value = combine<fold, Format>(*value, Format::load(source + at));
    }
  }
  // Only now dst is written: it may be one of the sources.
  const char* last = sources[n_sources - 1] + offset;
  value = accumulator;
  for (size_t at = 0; at < bytes; at += kVectorBytes) {
    Format::store(dst + offset + at, end(combine<fold, Format>(*value++, Format::load(last + at))));
  }
}

template <Fold fold, typename Format, typename End>
inline void fold_tail(char* dst, const char* const* sources, int n_sources, size_t offset, size_t bytes,
                      const End& end) {
  char filled_up[kVectorBytes] = {};
  __builtin_memcpy(filled_up, sources[0] + offset, bytes);
  auto value = Format::load(filled_up);
  for (int s = 1; s < n_sources; ++s) {
    __builtin_memcpy(filled_up, sources[s] + offset, bytes);
    value = combine<fold, Format>(value, Format::load(filled_up));
  }
  Format::store(filled_up, end(value));
  __builtin_memcpy(dst + offset, filled_up, bytes);
}

template <Fold fold, typename Format, typename End>
inline void fold_sources(char* dst, const char* const* sources, int n_sources, size_t count, const End& end) {
  const size_t bytes = count * sizeof(typename Format::Element);
  const size_t whole = bytes / kVectorBytes * kVectorBytes;
  if (n_sources == 1) {
    const char* source = sources[0];
    if (end.is_identity()) {
      if (dst != source && bytes > 0) copy_vectors<false>(dst, source, bytes);
      return;
    }
    for (size_t at = 0; at < whole; at += kVectorBytes) Format::store(dst + at, end(Format::load(source + at)));
  } else if (n_sources == 2) {
    const char* first = sources[0];
    const char* second = sources[1];
    const auto fold_vector = [&](size_t at) {
      Format::store(dst + at, end(combine<fold, Format>(Format::load(first + at), Format::load(second + at))));
    };
    size_t at = 0;
    for (; at + kCacheLine <= whole; at += kCacheLine) {
      __builtin_prefetch(first + at + kPrefetchBytes);
      __builtin_prefetch(second + at + kPrefetchBytes);
      for (size_t vector = 0; vector < kCacheLine; vector += kVectorBytes) fold_vector(at + vector);
    }
    for (; at < whole; at += kVectorBytes) fold_vector(at);
  } else {
    constexpr size_t kBlockBytes = kAccumulatorBytes / sizeof(typename Format::Wide) * kVectorBytes;
    for (size_t at = 0; at < whole; at += kBlockBytes) {
      const size_t rest = whole - at;
      fold_block<fold, Format>(dst, sources, n_sources, at, rest < kBlockBytes ? rest : kBlockBytes, end);
    }
  }
  if (whole < bytes) fold_tail<fold, Format>(dst, sources, n_sources, whole, bytes - whole, end);
}

// ---- The functions of the table ------------------------------------------------------------------------------------

template <typename Format>
struct Floating {
  template <Fold operation>
  static void fold(void* dst, const void* const* sources, int n_sources, size_t count, const Finish& finish) {
    fold_sources<operation, Format>(static_cast<char*>(dst), reinterpret_cast<const char* const*>(sources), n_sources,
                                    count, Scaling<Format>(finish.factor));
  }

  static void scale_copy(void* dst, const void* src, size_t count, double factor) {
    fold<Fold::kSum>(dst, &src, 1, count, Finish{factor, 1});
  }
};

// Minimum and maximum of halves. They are exact, so scaling them afterwards rounds no more often.
template <typename Half>
struct Compared {
  using Format = ComparedFormat<Half>;

  template <Fold operation>
  static void fold(void* dst, const void* const* sources, int n_sources, size_t count, const Finish& finish) {
    fold_sources<operation, Format>(static_cast<char*>(dst), reinterpret_cast<const char* const*>(sources), n_sources,
                                    count, Unchanged<Format>());
    if (finish.factor != 1.0) Floating<Half>::scale_copy(dst, dst, count, finish.factor);
  }
};

// Real and imaginary part by turns: but for the product, twice as many real numbers.
template <typename E>
struct Complex {
  template <Fold operation>
  static void fold(void* dst, const void* const* sources, int n_sources, size_t count, const Finish& finish) {
    constexpr Fold kOfParts = operation == Fold::kProduct ? Fold::kComplexProduct : operation;
    Floating<PlainFormat<E>>::template fold<kOfParts>(dst, sources, n_sources, 2 * count, finish);
  }

  static void scale_copy(void* dst, const void* src, size_t count, double factor) {
    Floating<PlainFormat<E>>::scale_copy(dst, src, 2 * count, factor);
  }
};

template <typename E>
struct Integer {
  using Format = PlainFormat<E>;

  template <Fold operation>
  static void fold(void* dst_pointer, const void* const* source_pointers, int n_sources, size_t count,
                   const Finish& finish) {
    char* dst = static_cast<char*>(dst_pointer);
    const auto* sources = reinterpret_cast<const char* const*>(source_pointers);
    const bool divides_only = finish.factor == 1.0 && finish.divisor != 1;
    if constexpr (operation == Fold::kSum) {  // Average
      if (divides_only && ShiftDivision<E>::can_divide_by(finish.divisor)) {
        return fold_sources<operation, Format>(dst, sources, n_sources, count, ShiftDivision<E>(finish.divisor));
      }
      if constexpr (sizeof(E) < 8) {
        if (divides_only) {
          return fold_sources<operation, Format>(dst, sources, n_sources, count, ReciprocalDivision<E>(finish.divisor));
        }
      }
    }
    fold_sources<operation, Format>(dst, sources, n_sources, count, Unchanged<Format>());
    if (finish.factor != 1.0 || divides_only) finish_integers<E>(dst, dst, count, finish);
  }

  static void scale_copy(void* dst, const void* src, size_t count, double factor) {
    finish_integers<E>(static_cast<char*>(dst), static_cast<const char*>(src), count, Finish{factor, 1});
  }
};

// Bytes 0 and 1. There is nothing to finish.
struct Bool {
  template <Fold operation>
  static void fold(void* dst, const void* const* sources, int n_sources, size_t count, const Finish&) {
    Integer<uint8_t>::fold<operation>(dst, sources, n_sources, count, Finish{});
  }
};

template <typename Numbers>
constexpr void add_arithmetic(Kernels& table, hvd_dtype dtype) {
  table.scale_copy[dtype] = Numbers::scale_copy;
  table.fold[dtype][HVD_AVERAGE] = Numbers::template fold<Fold::kSum>;
  table.fold[dtype][HVD_SUM] = Numbers::template fold<Fold::kSum>;
  table.fold[dtype][HVD_PRODUCT] = Numbers::template fold<Fold::kProduct>;
}

template <typename Numbers>
constexpr void add_order(Kernels& table, hvd_dtype dtype) {
  table.fold[dtype][HVD_MIN] = Numbers::template fold<Fold::kMin>;
  table.fold[dtype][HVD_MAX] = Numbers::template fold<Fold::kMax>;
}

template <typename E>
constexpr void add_integer(Kernels& table, hvd_dtype dtype) {
  add_arithmetic<Integer<E>>(table, dtype);
  add_order<Integer<E>>(table, dtype);
}

template <typename Format, typename Order = Floating<Format>>
constexpr void add_floating(Kernels& table, hvd_dtype dtype) {
  add_arithmetic<Floating<Format>>(table, dtype);
  add_order<Order>(table, dtype);
  table.adasum_sums[dtype] = adasum_sums<Format>;
  table.adasum_combine[dtype] = adasum_combine<Format>;
}

// Constant-initialised: loading the library must not run code of an instruction set that the processor may lack.
constexpr Kernels make_table(const char* name) {
  Kernels table{};
  table.name = name;
  table.copy = copy_vectors<false>;
  table.copy_past_caches = copy_vectors<true>;
  add_integer<uint8_t>(table, HVD_UINT8);
  add_integer<int8_t>(table, HVD_INT8);
  add_integer<uint16_t>(table, HVD_UINT16);
  add_integer<int16_t>(table, HVD_INT16);
  add_integer<uint32_t>(table, HVD_UINT32);
  add_integer<int32_t>(table, HVD_INT32);
  add_integer<uint64_t>(table, HVD_UINT64);
  add_integer<int64_t>(table, HVD_INT64);
  add_floating<Float16Format, Compared<Float16Format>>(table, HVD_FLOAT16);
  add_floating<BFloat16Format, Compared<BFloat16Format>>(table, HVD_BFLOAT16);
  add_floating<PlainFormat<float>>(table, HVD_FLOAT32);
  add_floating<PlainFormat<double>>(table, HVD_FLOAT64);
  add_arithmetic<Complex<float>>(table, HVD_COMPLEX64);
  add_arithmetic<Complex<double>>(table, HVD_COMPLEX128);
  table.fold[HVD_BOOL][HVD_SUM] = Bool::fold<Fold::kOr>;
  table.fold[HVD_BOOL][HVD_MAX] = Bool::fold<Fold::kOr>;
  table.fold[HVD_BOOL][HVD_MIN] = Bool::fold<Fold::kAnd>;
  table.fold[HVD_BOOL][HVD_PRODUCT] = Bool::fold<Fold::kAnd>;
  return table;
}

}  // namespace
}  // namespace hvd
#endif  // HOROVOD_KERNELS_KERNELS_IMPL_H_
