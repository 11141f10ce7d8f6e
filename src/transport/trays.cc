#include "transport/trays.h"

namespace hvd {

Trays::Trays(std::shared_ptr<Segment> segment, Channel& channel) : segment_(std::move(segment)), channel_(channel) {
  for (const int local_rank : channel_.members()) {
    heads_.push_back(reinterpret_cast<Head*>(segment_->tray_heads(local_rank)));
    interests_ |= interest::published(local_rank);
  }
}

void Trays::publish(int tray, uint64_t letter, size_t bytes) {
  channel_.count_published(bytes);
  head(channel_.me(), tray, letter).number.store(letter);
  // Of several that are published at the same time the last one sees all others.
  for (int m = 0; m < channel_.size(); ++m) {
    if (head(m, tray, letter).number.load() < letter) return;
  }
  channel_.ring_published();
}

}  // namespace hvd
