// How the ranks of a process set on one host exchange chunks of payload.
//
// Words. A set has a channel for its *lane*, and one more for each of its standing orders that needs a lane of its own.
// A *chunk* is one step of one collective; the chunks of a channel are numbered 0, 1, 2, ... over its whole life, the
// same on all members because they run the same log, or the same order's rounds, in the same order. Each member has
// kSlots *slots*; chunk s uses slot s % kSlots. A slot has a head (one line) and a buffer of kChunkBytes; a payload of
// up to kInlineBytes rides in the head itself, so that flag and payload come over in one cache line.
//
// Per member three counters, all written by that member alone:
//   head[s % kSlots].sequence = s + 1   "published": my payload of chunk s may be read
//   reduced = s + 1                     my slice of chunk s is reduced, in place in my buffer
//   done = s + 1                        I read nothing of chunks up to s any more
//
// Safety: a member writes its slot for chunk s only when all members are done with chunk s - kSlots, the last one that
// used the slot; it reads a peer's slot only between that peer's `published` and its own `done`. So nobody writes what
// another reads. Progress: a member that waits, waits for a chunk that its peer will reach by the log alone or, in an
// order's round, which all have begun, by itself.
#ifndef HOROVOD_TRANSPORT_CHANNEL_H_
#define HOROVOD_TRANSPORT_CHANNEL_H_

#include <memory>
#include <vector>

#include "collectives/task.h"
#include "transport/counters.h"
#include "transport/doorbell.h"
#include "transport/segment.h"

namespace hvd {

class Channel {
 public:
  static constexpr uint64_t kSlots = 8;
  static constexpr size_t kChunkBytes = 256 << 10;
  static constexpr size_t kInlineBytes = kLine - 16;

  struct Head {
    alignas(kLine) Flag sequence;
    uint64_t padding;
    std::byte payload[kInlineBytes];
  };
  struct Lines {
    alignas(kLine) Flag done;
    alignas(kLine) Flag reduced;
    Head heads[kSlots];
  };
  static_assert(sizeof(Head) == kLine && sizeof(Lines) <= kPage);
  static constexpr size_t kBytesPerRank = kPage + kSlots * kChunkBytes;

  // members: the local ranks of the set's members on this host, ascending; ranks: their ranks in the job; me: this
  // rank's index among them.
  Channel(std::shared_ptr<Segment> segment, Doorbells& doorbells, Counters& counters, int lane,
          std::vector<int> members, std::vector<int> ranks, int me);
  // A new channel of the same members, at another lane. Our part of it is cleared: the others may look at it when they
  // know that we have made it. Null: there is no memory for our part.
  std::unique_ptr<Channel> open_another(int lane) const;

  // Resets a local rank's part of a lane's channel, when nobody uses it: a new set or order begins.
  static void clear(const Segment& segment, int lane, int local_rank);

  int size() const { return static_cast<int>(members_.size()); }
  int me() const { return me_; }
  const std::vector<int>& members() const { return members_; }
  const std::vector<int>& ranks() const { return ranks_; }
  bool crowded() const { return segment_->crowded(); }
  // The number of the next chunk; every member calls this equally often.
  uint64_t next_chunk() { return next_++; }

  // Where a member's payload of this many bytes lies in chunk s.
  std::byte* payload(int member, uint64_t s, size_t bytes) const {
    Lines& lines = this->lines(member);
    if (bytes <= kInlineBytes) return lines.heads[s % kSlots].payload;
    return reinterpret_cast<std::byte*>(&lines) + kPage + s % kSlots * kChunkBytes;
  }

  // Before writing one's payload of chunk s: wait for this of every other member.
  Until slot_free(int member, uint64_t s) const {
    const uint64_t needed = s < kSlots ? 0 : s - kSlots + 1;
    return {{&lines(member).done, needed, ranks_[member], interest::finished(members_[member])}};
  }
  Until published(int member, uint64_t s) const {
    return {{&lines(member).heads[s % kSlots].sequence, s + 1, ranks_[member], interest::published(members_[member])}};
  }
  Until reduced(int member, uint64_t s) const {
    return {{&lines(member).reduced, s + 1, ranks_[member], interest::published(members_[member])}};
  }
  // Every member is done with chunk s.
  Until done(int member, uint64_t s) const {
    return {{&lines(member).done, s + 1, ranks_[member], interest::finished(members_[member])}};
  }

  // Whether a member says that it has shut down or given up.
  bool has_left(int member) const {
    const uint64_t state = segment_->rank(members_[static_cast<size_t>(member)]).state.load();
    return state == kDeparted || state == kBroken;
  }

  void count_placed(size_t bytes) { counters_.bytes_placed.add(bytes); }
  void count_published(size_t bytes) {
    counters_.chunks.add();
    counters_.bytes_in.add(bytes);
  }
  // Wakes those who sleep until we publish something.
  void ring_published() { ring(interest::published(members_[static_cast<size_t>(me_)])); }
  void publish(uint64_t s, size_t bytes);
  void publish_reduced(uint64_t s);
  void finish(uint64_t s);

 private:
  Lines& lines(int member) const { return *lines_[static_cast<size_t>(member)]; }
  void ring(uint64_t interests);

  std::shared_ptr<Segment> segment_;
  Doorbells& doorbells_;
  Counters& counters_;
  const std::vector<int> members_, ranks_;
  const int me_;
  std::vector<Lines*> lines_;
  uint64_t next_ = 0;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_CHANNEL_H_
