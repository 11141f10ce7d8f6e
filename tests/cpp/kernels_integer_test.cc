// What the kernels promise for integers: they wrap, divide toward zero and saturate.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"
#include "kernels_values.h"

namespace {

using namespace hvd::reference;
using hvd::Kernels;

TEST_CASE("integers wrap, divide toward zero and saturate") {
  constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min(), kMax32 = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min(), kMax64 = std::numeric_limits<int64_t>::max();
  for (const Kernels* table : hvd::all_kernels()) {
    using I32 = std::vector<int32_t>;
    using I64 = std::vector<int64_t>;
    CHECK(fold<int32_t>(*table, HVD_INT32, HVD_SUM, {{kMax32, kMin32}, {1, -1}}) == I32{kMin32, kMax32});
    CHECK(fold<int64_t>(*table, HVD_INT64, HVD_PRODUCT, {{kMax64}, {2}}) == I64{-2});
    CHECK(fold<uint8_t>(*table, HVD_UINT8, HVD_SUM, {{200}, {100}})[0] == 44);
    CHECK(fold<int32_t>(*table, HVD_INT32, HVD_AVERAGE, {{-3, 3, kMin32}, {-4, 4, 0}}, {1.0, 2}) ==
          I32{-3, 3, kMin32 / 2});
    CHECK(fold<int64_t>(*table, HVD_INT64, HVD_AVERAGE, {{kMax64, kMin64, -7}}, {1.0, 2}) ==
          I64{kMax64 / 2, kMin64 / 2, -3});
    CHECK(fold<int8_t>(*table, HVD_INT8, HVD_AVERAGE, {{127, -128}}, {1.0, 1000}) == std::vector<int8_t>{0, 0});
    CHECK(scale(*table, HVD_INT32, I32{1, -1, 0}, 1e300) == I32{kMax32, kMin32, 0});
    CHECK(scale(*table, HVD_INT64, I64{1, -1, 0}, 1e300) == I64{kMax64, kMin64, 0});
    CHECK(scale(*table, HVD_INT64, I64{kMax64, kMin64}, -1.0) == I64{kMin64, kMax64});
    CHECK(scale(*table, HVD_UINT8, std::vector<uint8_t>{1, 255}, -0.5) == std::vector<uint8_t>{0, 0});
    CHECK(scale(*table, HVD_INT32, I32{5, -5}, std::nan("")) == I32{0, 0});
    CHECK(scale(*table, HVD_INT64, I64{5, 0}, INFINITY) == I64{kMax64, 0});
    CHECK(scale(*table, HVD_INT32, I32{7, -7}, 0.5) == I32{3, -3});
    using U32 = std::vector<uint32_t>;
    using U64 = std::vector<uint64_t>;
    constexpr uint32_t kMaxU32 = std::numeric_limits<uint32_t>::max();
    constexpr uint64_t kMaxU64 = std::numeric_limits<uint64_t>::max(), kTop = uint64_t{1} << 63;
    CHECK(fold<uint32_t>(*table, HVD_UINT32, HVD_SUM, {{kMaxU32}, {2}}) == U32{1});
    CHECK(fold<uint64_t>(*table, HVD_UINT64, HVD_SUM, {{kMaxU64}, {2}}) == U64{1});
    CHECK(fold<uint64_t>(*table, HVD_UINT64, HVD_MAX, {{kTop, 1}, {1, kTop}}) == U64{kTop, kTop});
    CHECK(fold<uint32_t>(*table, HVD_UINT32, HVD_MIN, {{kMaxU32, 1}, {1, kMaxU32}}) == U32{1, 1});
    CHECK(scale(*table, HVD_UINT32, U32{kMaxU32, 1, 0}, 1.5) == U32{kMaxU32, 1, 0});
    CHECK(scale(*table, HVD_UINT32, U32{kMaxU32, 3}, -0.5) == U32{0, 0});
    CHECK(scale(*table, HVD_UINT64, U64{kMaxU64, kTop, 3}, 2.0) == U64{kMaxU64, kMaxU64, 6});
    // As a double the first of these is 2^64; half of it fits.
    CHECK(scale(*table, HVD_UINT64, U64{kMaxU64, kTop, 3}, 0.5) == U64{kTop, kTop / 2, 1});
    CHECK(scale(*table, HVD_UINT64, U64{kMaxU64, 5}, -1.0) == U64{0, 0});
    CHECK(scale(*table, HVD_UINT64, U64{kMaxU64, 0}, std::nan("")) == U64{0, 0});
  }
}

// Multiples of every divisor and their neighbours, and both ends of the type.
template <typename E>
std::vector<E> dividends_around(int64_t divisor) {
  constexpr auto kHighest = std::numeric_limits<E>::max(), kLowest = std::numeric_limits<E>::min();
  std::vector<E> dividends;
  for (E i = 0; i < 40; ++i)
    dividends.insert(dividends.end(), {static_cast<E>(kHighest - i), static_cast<E>(kLowest + i)});
  const auto step = static_cast<uint64_t>(divisor);
  for (uint64_t factor = 1; factor <= kHighest / step; factor = factor * 3 + 1) {
    const uint64_t multiple = factor * step;
    for (uint64_t offset : {~uint64_t{0}, uint64_t{0}, uint64_t{1}}) {  // -1, 0, 1: unsigned, these may wrap
      dividends.push_back(static_cast<E>(multiple + offset));
      if constexpr (std::is_signed_v<E>) dividends.push_back(static_cast<E>(offset - multiple));
    }
  }
  return dividends;
}

template <typename E, hvd_dtype dtype>
struct Integer {
  using Value = E;
  static constexpr hvd_dtype kDType = dtype;
};
using UInt8 = Integer<uint8_t, HVD_UINT8>;
using Int8 = Integer<int8_t, HVD_INT8>;
using UInt16 = Integer<uint16_t, HVD_UINT16>;
using Int16 = Integer<int16_t, HVD_INT16>;
using UInt32 = Integer<uint32_t, HVD_UINT32>;
using Int32 = Integer<int32_t, HVD_INT32>;
using UInt64 = Integer<uint64_t, HVD_UINT64>;
using Int64 = Integer<int64_t, HVD_INT64>;

TEST_CASE_TEMPLATE("integer Average is exact for every divisor", Type, UInt8, Int8, UInt16, Int16, UInt32, Int32,
                   UInt64, Int64) {
  using E = typename Type::Value;
  std::vector<int64_t> divisors;
  for (int64_t divisor = 2; divisor < 300; ++divisor) divisors.push_back(divisor);
  for (int64_t power = 512; power < (int64_t{1} << 62); power *= 2) {
    divisors.insert(divisors.end(), {power - 1, power, power + 1});
  }
  for (int64_t divisor : divisors) {
    const std::vector<E> dividends = dividends_around<E>(divisor);
    std::vector<E> expected;
    for (E dividend : dividends) {
      if constexpr (sizeof(E) == 8) {
        expected.push_back(dividend / static_cast<E>(divisor));
      } else {
        expected.push_back(static_cast<E>(int64_t{dividend} / divisor));
      }
    }
    for (const Kernels* table : hvd::all_kernels()) {
      CHECK(fold<E>(*table, Type::kDType, HVD_AVERAGE, {dividends}, {1.0, divisor}) == expected);
    }
  }
}

TEST_CASE("Average of 16-bit integers is exact for every dividend and divisor") {
  std::vector<uint16_t> dividends = all_halves();
  for (int64_t divisor : {3, 5, 7, 49, 127, 641, 1000, 4369, 21845, 32767, 32769, 65534, 65535, 65537}) {
    std::vector<uint16_t> expected, expected_signed;
    for (uint16_t dividend : dividends) {
      expected.push_back(static_cast<uint16_t>(dividend / divisor));
      expected_signed.push_back(static_cast<uint16_t>(static_cast<int16_t>(dividend) / divisor));
    }
    for (const Kernels* table : hvd::all_kernels()) {
      CHECK(fold<uint16_t>(*table, HVD_UINT16, HVD_AVERAGE, {dividends}, {1.0, divisor}) == expected);
      CHECK(fold<uint16_t>(*table, HVD_INT16, HVD_AVERAGE, {dividends}, {1.0, divisor}) == expected_signed);
    }
  }
}

}  // namespace
