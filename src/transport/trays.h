// How the members of a standing order (engine/standing_orders.h) that share a host exchange their letters.
//
// Words. The segment has kTrays *trays*; an order whose members share hosts has one of them, on every host the same.
// (One of members that are alone on their hosts, but need a lane, has one for its number only.) In a tray each rank of
// the host has room for two letters. The letters of a tray are numbered 1, 2, ... over its whole life, whichever order
// has it, and the order's members count alike; letter n lies at n % 2. It has a head (one line), in which a payload of
// up to kInlineBytes rides, so that flag and payload come over in one cache line, and a buffer. The head also says how
// many bytes the letter has.
//
// Per rank, tray and n % 2 one flag, written by that rank alone:
//   number = n * kParts + p   "published": the first p parts of my letter n may be read; all of it if p is kParts
//
// Into how many parts a letter is cut, and where, its readers know; most have one. Who waits for a part looks for it,
// or sleeps until the last letter is complete.
//
// Safety: an order writes a letter each round. Who writes letter n + 2 has everybody's letter n + 1; and who has
// written that has ended the round before, and so reads nothing of letter n any more. A tray passes to another order
// only when all members have said that they are done with the last one's letters, and that order's letters have higher
// numbers than any before: what is left in the tray is never taken for them.
#ifndef HOROVOD_TRANSPORT_TRAYS_H_
#define HOROVOD_TRANSPORT_TRAYS_H_

#include <memory>
#include <span>
#include <vector>

#include "collectives/task.h"
#include "transport/channel.h"
#include "transport/segment.h"

namespace hvd {

// The trays as one member of a process set sees them.
class Trays {
 public:
  static constexpr int kTrays = Segment::kOrderLanes;
  static constexpr size_t kMostBytes = 256 << 10;  // of a letter
  static constexpr size_t kInlineBytes = kLine - 16;
  static constexpr uint64_t kParts = 16;

  struct Head {
    alignas(kLine) Flag number;
    uint64_t bytes;
    std::byte payload[kInlineBytes];
  };
  static_assert(sizeof(Head) == kLine);
  static constexpr size_t kHeadBytesPerRank = 2 * kTrays * sizeof(Head);
  static constexpr size_t kBytesPerRank = 2 * kMostBytes;  // of one tray

  // channel: that of the same members, which must live as long.
  Trays(std::shared_ptr<Segment> segment, Channel& channel);

  // Where a member's letter of this many bytes lies.
  std::byte* payload(int member, int tray, uint64_t letter, size_t bytes) const {
    if (bytes <= kInlineBytes) return head(member, tray, letter).payload;
    return segment_->tray(tray, channel_.members()[static_cast<size_t>(member)]) + letter % 2 * kMostBytes;
  }
  // The whole letter of a member, which it has published.
  std::span<const std::byte> letter(int member, int tray, uint64_t letter) const;
  // To be awaited of every other member; of a letter's first parts, too, by who wants them.
  Until published(int member, int tray, uint64_t letter, uint64_t part = kParts) const {
    return {{&head(member, tray, letter).number, letter * kParts + part, channel_.ranks()[static_cast<size_t>(member)],
             interests_}};
  }
  // Our own's next part, which is not the last.
  void publish_part(int tray, uint64_t letter, uint64_t part) {
    head(channel_.me(), tray, letter).number.store(letter * kParts + part);
  }
  // Our own, of which the payload is there. Wakes those who sleep if it is the last: they have no use for one before.
  void publish(int tray, uint64_t letter, size_t bytes);

 private:
  Head& head(int member, int tray, uint64_t letter) const {
    return heads_[static_cast<size_t>(member)][2 * static_cast<size_t>(tray) + letter % 2];
  }

  const std::shared_ptr<Segment> segment_;
  Channel& channel_;
  std::vector<Head*> heads_;  // by member
  uint64_t interests_ = 0;    // of who waits for any of the others
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_TRAYS_H_
