#include "transport/channel.h"

namespace hvd {

Channel::Channel(std::shared_ptr<Segment> segment, Doorbells& doorbells, Counters& counters, int lane,
                 std::vector<int> members, std::vector<int> ranks, int me)
    : segment_(std::move(segment)),
      doorbells_(doorbells),
      counters_(counters),
      members_(std::move(members)),
      ranks_(std::move(ranks)),
      me_(me) {
  for (const int local_rank : members_) lines_.push_back(reinterpret_cast<Lines*>(segment_->channel(lane, local_rank)));
}

std::unique_ptr<Channel> Channel::open_another(int lane) const {
  const int local_rank = members_[static_cast<size_t>(me_)];
  if (segment_->reserve_channel(lane, local_rank) != 0) return nullptr;
  clear(*segment_, lane, local_rank);
  return std::make_unique<Channel>(segment_, doorbells_, counters_, lane, members_, ranks_, me_);
}

void Channel::clear(const Segment& segment, int lane, int local_rank) {
  auto& lines = *reinterpret_cast<Lines*>(segment.channel(lane, local_rank));
  lines.done.store(0);
  lines.reduced.store(0);
  for (Head& head : lines.heads) head.sequence.store(0);
}

void Channel::publish(uint64_t s, size_t bytes) {
  count_published(bytes);
  lines(me_).heads[s % kSlots].sequence.store(s + 1);
  ring_published();
}

void Channel::publish_reduced(uint64_t s) {
  lines(me_).reduced.store(s + 1);
  ring_published();
}

void Channel::finish(uint64_t s) {
  lines(me_).done.store(s + 1);
  ring(interest::finished(members_[me_]));
}

void Channel::ring(uint64_t interests) {
  for (int m = 0; m < size(); ++m) {
    if (m != me_) doorbells_.ring(members_[static_cast<size_t>(m)], interests);
  }
}

}  // namespace hvd
