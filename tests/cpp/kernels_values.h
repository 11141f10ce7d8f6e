// Arrays to test the kernels with, where to place them, and short ways to call a kernel.
#ifndef HOROVOD_TESTS_KERNELS_VALUES_H_
#define HOROVOD_TESTS_KERNELS_VALUES_H_

#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels_reference.h"

namespace hvd::reference {

// Floating types: any bit pattern, values of everyday size, and the awkward ones: zeros, infinities, NaNs, the ends of
// the range.
template <typename Type>
Bytes floating_values(size_t count, std::mt19937_64& random) {
  using Value = typename Type::Value;
  using Limits = std::numeric_limits<Value>;
  const Value awkward[] = {Value(0),
                           Value(-0.0),
                           Value(1),
                           Limits::max(),
                           Limits::lowest(),
                           Limits::infinity(),
                           Value(-Limits::infinity()),
                           Limits::quiet_NaN(),
                           Limits::denorm_min(),
                           Limits::min()};
  Bytes bytes(count * Type::kSize);
  for (size_t at = 0; at < bytes.size(); at += Type::kSize) {
    const uint64_t bits = random();
    const uint64_t kind = random() % 8;
    if (kind == 0) {
      Type::encode(awkward[bits % std::size(awkward)], &bytes[at]);
    } else if (kind < 4) {
      std::memcpy(&bytes[at], &bits, Type::kSize);
    } else {
      Type::encode(static_cast<Value>(static_cast<double>(bits % 20001) / 100.0 - 100.0 * Limits::is_signed),
                   &bytes[at]);
    }
  }
  return bytes;
}

template <typename Type>
Bytes values(size_t count, std::mt19937_64& random) {
  using Value = typename Type::Value;
  if constexpr (kIsComplex<Value>) {
    return floating_values<Plain<typename Type::Part>>(2 * count, random);
  } else if constexpr (std::is_floating_point_v<Value>) {
    return floating_values<Type>(count, random);
  } else {
    Bytes bytes(count * Type::kSize);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(std::is_same_v<Type, Bool> ? random() % 2 : random());
    return bytes;
  }
}

// Bytes that lie `offset` after an aligned address and end where their allocation ends, so that ASan sees
// a read beyond.
class Placed {
 public:
  Placed(const Bytes& bytes, size_t offset)
      : memory_(new uint8_t[offset + bytes.size()]), end_(memory_.get() + offset + bytes.size()) {
    std::memcpy(last(bytes.size()), bytes.data(), bytes.size());
  }
  uint8_t* last(size_t bytes) const { return end_ - bytes; }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  uint8_t* end_;
};

template <typename E>
std::vector<E> fold(const Kernels& table, hvd_dtype dtype, hvd_reduce_op op, const std::vector<std::vector<E>>& sources,
                    Finish finish = {}) {
  std::vector<E> result(sources[0].size());
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  table.fold[dtype][op](result.data(), pointers.data(), static_cast<int>(pointers.size()), result.size(), finish);
  return result;
}

template <typename E>
std::vector<E> scale(const Kernels& table, hvd_dtype dtype, const std::vector<E>& source, double factor) {
  std::vector<E> result(source.size());
  table.scale_copy[dtype](result.data(), source.data(), source.size(), factor);
  return result;
}

inline std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  return halves;
}

}  // namespace hvd::reference
#endif  // HOROVOD_TESTS_KERNELS_VALUES_H_
