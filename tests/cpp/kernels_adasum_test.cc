// The kernels of Adasum: every table against a plain reference, to the bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "kernels_reference.h"
#include "kernels_values.h"

namespace {

using namespace hvd::reference;
using hvd::Kernels;

template <typename Type>
constexpr hvd_dtype kDType = HVD_FLOAT64;
template <>
constexpr hvd_dtype kDType<Float16> = HVD_FLOAT16;
template <>
constexpr hvd_dtype kDType<BFloat16> = HVD_BFLOAT16;
template <>
constexpr hvd_dtype kDType<Plain<float>> = HVD_FLOAT32;
#define ADASUM_TYPES Float16, BFloat16, Plain<float>, Plain<double>

// Around the width of vectors, and of what is read at a time (8 to 32 elements).
constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 1000};

// Finite values of many magnitudes, so that every change of the order of summation shows.
template <typename Type>
Bytes finite_values(size_t count, std::mt19937_64& random) {
  Bytes bytes(count * Type::kSize);
  for (size_t at = 0; at < bytes.size(); at += Type::kSize) {
    const double fraction = static_cast<double>(random() % 2000001) / 1e6 - 1;
    const int exponent = static_cast<int>(random() % 20) - 10;
    Type::encode(static_cast<typename Type::Value>(std::ldexp(fraction, exponent)), &bytes[at]);
  }
  return bytes;
}

bool same_bits(const Sums& expected, const double* sums) {
  uint8_t bytes[sizeof(double)];
  const double wanted[] = {expected.dot, expected.a_squared, expected.b_squared};
  for (int i = 0; i < 3; ++i) {
    Plain<double>::encode(wanted[i], bytes);  // any NaN as the canonical one
    if (std::memcmp(bytes, &sums[i], sizeof(double)) != 0) return false;
  }
  return true;
}

Bytes last_elements(const Bytes& bytes, size_t n_bytes) { return Bytes(bytes.end() - n_bytes, bytes.end()); }

TEST_CASE("Adasum's kernels exist for floating types alone") {
  for (const Kernels* table : hvd::all_kernels()) {
    for (int dtype = 0; dtype < hvd::kDTypes; ++dtype) {
      const bool floating =
          dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16 || dtype == HVD_FLOAT32 || dtype == HVD_FLOAT64;
      CHECK((table->adasum_sums[dtype] != nullptr) == floating);
      CHECK((table->adasum_combine[dtype] != nullptr) == floating);
    }
  }
}

TEST_CASE_TEMPLATE("adasum_sums: lengths, alignments, special values; added to what is there", Type, ADASUM_TYPES) {
  std::mt19937_64 random(4);
  for (auto* make : {finite_values<Type>, values<Type>}) {
    const Bytes a = make(1000, random), b = make(1000, random);
    for (size_t count : kCounts) {
      const size_t bytes = count * Type::kSize;
      for (const Sums& before : {Sums{}, Sums{0.1, 1e3, -7}}) {
        const Sums expected = reference_adasum_sums<Type>(last_elements(a, bytes), last_elements(b, bytes), before);
        for (const Kernels* table : hvd::all_kernels()) {
          for (size_t offset : {0, 1}) {
            const Placed a_placed(a, offset), b_placed(b, 3 * offset);
            double sums[3] = {before.dot, before.a_squared, before.b_squared};
            table->adasum_sums[kDType<Type>](a_placed.last(bytes), b_placed.last(bytes), count, sums);
            if (!same_bits(expected, sums)) {
              FAIL_CHECK(table->name, " dtype ", static_cast<int>(kDType<Type>), " count ", count, " offset ", offset);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("adasum_sums: in double, also where float32 and float16 would overflow or lose everything") {
  for (const Kernels* table : hvd::all_kernels()) {
    const std::vector<float> a = {1e30f, 1e-30f}, b = {2e30f, 3e-30f};
    double sums[3] = {};
    table->adasum_sums[HVD_FLOAT32](&a[0], &b[0], 1, sums);
    CHECK(sums[0] == double{a[0]} * double{b[0]});
    CHECK(sums[1] == double{a[0]} * double{a[0]});
    CHECK(sums[2] == double{b[0]} * double{b[0]});
    double small[3] = {};
    table->adasum_sums[HVD_FLOAT32](&a[1], &b[1], 1, small);
    CHECK(small[0] == double{a[1]} * double{b[1]});
    const std::vector<uint16_t> largest(10000, 0x7bff);  // 65504
    double halves[3] = {};
    table->adasum_sums[HVD_FLOAT16](largest.data(), largest.data(), largest.size(), halves);
    CHECK(halves[0] == 65504.0 * 65504.0 * 10000);
    CHECK(halves[1] == halves[0]);
    CHECK(halves[2] == halves[0]);
  }
}

TEST_CASE_TEMPLATE("adasum_combine: lengths, alignments, aliasing, special values", Type, ADASUM_TYPES) {
  std::mt19937_64 random(5);
  const Bytes a = values<Type>(1000, random), b = values<Type>(1000, random);
  const double coefficients[][2] = {{1, 1}, {0.5, 0.5}, {1.0 / 3, -0.7}, {0, 1}, {1e20, 1e-20}, {1e60, std::nan("")}};
  for (const auto& [ca, cb] : coefficients) {
    const Bytes expected = reference_adasum_combine<Type>(a, b, ca, cb);
    for (const Kernels* table : hvd::all_kernels()) {
      const auto combine = table->adasum_combine[kDType<Type>];
      for (size_t count : kCounts) {
        const size_t bytes = count * Type::kSize;
        const auto right = [&](const Placed& dst) {
          return std::memcmp(dst.last(bytes), expected.data() + expected.size() - bytes, bytes) == 0 &&
                 (count == 1000 || *(dst.last(bytes) - 1) == 0xa5);
        };
        const auto placed = [&](const Bytes& data, size_t offset) {  // behind bytes that must stay
          Bytes marked = data;
          std::fill(marked.begin(), marked.end() - static_cast<ptrdiff_t>(bytes), uint8_t{0xa5});
          return Placed(marked, offset);
        };
        for (size_t offset : {0, 1}) {
          const Placed x = placed(a, offset), y = placed(b, 2 * offset), dst = placed(Bytes(a.size()), 3 * offset);
          combine(dst.last(bytes), x.last(bytes), y.last(bytes), count, ca, cb);
          const bool apart = right(dst);
          const Placed into_a = placed(a, offset), into_b = placed(b, offset);
          combine(into_a.last(bytes), into_a.last(bytes), y.last(bytes), count, ca, cb);
          combine(into_b.last(bytes), x.last(bytes), into_b.last(bytes), count, ca, cb);
          if (!apart || !right(into_a) || !right(into_b)) {
            FAIL_CHECK(table->name, " dtype ", static_cast<int>(kDType<Type>), " count ", count, " offset ", offset,
                       " ca ", ca, " cb ", cb);
          }
        }
      }
    }
  }
}

TEST_CASE("adasum_combine: halves are rounded once") {
  for (const Kernels* table : hvd::all_kernels()) {
    // 65504 * 0.75 + 65504 * 0.25: neither 2 * 65504 nor a product is representable, the sum is.
    const uint16_t largest = 0x7bff;
    uint16_t result = 0;
    table->adasum_combine[HVD_FLOAT16](&result, &largest, &largest, 1, 0.75, 0.25);
    CHECK(result == largest);
    table->adasum_combine[HVD_FLOAT16](&result, &largest, &largest, 1, 3, -2);
    CHECK(result == largest);
  }
}

}  // namespace
