// Standing orders: operations without agreement.
//
// Agreement costs two waits, for "ready" and for the log, before the data cost theirs: each of them a trip between
// hosts, and among ranks that share cores a turn on the processor. For a name that is run again and again, alone, while
// somebody waits for it, the answer is known beforehand. So the coordinator says it once, for all rounds to come:
// from then on each member sends its values to all others as soon as it has them, in a *letter*, and a round is
// complete for a member when the letters of all others are there. No ready, no log. Letters to other hosts go over the
// network, to boxes that have the order's number (transport/letter_boxes.h); for those on its own host a member leaves
// one in shared memory, in the order's tray (transport/trays.h). So different names need no order among each other.
// A larger sum between hosts with as many members each begins with letters, too, of its first bytes: when all have come
// everybody has begun, and the rest goes over a lane of the order's own. Who shares its host leaves such a letter in
// its tray, and each adds a part of those of its host up and sends it, as its letter, to who does the same elsewhere.
// Allreduces have standing orders on any hosts; broadcast, reducescatter, allgather and alltoall among members of one.
//
//   Stand{order, id, tray} in the log, just before the Run of the round that is agreed on as usual. Orders have numbers
//                          of their own, each used once.
//   Evict{id}              ends the order. Who reads it answers Ended{order, rounds}, the number of rounds for which it
//                          has sent its letter or is about to, and sends no more.
//   Settle{order, rounds}  when all have answered: the least of these numbers.
//   Vacated{order}         the answer to that of who is done with the last of these rounds, if the order has a tray.
//
// What keeps it safe
//
//   Begin. Nobody can submit the name for a round after Stand before that Run's batch has ended there. So all agree
//   which round is the order's first. A sum needs the values of all: then every member has read Stand, and a box is
//   open before its first letter can come. (So a sum without bytes never stands.) Trays are there from the beginning.
//   Rounds. A name is pending once at most, and a member ends round k only with everybody's k-th letter. So the numbers
//   of rounds differ by one at most, and a box never holds more than two letters of one sender. Nor does a tray: who
//   writes letter k + 2 has everybody's letter k + 1, and who has written that has read all that it reads of letters k.
//   End. Let n be the least number in all the answers. Nobody has ended round n + 1, because one member never sent its
//   letter; and round n ends everywhere, because everybody has. A member that had sent its letter for n + 1 has that
//   operation pending, and takes it back when it reads Settle; by its Ended the coordinator counts it as a full request
//   for the name from that moment on. So a mismatch, a stall, a joined rank or a removed process set is then found,
//   told and answered in the one way that there is.
//   Trays. After Settle a member may still read letters of round n. When it has ended that round, and taken back a
//   later one, it neither reads nor writes letters of this order again, and says Vacated. When all members have, nobody
//   does, and the tray may be another order's. Letters of a tray are numbered on from order to order, so that one which
//   was taken back is never taken for another.
//   Lanes. An order that needs one has a tray for its number: that of a lane is the same, and it passes to another
//   order by the same rule. Nobody uses the lane in a round before it knows that all have begun it: it has the letters
//   of all others on its host, and from every other host one that was made of all those there. So no such round is
//   taken back, but when the job fails: then its memory is let go of, on all members, and nothing follows. The lane's
//   channel on a host begins anew with each order: a member clears its part of it when it reads Stand, and nobody looks
//   there before it has a letter that was written later.
//   Join. A rank that joins ends all orders, none begins while anybody has joined, and join ends only when all have
//   been settled: what was pending counts by then.
//   Loss. An operation under an order is a batch of its own in the executor, with the same checks for peers that are
//   gone: what such a one has sent is used, also from its tray, which stays mapped; a wait for more ends with an error.
//   When the job fails for another reason it is failed like one that was never logged.
//   Memory. The flags of all trays exist from the beginning; that for a member's letters, and for its part of the
//   lane's channel, is made sure of when it reads Stand. If there is none it asks to end the order, and sends no letter
//   of it. So does a member whose rows, in an allgather or alltoall, are more than a letter holds. The name does not
//   stand again then. Same bits. Members fold in the order of ranks on each host, and then in that of hosts, as always.
//
// When an order stands: see Coordinator::may_stand. It ends by whatever evicts the name: another signature, a full
// cache, a joined rank, a removed set; and when a member asks for it (Revoke), because
//   - its operation has waited for so long that it may become a stall, which only the coordinator can tell,
//   - kUnwanted times in a row nobody waited for it: then fusion with others is worth more, or
//   - it was not used for kIdle (its first member asks): others may want its place.
// Each of these takes long, or many rounds, and so does the way back: a name does not go to and fro.
#ifndef HOROVOD_ENGINE_STANDING_ORDERS_H_
#define HOROVOD_ENGINE_STANDING_ORDERS_H_

