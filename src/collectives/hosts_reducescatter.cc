// Reducescatter over several hosts. As on one host (reducescatter.cc), every member publishes its chunk in its host's
// shared memory, an equal share of every member's lane in it:
//
//   chunk k   | lane 0, k-th part | lane 1, k-th part | ... |
//
// On each host somebody folds each lane over the members of that host: its owner if it is there, else the member at
// place (member number mod members here), who sends the partial result to the owner. The owner folds what the hosts
// have sent, in their order. So a host sends each byte that it owes to another host once.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"
#include "transport/errors.h"

namespace hvd {
namespace {

constexpr size_t kLongestElement = 16;

class Scatter {
 public:
  Scatter(const Group& group, const Batch& batch)
      : group_(group), channel_(group.channel()), arithmetic_(batch, group.size()) {
    const int n = group.size();
    const size_t even = Channel::kChunkBytes / static_cast<size_t>(n);
    part_ = even >= kLine ? even / kLine * kLine : even / kLongestElement * kLongestElement;
    if (part_ == 0) throw Error(HVD_SYSTEM, "reducescatter of " + std::to_string(n) + " ranks: too many");
    lanes_.resize(static_cast<size_t>(n));
    for (size_t t = 0; t < batch.rows.size(); ++t) {
      const RowsTensor& tensor = batch.rows[t];
      size_t start = 0;
      for (int m = 0; m < n; ++m) {
        const auto bytes = static_cast<size_t>(rows_of(m, n, tensor.counts[0])) * tensor.row_bytes;
        lane(m).add(tensor.input + start, m == group.me() ? batch.output(t) : nullptr, bytes);
        start += bytes;
      }
    }
    for (const Batch& one : lanes_) longest_ = std::max(longest_, one.bytes());
    const int here = channel_.size();
    for (int h = 0; h < group.hosts(); ++h) {
      if (h == group.host()) continue;
      for (const int m : group.members(h)) {
        if (m % here == channel_.me()) ours_.push_back({m, group.stream(m), {}});
      }
      // Who on that host folds for us.
      senders_.push_back({h, group.stream(h, group.me() % static_cast<int>(group.members(h).size())), {}});
    }
    for (Round& round : rounds_) {
      round.outgoing = std::make_unique_for_overwrite<std::byte[]>(part_ * ours_.size());
      round.incoming = std::make_unique_for_overwrite<std::byte[]>(part_ * static_cast<size_t>(group.hosts()));
    }
  }

  size_t steps() const { return (longest_ + part_ - 1) / part_; }
  size_t chunk_bytes() const { return part_ * lanes_.size(); }

  void copy_in(size_t k, uint64_t s) {
    std::byte* const chunk = channel_.payload(channel_.me(), s, chunk_bytes());
    for (size_t m = 0; m < lanes_.size(); ++m) {
      lanes_[m].for_pieces(k * part_, (k + 1) * part_,
                           [&](const std::byte* input, std::byte*, size_t offset, size_t bytes) {
                             arithmetic_.copy_in(chunk + m * part_ + offset, input, bytes);
                           });
    }
  }

  // Folds the lanes that are ours to fold, sends those of others and asks for our own.
  void fold_here(size_t k, uint64_t s) {
    Round& round = rounds_[k % 2];
    for (size_t i = 0; i < ours_.size(); ++i) {
      std::byte* const to = round.outgoing.get() + i * part_;
      const size_t bytes = part_bytes(ours_[i].member, k);
      fold_lane(ours_[i].member, s, to, bytes);
      ours_[i].position[k % 2] = ours_[i].stream.send(to, bytes);
    }
    const size_t bytes = part_bytes(group_.me(), k);
    fold_lane(group_.me(), s, incoming(k, group_.host()), bytes);
    for (Peer& sender : senders_) sender.position[k % 2] = sender.stream.receive(incoming(k, sender.member), bytes);
  }

  // With all hosts' partial results received.
  void fold_hosts(size_t k) {
    std::vector<const void*> sources(static_cast<size_t>(group_.hosts()));
    lane(group_.me())
        .for_pieces(k * part_, (k + 1) * part_, [&](const std::byte*, std::byte* output, size_t offset, size_t bytes) {
          for (int h = 0; h < group_.hosts(); ++h) {
            sources[static_cast<size_t>(h)] = incoming(k, h) + offset;
          }
          arithmetic_.fold(output, sources, bytes);
        });
  }

  struct Peer {
    int member;  // of senders_: its host
    Stream stream;
    std::array<uint64_t, 2> position;  // by round
    Until sent(size_t k) { return stream.sent(position[k % 2]); }
    Until received(size_t k) { return stream.received(position[k % 2]); }
  };
  std::vector<Peer>& lanes_sent() { return ours_; }
  std::vector<Peer>& senders() { return senders_; }

 private:
  struct Round {
    std::unique_ptr<std::byte[]> outgoing, incoming;
  };

  Batch& lane(int member) { return lanes_[static_cast<size_t>(member)]; }
  size_t part_bytes(int member, size_t k) {
    const size_t all = lane(member).bytes(), lo = std::min(k * part_, all);
    return std::min(part_, all - lo);
  }
  std::byte* incoming(size_t k, int host) { return rounds_[k % 2].incoming.get() + part_ * static_cast<size_t>(host); }
  void fold_lane(int member, uint64_t s, std::byte* to, size_t bytes) {
    std::vector<const void*> sources;
    for (int m = 0; m < channel_.size(); ++m) {
      sources.push_back(channel_.payload(m, s, chunk_bytes()) + static_cast<size_t>(member) * part_);
    }
    arithmetic_.fold_partly(to, sources, bytes);
  }

  const Group& group_;
  Channel& channel_;
  const Arithmetic arithmetic_;
  std::vector<Batch> lanes_;  // by member
  size_t part_ = 0;           // bytes of a lane in a chunk
  size_t longest_ = 0;
  std::vector<Peer> ours_;     // members on other hosts whose lanes we fold here
  std::vector<Peer> senders_;  // who folds our lane on the other hosts
  std::array<Round, 2> rounds_;
};

}  // namespace

Task reducescatter_between_hosts(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  Scatter scatter(group, batch);
  uint64_t ahead = 0, current = 0;
  for (size_t k = 0; scatter.steps() > 0 && k < scatter.steps() + 2; ++k) {
    if (k < scatter.steps()) {
      ahead = channel.next_chunk();
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
      scatter.copy_in(k, ahead);
      channel.publish(ahead, scatter.chunk_bytes());
    }
    if (k >= 1 && k - 1 < scatter.steps()) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, current);
      scatter.fold_here(k - 1, current);
      channel.finish(current);
    }
    if (k >= 2) {
      for (auto& sender : scatter.senders()) co_await sender.received(k - 2);
      scatter.fold_hosts(k - 2);
      for (auto& lane : scatter.lanes_sent()) co_await lane.sent(k - 2);
      co_await LetOthers{};
    }
    current = ahead;
  }
}

}  // namespace hvd
