// Standing orders: small allreduces between hosts in one trip.
//
// Agreement costs two trips, "ready" and the log, before the data make theirs. For a name that is reduced again and
// again, alone, while somebody waits for it, the answer is known beforehand. So the coordinator says it once, for all
// rounds to come: from then on each member sends its values to all others as soon as it has them, in a letter
// (transport/letter_boxes.h), and a round is complete for a member when the letters of all others are there. No ready,
// no log. Different names need no order among each other, since letters say to which order they belong.
//
//   Stand{order, id}       in the log, just before the Run of the round that is agreed on as usual. Orders have numbers
//                          of their own, each used once.
//   Evict{id}              ends the order. Who reads it answers Ended{order, rounds}, the number of rounds for which it
//                          has sent its letter or is about to, and sends no more.
//   Settle{order, rounds}  when all have answered: the least of these numbers.
//
// What keeps it safe
//
//   Begin. Nobody can submit the name for a round after Stand before that Run's batch has ended; then every member has
//   read Stand, since a sum needs the values of all. (So a name without bytes never stands.) All therefore agree which
//   round is the order's first, and a box is open before its first letter can come.
//   Rounds. A name is pending once at most, and a member ends round k only with everybody's k-th letter. So the numbers
//   of rounds differ by one at most, and a box never holds more than two letters of one sender.
//   End. Let n be the least number in all the answers. Nobody has ended round n + 1, because one member never sent its
//   letter; and round n ends everywhere, because everybody has. A member that had sent its letter for n + 1 has that
//   operation pending, and takes it back when it reads Settle; by its Ended the coordinator counts it as a full request
//   for the name from that moment on. So a mismatch, a stall, a joined rank or a removed process set is then found,
//   told and answered in the one way that there is.
//   Join. A rank that joins ends all orders, none begins while anybody has joined, and join ends only when all have
//   been settled: what was pending counts by then.
//   Loss. An operation under an order is a batch of its own in the executor, with the same checks for peers that are
//   gone. When the job fails for another reason it is failed like one that was never logged.
//   Same bits. Members fold in the order of ranks, as always.
//
// When an order stands: see Coordinator::may_stand. It ends by whatever evicts the name: another signature, a full
// cache, a joined rank, a removed set; and when a member asks for it (Revoke), because
//   - its operation has waited for so long that it may become a stall, which only the coordinator can tell,
//   - kUnwanted times in a row nobody waited for it: then fusion with others is worth more, or
//   - it was not used for kIdle (the coordinator's rank asks): others may want its place.
// Each of these takes long, or many rounds, and so does the way back: a name does not go to and fro.
#ifndef HOROVOD_ENGINE_STANDING_ORDERS_H_
#define HOROVOD_ENGINE_STANDING_ORDERS_H_

#include <cstdint>

#include "engine/world.h"

namespace hvd {

// A standing order as a member sees it.
struct StandingOrder {
  static constexpr int kUnwanted = 8;
  static constexpr Nanoseconds kIdle = 60'000'000'000;
  static constexpr Nanoseconds kMostPatience = 5'000'000'000;

  uint64_t rounds = 0;         // that were given to the executor
  Nanoseconds last_round = 0;  // when that was
  int unwanted = 0;            // rounds in a row for which nobody waited
  bool revoking = false;       // we have asked to end it
  bool ended = false;          // its Evict has been read
  bool settled = false;        // and its Settle, but a round still runs here
};

// How long an operation may wait under an order, before the coordinator must know of it; 0: for ever.
inline Nanoseconds patience_of_orders(const Settings& settings) {
  double shortest = 0;
  for (const double seconds : {settings.stall_warning, settings.stall_shutdown}) {
    if (seconds > 0 && (shortest == 0 || seconds < shortest)) shortest = seconds;
  }
  const auto half = static_cast<Nanoseconds>(shortest * 1e9 / 2);
  return half < StandingOrder::kMostPatience ? half : StandingOrder::kMostPatience;
}

}  // namespace hvd
#endif  // HOROVOD_ENGINE_STANDING_ORDERS_H_
