// Every table of kernels against a plain reference, to the bit. So all tables agree with each other.
#include "kernels/kernels.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels_reference.h"
#include "kernels_values.h"

namespace {

using namespace hvd::reference;
using hvd::Finish;
using hvd::Kernels;

// ---- Types to sweep over -------------------------------------------------------------------------------------------

struct DType {
  hvd_dtype dtype;
  const char* name;
  size_t size;
  Bytes (*values)(size_t count, std::mt19937_64& random);
  Bytes (*reference)(hvd_reduce_op, const std::vector<Bytes>&, const Finish&);
  bool is_integer, is_complex;
};

template <typename Type>
constexpr DType describe(hvd_dtype dtype, const char* name) {
  using Value = typename Type::Value;
  return {dtype, name, Type::kSize, values<Type>, reference_fold<Type>, std::is_integral_v<Value>, kIsComplex<Value>};
}

constexpr DType kTypes[] = {
    describe<Plain<uint8_t>>(HVD_UINT8, "uint8"),
    describe<Plain<int8_t>>(HVD_INT8, "int8"),
    describe<Plain<uint16_t>>(HVD_UINT16, "uint16"),
    describe<Plain<int16_t>>(HVD_INT16, "int16"),
    describe<Plain<int32_t>>(HVD_INT32, "int32"),
    describe<Plain<int64_t>>(HVD_INT64, "int64"),
    describe<Float16>(HVD_FLOAT16, "float16"),
    describe<Plain<float>>(HVD_FLOAT32, "float32"),
    describe<Plain<double>>(HVD_FLOAT64, "float64"),
    describe<Bool>(HVD_BOOL, "bool"),
    describe<BFloat16>(HVD_BFLOAT16, "bfloat16"),
    describe<Plain<uint32_t>>(HVD_UINT32, "uint32"),
    describe<Plain<uint64_t>>(HVD_UINT64, "uint64"),
    describe<Complex<float>>(HVD_COMPLEX64, "complex64"),
    describe<Complex<double>>(HVD_COMPLEX128, "complex128"),
};
constexpr hvd_dtype kMovedOnly[] = {HVD_FLOAT8_E4M3FN, HVD_FLOAT8_E5M2};
static_assert(std::size(kTypes) + std::size(kMovedOnly) == hvd::kDTypes);

constexpr hvd_reduce_op kOps[] = {HVD_SUM, HVD_MIN, HVD_MAX, HVD_PRODUCT};  // Average is Sum: tested once

bool supported(const DType& type, hvd_reduce_op op) {
  if (type.dtype == HVD_BOOL && op == HVD_AVERAGE) return false;
  if (type.is_complex && (op == HVD_MIN || op == HVD_MAX)) return false;
  return op != HVD_ADASUM;
}

// ---- Running a kernel ----------------------------------------------------------------------------------------------

constexpr int kNoAlias = -1;

// Folds the last `count` elements of the sources and compares with the end of what is expected: elements do not depend
// on each other.
struct Case {
  const Kernels& table;
  const DType& type;
  hvd_reduce_op op;
  const std::vector<Placed>& sources;
  const Bytes& expected;
  Finish finish;