#include <cstdint>

#include "api/horovod.h"
#include "engine/world.h"
#include "transport/durations.h"
#include "transport/letter_boxes.h"
#include "transport/trays.h"

namespace hvd {

// The longest letter that is worth it on one host: where each member has a core of its own, and where not. There
// agreement costs as much as many bytes. Broadcasts go on in parts as soon as there is one.
inline uint64_t longest_letter_on_host(hvd_op op, bool crowded) {
  if (crowded) return Trays::kMostBytes;
  return op == HVD_BROADCAST ? 64 << 10 : 32 << 10;
}

// Between hosts: the most bytes of a sum that goes by letters alone, where every member is alone on its host; and where
// not, since each host's values go over the cable once for each pair of members.
constexpr uint64_t kLongestLetters = 256 << 10;
static_assert(kLongestLetters <= LetterBoxes::kMostBytes && kLongestLetters <= Trays::kMostBytes);
inline uint64_t longest_letter_to_hosts(size_t hosts) { return kLongestLetters / (hosts - 1); }
constexpr uint64_t kLongestLetterOfMixed = 4 << 10;
// The most of one that begins with letters and goes on over a lane of its own.
constexpr uint64_t kLongestSumByLane = 16 << 20;
// Whether a sum of these ranks is such a one.
inline bool goes_by_lane(const World& world, const std::vector<int>& ranks, uint64_t bytes) {
  const size_t each = world.number_on_each_host(ranks);
  if (each == 0 || each == ranks.size()) return false;
  return bytes > (each == 1 ? longest_letter_to_hosts(ranks.size()) : kLongestLetterOfMixed);
}

// A standing order as a member sees it.
struct StandingOrder {
  static constexpr int kUnwanted = 8;
  static constexpr Nanoseconds kIdle = 60'000'000'000;
  static constexpr Nanoseconds kMostPatience = 5'000'000'000;

  int tray = -1;  // where the letters of those on one host lie, or whose lane the rest goes over
  bool by_lane = false;
  uint64_t letters = 0;         // that were written there before
  bool looks_for_idle = false;  // we are its first member
  bool no_memory = false;       // for our letters: we hold back what is submitted until it ends
  uint64_t longest = 0;         // bytes of a letter
  uint64_t rounds = 0;          // that were given to the executor
  Nanoseconds last_round = 0;   // when that was
  int unwanted = 0;             // rounds in a row for which nobody waited
  bool revoking = false;        // we have asked to end it
  bool ended = false;           // its Evict has been read
  bool settled = false;         // and its Settle, but a round still runs here
};

// How long an operation may wait under an order, before the coordinator must know of it; 0: for ever.
inline Nanoseconds patience_of_orders(const Settings& settings) {
  double shortest = 0;
  for (const double seconds : {settings.stall_warning, settings.stall_shutdown}) {
    if (seconds > 0 && (shortest == 0 || seconds < shortest)) shortest = seconds;
  }
  const Nanoseconds half = nanoseconds_of(shortest) / 2;
  return half < StandingOrder::kMostPatience ? half : StandingOrder::kMostPatience;
}

}  // namespace hvd
#endif  // HOROVOD_ENGINE_STANDING_ORDERS_H_
