#include "transport/frames.h"

#include <bit>
#include <string>

#include "transport/errors.h"
#include "transport/letter_boxes.h"

namespace hvd {

static_assert(std::endian::native == std::endian::little, "headers go over the wire as they lie in memory");

void check_frame(const FrameHeader& header) {
  const bool known = header.kind >= FrameHeader::kData && header.kind <= FrameHeader::kLetter;
  if (!known) throw BadFrame("kind " + std::to_string(header.kind));
  if (header.lane >= static_cast<uint32_t>(FrameHeader::kLanes)) throw BadFrame("lane " + std::to_string(header.lane));
  if (header.kind == FrameHeader::kData && (header.value == 0 || header.value > FrameHeader::kMostBytes)) {
    throw BadFrame(std::to_string(header.value) + " bytes in one frame");
  }
  if (header.kind == FrameHeader::kLetter && (header.value == 0 || header.value > LetterBoxes::kMostBytes)) {
    throw BadFrame(std::to_string(header.value) + " bytes in one letter");
  }
  if (header.kind == FrameHeader::kBye && header.value != kDeparted && header.value != kBroken) {
    throw BadFrame("a last word of " + std::to_string(header.value));
  }
}

}  // namespace hvd