  void check(size_t count, size_t dst_offset, int alias) const {
    const size_t bytes = count * type.size;
    const Bytes guard(64, 0xa5);  // around dst: nothing else may be written
    static Bytes memory;
    memory.assign(guard.size() + dst_offset + bytes + guard.size(), 0xa5);
    uint8_t* dst = memory.data() + guard.size() + dst_offset;
    std::vector<const void*> pointers;
    for (const Placed& source : sources) pointers.push_back(source.last(bytes));
    if (alias != kNoAlias) {
      std::memcpy(dst, pointers[alias], bytes);
      pointers[alias] = dst;
    }
    table.fold[type.dtype][op](dst, pointers.data(), static_cast<int>(pointers.size()), count, finish);
    const bool same = std::memcmp(dst, expected.data() + expected.size() - bytes, bytes) == 0 &&
                      std::memcmp(dst - guard.size(), guard.data(), guard.size()) == 0 &&
                      std::memcmp(dst + bytes, guard.data(), guard.size()) == 0;
    if (!same) {
      FAIL_CHECK(table.name, " ", type.name, " op ", static_cast<int>(op), " of ", sources.size(), " sources, count ",
                 count, ", dst offset ", dst_offset, ", alias ", alias, ", factor ", finish.factor, ", divisor ",
                 finish.divisor);
    }
  }
};

template <typename Type>
std::vector<uint16_t> scaled_halves(const std::vector<uint16_t>& halves, float factor) {
  std::vector<uint16_t> result;
  for (uint16_t half : halves) {
    result.push_back(static_cast<uint16_t>(Type::encode_bits(Type::decode_bits(half) * factor)));
  }
  return result;
}

// ---- Tests ---------------------------------------------------------------------------------------------------------

TEST_CASE("the best table is the last of those that this processor can run") {
  const auto tables = hvd::all_kernels();
  REQUIRE(!tables.empty());
  CHECK(tables.front()->name == std::string("baseline"));
  CHECK(&hvd::kernels() == tables.back());
  std::string names;
  for (const Kernels* table : tables) names += std::string(" ") + table->name;
  MESSAGE("tables tested:", names);
}

TEST_CASE("copying copies all bytes and no others, however the two ends are aligned") {
  std::vector<uint8_t> from(20'000), to(20'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + i / 251 + 1) | 1;
  const auto check = [&](auto copy, const char* name) {
    for (const size_t bytes : {0, 1, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 257, 2047, 2048, 4096, 16'001}) {
      for (const size_t from_offset : {0, 1, 16, 33}) {
        for (const size_t to_offset : {0, 1, 16, 63}) {
          std::fill(to.begin(), to.end(), 0);
          copy(to.data() + to_offset, from.data() + from_offset, bytes);
          const auto first = to.begin() + static_cast<ptrdiff_t>(to_offset),
                     last = first + static_cast<ptrdiff_t>(bytes);
          const bool right = std::equal(first, last, from.begin() + static_cast<ptrdiff_t>(from_offset)) &&
                             std::count(to.begin(), first, 0) == first - to.begin() &&
                             std::count(last, to.end(), 0) == to.end() - last;
          CHECK_MESSAGE(right, name, ": ", bytes, " bytes from offset ", from_offset, " to ", to_offset);
        }
      }
    }
  };
  for (const Kernels* table : hvd::all_kernels()) {
    check(table->copy, table->name);
    check(table->copy_past_caches, table->name);
  }
  check(hvd::copy_bytes, "copy_bytes");
  check(hvd::copy_past_caches, "copy_past_caches");
}

TEST_CASE("a table has exactly what is supported") {
  for (const Kernels* table : hvd::all_kernels()) {
    for (const DType& type : kTypes) {
      CHECK((table->scale_copy[type.dtype] != nullptr) == (type.dtype != HVD_BOOL));
      for (int op = 0; op < hvd::kReduceOps; ++op) {
        CHECK((table->fold[type.dtype][op] != nullptr) == supported(type, static_cast<hvd_reduce_op>(op)));
      }
      if (type.dtype != HVD_BOOL) CHECK((table->fold[type.dtype][HVD_AVERAGE] == table->fold[type.dtype][HVD_SUM]));
    }
    for (hvd_dtype dtype : kMovedOnly) {
      CHECK((table->scale_copy[dtype] == nullptr));
      for (auto* fold_function : table->fold[dtype]) CHECK((fold_function == nullptr));
    }
  }
}

TEST_CASE("fold: every type, operation, number of sources, length, alignment and aliasing") {
  // Around the widths of vectors (16 to 64 bytes) and of blocks (512 to 4096 elements).
  const size_t counts[] = {0,  1,  2,  3,   4,   5,   7,   8,   9,   15,   16,   17,   31,   32,  33,
                           63, 64, 65, 127, 129, 511, 512, 513, 530, 1023, 1024, 1025, 1063, 2049};
  const size_t long_counts[] = {4095, 4096, 4097, 4162};  // the blocks of bytes
  const size_t most = 4162;
  std::mt19937_64 random(1);
  for (const DType& type : kTypes) {
    std::vector<Finish> finishes = {{1.0, 1}, {-2.7, 5}};
    if (type.is_integer) {
      finishes.insert(finishes.end(), {{1.0, 3}, {1.0, 4}});
    } else {
      finishes.push_back({1.0 / 3, 1});
    }
    for (int n_sources : {1, 2, 3, 7}) {
      std::vector<Bytes> data;
      for (int s = 0; s < n_sources; ++s) data.push_back(type.values(most, random));
      std::vector<Placed> placed[2];  // aligned, unaligned
      for (int s = 0; s < n_sources; ++s) {
        placed[0].emplace_back(data[s], 0);
        placed[1].emplace_back(data[s], s + 1);
      }
      for (hvd_reduce_op op : kOps) {
        if (!supported(type, op)) continue;
        for (const Finish& finish : finishes) {
          const Bytes expected = type.reference(op, data, finish);
          for (const Kernels* table : hvd::all_kernels()) {
            for (size_t p = 0; p < 2; ++p) {
              const Case one{*table, type, op, placed[p], expected, finish};
              for (int alias : {kNoAlias, 0, n_sources - 1}) {
                for (size_t count : counts) one.check(count, p * 3, alias);
                if (type.size == 1) {
                  for (size_t count : long_counts) one.check(count, p * 3, alias);
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("fold: hundreds of sources, and dst one in their midst") {
  std::mt19937_64 random(2);
  for (const DType& type : kTypes) {
    std::vector<Bytes> data;
    std::vector<Placed> placed;
    for (int s = 0; s < 300; ++s) {
      data.push_back(type.values(1100, random));
      placed.emplace_back(data.back(), 0);
    }
    for (hvd_reduce_op op : {HVD_SUM, HVD_MAX}) {
      if (!supported(type, op)) continue;
      const Bytes expected = type.reference(op, data, Finish{});
      for (const Kernels* table : hvd::all_kernels()) {
        Case{*table, type, op, placed, expected, Finish{}}.check(1100, 0, 150);
      }
    }
  }
}

TEST_CASE("scale_copy: every type, in place and out of place, unaligned") {
  std::mt19937_64 random(3);
  for (const DType& type : kTypes) {
    if (type.dtype == HVD_BOOL) continue;
    const Bytes data = type.values(1000, random);
    for (double factor : {1.0, 0.5, 1.0 / 7, -3.0, 1e30, 0.0}) {
      const Bytes expected = type.reference(HVD_SUM, {data}, Finish{factor, 1});
      for (const Kernels* table : hvd::all_kernels()) {
        for (size_t count : {0, 1, 7, 33, 1000}) {
          const size_t bytes = count * type.size;
          const Placed source(data, 1);
          Placed dst(data, 3);
          table->scale_copy[type.dtype](dst.last(bytes), source.last(bytes), count, factor);
          CHECK(std::memcmp(dst.last(bytes), expected.data() + expected.size() - bytes, bytes) == 0);
          table->scale_copy[type.dtype](source.last(bytes), source.last(bytes), count, factor);
          CHECK(std::memcmp(source.last(bytes), expected.data() + expected.size() - bytes, bytes) == 0);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("all halves survive widening and rounding", Type, Float16, BFloat16) {
  const hvd_dtype dtype = std::is_same_v<Type, Float16> ? HVD_FLOAT16 : HVD_BFLOAT16;
  const auto halves = all_halves();
  auto expected = halves;
  for (uint16_t& half : expected) {
    if ((half & 0x7fff) > Type::kInfinity) half = dtype == HVD_FLOAT16 ? 0x7e00 : 0x7fc0;
  }
  for (const Kernels* table : hvd::all_kernels()) {
    CHECK(fold<uint16_t>(*table, dtype, HVD_MAX, {halves, halves}) == expected);
    CHECK(scale(*table, dtype, halves, 1.0) == halves);  // nothing is computed: NaNs stay what they are
  }
}

TEST_CASE_TEMPLATE("halves are rounded to nearest even, into subnormals and to infinity", Type, Float16, BFloat16) {
  const hvd_dtype dtype = std::is_same_v<Type, Float16> ? HVD_FLOAT16 : HVD_BFLOAT16;
  const auto halves = all_halves();
  // Powers of two shift ties into the subnormals; the others reach ties of normal values and everything between.
  for (float factor : {0.5f, 0.25f, 0x1p-5f, 0x1p-10f, 0x1p-11f, 0x1p-100f, 1.5f, 1.25f, 1.0009765625f, 1.00390625f,
                       1.0f / 3, 0.99999994f, 1.0000001f, 2.0f, 3.0f, 1000.0f, -0.1f, 1e38f}) {
    const auto expected = scaled_halves<Type>(halves, factor);
    for (const Kernels* table : hvd::all_kernels()) CHECK(scale(*table, dtype, halves, factor) == expected);
  }
}

TEST_CASE("halves are rounded once, after the last source and the factor") {
  for (const Kernels* table : hvd::all_kernels()) {
    // 2048 + 1 is not a float16; 60000 + 60000 is beyond its range.
    const std::vector<uint16_t> big = {0x6800, 0x7b53}, small = {0x3c00, 0x7b53};
    const auto sum = fold<uint16_t>(*table, HVD_FLOAT16, HVD_SUM, {big, small, small});
    CHECK(sum[0] == 0x6801);  // 2050
    CHECK(sum[1] == 0x7c00);  // infinity
    CHECK(fold<uint16_t>(*table, HVD_FLOAT16, HVD_AVERAGE, {big, small}, {0.5, 1})[1] == 0x7b53);
    // 256 + 1 + 1 in bfloat16, which has no 257.
    CHECK(fold<uint16_t>(*table, HVD_BFLOAT16, HVD_SUM, {{0x4380}, {0x3f80}, {0x3f80}})[0] == 0x4381);
  }
}

TEST_CASE("the fold goes from left to right") {
  for (const Kernels* table : hvd::all_kernels()) {
    CHECK(fold<float>(*table, HVD_FLOAT32, HVD_SUM, {{1e8f}, {1.0f}, {-1e8f}})[0] == 0.0f);
    CHECK(fold<float>(*table, HVD_FLOAT32, HVD_SUM, {{1e8f}, {-1e8f}, {1.0f}})[0] == 1.0f);
    CHECK(fold<double>(*table, HVD_FLOAT64, HVD_PRODUCT, {{1e300}, {1e300}, {1e-300}})[0] == INFINITY);
  }
}

TEST_CASE("NaN and signed zeros") {
  const uint32_t nan_with_payload = 0xff801234, nan = 0x7fc00000, minus_zero = 0x80000000, one = 0x3f800000;
  const std::vector<uint32_t> a = {nan_with_payload, one, 0, minus_zero, 0x7f800000};
  const std::vector<uint32_t> b = {one, nan_with_payload, minus_zero, 0, 0xff800000};
  for (const Kernels* table : hvd::all_kernels()) {
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_MIN, {a, b}) == std::vector<uint32_t>{nan, nan, 0, minus_zero, b[4]});
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_MAX, {a, b}) == std::vector<uint32_t>{nan, nan, 0, minus_zero, a[4]});
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_SUM, {a, b}) == std::vector<uint32_t>{nan, nan, 0, 0, nan});
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_SUM, {a}) == a);
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_MIN, {b, b, a, b})[0] == nan);
    CHECK(fold<uint32_t>(*table, HVD_FLOAT32, HVD_SUM, {{minus_zero}, {minus_zero}})[0] == minus_zero);
  }
}

TEST_CASE("NaN and signed zeros in Min and Max of halves") {
  for (const auto& [dtype, infinity] : {std::pair{HVD_FLOAT16, uint16_t{0x7c00}}, {HVD_BFLOAT16, uint16_t{0x7f80}}}) {
    const auto nan = static_cast<uint16_t>(dtype == HVD_FLOAT16 ? 0x7e00 : 0x7fc0);
    const auto signalling = static_cast<uint16_t>(infinity + 1), negative = static_cast<uint16_t>(infinity | 0x8000);
    const std::vector<uint16_t> a = {signalling, 0xffff, 1, 0, 0x8000, infinity, 0x8001};
    const std::vector<uint16_t> b = {1, 0, signalling, 0x8000, 0, negative, 0x8002};
    for (const Kernels* table : hvd::all_kernels()) {
      CHECK(fold<uint16_t>(*table, dtype, HVD_MIN, {a, b}) ==
            std::vector<uint16_t>{nan, nan, nan, 0, 0x8000, negative, 0x8002});
      CHECK(fold<uint16_t>(*table, dtype, HVD_MAX, {a, b}) ==
            std::vector<uint16_t>{nan, nan, nan, 0, 0x8000, infinity, 0x8001});
    }
  }
}

TEST_CASE_TEMPLATE("complex numbers multiply by the formula", E, float, double) {
  const hvd_dtype dtype = std::is_same_v<E, float> ? HVD_COMPLEX64 : HVD_COMPLEX128;
  using Numbers = std::vector<std::complex<E>>;
  constexpr E kInfinity = std::numeric_limits<E>::infinity();
  for (const Kernels* table : hvd::all_kernels()) {
    const Numbers a = {{1, 2}, {0, 1}, {-3, 0.5}}, b = {{3, -4}, {0, 1}, {2, 8}};
    CHECK(fold<std::complex<E>>(*table, dtype, HVD_PRODUCT, {a, b}) == Numbers{{11, 2}, {-1, 0}, {-10, -23}});
    CHECK(fold<std::complex<E>>(*table, dtype, HVD_PRODUCT, {a, a, a}, {2.0, 1})[1] == std::complex<E>(0, -2));
    CHECK(fold<std::complex<E>>(*table, dtype, HVD_AVERAGE, {a, b}, {0.5, 1}) ==
          Numbers{{2, -1}, {0, 1}, {-0.5, 4.25}});
    CHECK(scale(*table, dtype, a, -2.0) == Numbers{{-2, -4}, {0, -2}, {6, -1}});
    const auto infinite = fold<std::complex<E>>(*table, dtype, HVD_PRODUCT, {{{kInfinity, 0}}, {{1, 1}}})[0];
    CHECK(std::isinf(infinite.real()));
    CHECK(infinite.imag() == kInfinity);
    const auto nan = fold<std::complex<E>>(*table, dtype, HVD_PRODUCT, {{{kInfinity, kInfinity}}, {{1, 1}}})[0];
    CHECK(std::isnan(nan.real()));
    CHECK(nan.imag() == kInfinity);
  }
}

}  // namespace
