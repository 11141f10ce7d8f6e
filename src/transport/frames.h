// What goes over a link: frames, each with a header, and for some kinds bytes behind it. See link.h.
#ifndef HOROVOD_TRANSPORT_FRAMES_H_
#define HOROVOD_TRANSPORT_FRAMES_H_

#include <cstdint>

#include "transport/segment.h"

namespace hvd {

struct FrameHeader {
  enum Kind : uint32_t {
    kData = 1,    // `value` bytes follow; they begin at `position` of the lane
    kCredit = 2,  // the sender of this frame has taken in `position` bytes of the lane
    kBye = 3,     // the last frame: `value` is the sender's RankState, `position` the rank because of which
    kLetter = 4,  // `value` bytes follow, a letter for box `position`
  };
  static constexpr uint64_t kMostBytes = 256 << 10;
  static constexpr int kLanes = Segment::kLanes;

  uint32_t kind = 0;
  uint32_t lane = 0;
  uint64_t value = 0;
  uint64_t position = 0;
  uint64_t padding[5] = {};  // see aligned.h
};
static_assert(sizeof(FrameHeader) == 64);

// Throws BadFrame if no sender of this version would send that.
void check_frame(const FrameHeader& header);

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_FRAMES_H_
