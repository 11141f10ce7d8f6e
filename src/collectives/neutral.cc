#include "collectives/neutral.h"

#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>

#include "collectives/batch.h"

namespace hvd {
namespace {

enum Kind { kOne, kLowest, kHighest };

template <typename T>
T element(Kind kind) {
  using Limits = std::numeric_limits<T>;
  if (kind == kOne) return T(1);
  if (kind == kLowest) return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  return Limits::has_infinity ? Limits::infinity() : Limits::max();
}

// By bit pattern: one, minus infinity, infinity.
uint16_t half_element(hvd_dtype dtype, Kind kind) {
  static constexpr uint16_t kFloat16[] = {0x3C00, 0xFC00, 0x7C00}, kBfloat16[] = {0x3F80, 0xFF80, 0x7F80};
  return (dtype == HVD_FLOAT16 ? kFloat16 : kBfloat16)[kind];
}

template <typename T>
void fill(void* data, size_t bytes, T value) {
  auto* to = static_cast<std::byte*>(data);
  for (size_t at = 0; at + sizeof value <= bytes; at += sizeof value) std::memcpy(to + at, &value, sizeof value);
}

}  // namespace

void fill_neutral(void* data, size_t bytes, hvd_dtype dtype, hvd_reduce_op op) {
  if (op != HVD_MIN && op != HVD_MAX && op != HVD_PRODUCT) {
    std::memset(data, 0, bytes);
    return;
  }
  const Kind kind = op == HVD_PRODUCT ? kOne : op == HVD_MAX ? kLowest : kHighest;
  switch (dtype) {
    case HVD_UINT8:
      return fill(data, bytes, element<uint8_t>(kind));
    case HVD_INT8:
      return fill(data, bytes, element<int8_t>(kind));
    case HVD_UINT16:
      return fill(data, bytes, element<uint16_t>(kind));
    case HVD_INT16:
      return fill(data, bytes, element<int16_t>(kind));
    case HVD_UINT32:
      return fill(data, bytes, element<uint32_t>(kind));
    case HVD_INT32:
      return fill(data, bytes, element<int32_t>(kind));
    case HVD_UINT64:
      return fill(data, bytes, element<uint64_t>(kind));
    case HVD_INT64:
      return fill(data, bytes, element<int64_t>(kind));
    case HVD_FLOAT16:
    case HVD_BFLOAT16:
      return fill(data, bytes, half_element(dtype, kind));
    case HVD_FLOAT32:
      return fill(data, bytes, element<float>(kind));
    case HVD_FLOAT64:
      return fill(data, bytes, element<double>(kind));
    case HVD_BOOL:
      return fill(data, bytes, static_cast<uint8_t>(kind == kLowest ? 0 : 1));
    case HVD_COMPLEX64:
      return fill(data, bytes, std::complex<float>(1));
    case HVD_COMPLEX128:
      return fill(data, bytes, std::complex<double>(1));
    case HVD_FLOAT8_E4M3FN:
    case HVD_FLOAT8_E5M2:
      return;  // never reduced
  }
}

}  // namespace hvd
