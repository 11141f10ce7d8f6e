#include "transport/trays.h"

#include <string>

#include "transport/errors.h"

namespace hvd {

Trays::Trays(std::shared_ptr<Segment> segment, Channel& channel) : segment_(std::move(segment)), channel_(channel) {
  for (const int local_rank : channel_.members()) {
    heads_.push_back(reinterpret_cast<Head*>(segment_->tray_heads(local_rank)));
    interests_ |= interest::published(local_rank);
  }
}

std::span<const std::byte> Trays::letter(int member, int tray, uint64_t letter) const {
  const uint64_t bytes = head(member, tray, letter).bytes;
  if (bytes <= kMostBytes) return {payload(member, tray, letter, bytes), bytes};
  throw Error(HVD_SYSTEM, "rank " + std::to_string(channel_.ranks()[static_cast<size_t>(member)]) +
                              " says that its letter has " + std::to_string(bytes) + " bytes");
}

void Trays::publish(int tray, uint64_t letter, size_t bytes) {
  channel_.count_published(bytes);
  head(channel_.me(), tray, letter).bytes = bytes;
  const uint64_t whole = letter * kParts + kParts;
  head(channel_.me(), tray, letter).number.store(whole);
  // Of several that are published at the same time the last one sees all others.
  for (int m = 0; m < channel_.size(); ++m) {
    if (head(m, tray, letter).number.load() < whole) return;
  }
  channel_.ring_published();
}

}  // namespace hvd
