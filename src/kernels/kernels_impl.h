// The kernels themselves, written once for vectors of any width. Included once by each instruction set's source file:
// see vectors.h for what it must define and why everything is in an anonymous namespace.
//
// All formats are folded by the same loops: a vector is loaded and widened, combined with those of the other sources
// from left to right, finished, rounded and stored. The last, incomplete vector goes the same way, filled up with
// zeros, so that an element's result does not depend on its place in the array.
#ifndef HOROVOD_KERNELS_KERNELS_IMPL_H_
#define HOROVOD_KERNELS_KERNELS_IMPL_H_

#include <limits>

#include "kernels/kernels.h"
#include "kernels/vectors.h"

namespace hvd {
namespace {

// ---- Combining two vectors -----------------------------------------------------------------------------------------

enum class Fold { kSum, kMin, kMax, kProduct, kOr, kAnd };

// Signed integers are added and multiplied as unsigned ones: they wrap.
template <typename E, bool = std::is_integral_v<E>>
struct WrappingOf {
  using type = std::make_unsigned_t<E>;
};
template <typename E>
struct WrappingOf<E, false> {
  using type = E;
};

template <Fold fold, typename E>
inline Vector<E> combine_lanes(Vector<E> x, Vector<E> y) {
  using Wrapping = Vector<typename WrappingOf<E>::type>;
  if constexpr (fold == Fold::kSum) {
    return bits_as<Vector<E>>(bits_as<Wrapping>(x) + bits_as<Wrapping>(y));
  } else if constexpr (fold == Fold::kProduct) {
    return bits_as<Vector<E>>(bits_as<Wrapping>(x) * bits_as<Wrapping>(y));
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

template <Fold fold, typename Format>
inline typename Format::Wide combine(typename Format::Wide x, typename Format::Wide y) {
  using Lane = typename Format::Lane;
  if constexpr (std::is_same_v<typename Format::Wide, TwoFloats>) {
    return {combine_lanes<fold, Lane>(x.first, y.first), combine_lanes<fold, Lane>(x.second, y.second)};
  } else {
    return combine_lanes<fold, Lane>(x, y);
  }
}

// ---- Finishing -----------------------------------------------------------------------------------------------------

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

template <typename E>
inline E saturate(double value) {
  constexpr E kLowest = std::numeric_limits<E>::min();
  constexpr E kHighest = std::numeric_limits<E>::max();
  value = value == value ? value : 0.0;
  if constexpr (sizeof(E) == 8) {  // double(kHighest) is one too many
    if (value >= 0x1p63) return kHighest;
    if (value < -0x1p63) return kLowest;
  } else {
    value = value < double{kLowest} ? double{kLowest} : value;
    value = value > double{kHighest} ? double{kHighest} : value;
  }
  return static_cast<E>(value);
}

template <typename E>
inline E finish_integer(E value, const Finish& finish) {
  if constexpr (sizeof(E) == 8) {
    if (finish.factor == 1.0) return value / finish.divisor;
  }
  // Also the plain division of narrower types: a quotient that is no integer can't be rounded to one if the dividend
  // has 32 bits. Doubles divide faster than integers, several at a time.
  return saturate<E>(static_cast<double>(value) * finish.factor / static_cast<double>(finish.divisor));
}

// Integers: over the folded array, which has their type already. Written for the compiler to vectorise.
template <typename E>
void finish_integers(char* dst, const char* src, size_t count, const Finish& finish) {
  const Finish local = finish;
#pragma GCC ivdep  // dst may equal src, but nothing else of it
  for (size_t i = 0; i < count; ++i) {
    store(dst + i * sizeof(E), finish_integer(load<E>(src + i * sizeof(E)), local));
  }
}

// ---- The loops -----------------------------------------------------------------------------------------------------

// With more than two sources the intermediate values of a block stay in L1, and every source is read by blocks:
// hundreds of streams at once would be too many for the prefetcher.
inline constexpr size_t kAccumulatorBytes = 4096;

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
      if (dst != source && bytes > 0) __builtin_memcpy(dst, source, bytes);
      return;
    }
    for (size_t at = 0; at < whole; at += kVectorBytes) Format::store(dst + at, end(Format::load(source + at)));
  } else if (n_sources == 2) {
    const char* first = sources[0];
    const char* second = sources[1];
    for (size_t at = 0; at < whole; at += kVectorBytes) {
      Format::store(dst + at, end(combine<fold, Format>(Format::load(first + at), Format::load(second + at))));
    }
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

template <typename E>
struct Integer {
  using Format = PlainFormat<E>;

  template <Fold operation>
  static void fold(void* dst_pointer, const void* const* sources, int n_sources, size_t count, const Finish& finish) {
    char* dst = static_cast<char*>(dst_pointer);
    fold_sources<operation, Format>(dst, reinterpret_cast<const char* const*>(sources), n_sources, count,
                                    Unchanged<Format>());
    if (finish.factor != 1.0 || finish.divisor != 1) finish_integers<E>(dst, dst, count, finish);
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
constexpr void add(Kernels& table, hvd_dtype dtype) {
  table.scale_copy[dtype] = Numbers::scale_copy;
  table.fold[dtype][HVD_AVERAGE] = Numbers::template fold<Fold::kSum>;
  table.fold[dtype][HVD_SUM] = Numbers::template fold<Fold::kSum>;
  table.fold[dtype][HVD_MIN] = Numbers::template fold<Fold::kMin>;
  table.fold[dtype][HVD_MAX] = Numbers::template fold<Fold::kMax>;
  table.fold[dtype][HVD_PRODUCT] = Numbers::template fold<Fold::kProduct>;
}

// Constant-initialised: loading the library must not run code of an instruction set that the processor may lack.
constexpr Kernels make_table(const char* name) {
  Kernels table{};
  table.name = name;
  add<Integer<uint8_t>>(table, HVD_UINT8);
  add<Integer<int8_t>>(table, HVD_INT8);
  add<Integer<uint16_t>>(table, HVD_UINT16);
  add<Integer<int16_t>>(table, HVD_INT16);
  add<Integer<int32_t>>(table, HVD_INT32);
  add<Integer<int64_t>>(table, HVD_INT64);
  add<Floating<Float16Format>>(table, HVD_FLOAT16);
  add<Floating<PlainFormat<float>>>(table, HVD_FLOAT32);
  add<Floating<PlainFormat<double>>>(table, HVD_FLOAT64);
  add<Floating<BFloat16Format>>(table, HVD_BFLOAT16);
  table.fold[HVD_BOOL][HVD_SUM] = Bool::fold<Fold::kOr>;
  table.fold[HVD_BOOL][HVD_MAX] = Bool::fold<Fold::kOr>;
  table.fold[HVD_BOOL][HVD_MIN] = Bool::fold<Fold::kAnd>;
  table.fold[HVD_BOOL][HVD_PRODUCT] = Bool::fold<Fold::kAnd>;
  return table;
}

}  // namespace
}  // namespace hvd
#endif  // HOROVOD_KERNELS_KERNELS_IMPL_H_
