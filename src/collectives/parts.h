// How a payload is cut into parts, each of which has an owner.
#ifndef HOROVOD_COLLECTIVES_PARTS_H_
#define HOROVOD_COLLECTIVES_PARTS_H_

#include <cstddef>

#include "transport/segment.h"

namespace hvd {

struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};

// The i-th of n parts of so many bytes: whole cache lines, so that no two owners write one and no element is cut.
inline Range part_of(size_t bytes, int i, int n) {
  const auto begin = [bytes, n](int k) {
    return k == n ? bytes : bytes / static_cast<size_t>(n) * static_cast<size_t>(k) / kLine * kLine;
  };
  return {begin(i), begin(i + 1)};
}

// At least the bytes of the longest of them, and little more than those of the shortest.
inline size_t longest_part(size_t bytes, int n) {
  return bytes / static_cast<size_t>(n) + static_cast<size_t>(n) + kLine;
}

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_PARTS_H_
