#include "transport/trays.h"

namespace hvd {

Trays::Trays(std::shared_ptr<Segment> segment, Doorbells& doorbells, Counters& counters, std::vector<int> members,
             std::vector<int> ranks, int me)
    : segment_(std::move(segment)),
      doorbells_(doorbells),
      counters_(counters),
      members_(std::move(members)),
      ranks_(std::move(ranks)),
      me_(me) {
  for (const int local_rank : members_) {
    heads_.push_back(reinterpret_cast<Head*>(segment_->tray_heads(local_rank)));
    interests_ |= interest::published(local_rank);
  }
}

void Trays::publish(int tray, uint64_t letter, size_t bytes) {
  counters_.chunks.add();
  counters_.bytes_in.add(bytes);
  head(me_, tray, letter).number.store(letter);
  // Of several that are published at the same time the last one sees all others.
  for (int m = 0; m < static_cast<int>(members_.size()); ++m) {
    if (head(m, tray, letter).number.load() < letter) return;
  }
  const int me_here = members_[static_cast<size_t>(me_)];
  for (const int local_rank : members_) {
    if (local_rank != me_here) doorbells_.ring(local_rank, interest::published(me_here));
  }
}

}  // namespace hvd
