// Sequences: a step of many names that is repeated in the same order is agreed on by a count, not name by name.
//
// A training step submits the same names in the same order again and again. When the coordinator has seen that on one
// host, it makes a *sequence* of them: from then on a rank says how many of them it has submitted so far, by one store
// into a word of its own. The least of the members' words is how much is ready; a batch is a range of the sequence.
//
//   BeginSequence{sequence, place, ids}  in the log. Each id belongs to it from its next Run on; until then it is
//                                        submitted by bit as ever. `place` is where the members' words are, which may
//                                        have been another sequence's before.
//   RunSequence{sequence, begin, end}    run submissions begin to end, counted from the first one of the sequence.
//                                        Submission i is of the (i modulo n)-th of its n ids. A range goes on where
//                                        the last one ended.
//   EndSequence{sequence}                its ids are on their own again. Who reads it arrives by bit for all that it
//                                        has submitted in the sequence and that was not run, and then says Arrived.
//   Disorder{sequence}                   of a member that submits another id of it than the next one. It holds that
//                                        back, and all that follow, until it reads the end of the sequence.
//
// What keeps it safe
//
//   Begin. A rank submits a name again only after the batch of its last round, whose Run it has read by then. So all
//   members change from bits to the sequence in the same round of a name, wherever they are in the log at the moment.
//   Count. A name is pending once at most; so nobody is ahead of what was run by more than n. A word holds the number
//   of its sequence, so that what a rank has left there of an earlier one counts as nothing.
//   End. The coordinator does not look at the words any more once it has logged the end. Which submissions were run is
//   the same for all readers of the log; each member says the others once more, by bit, which is the way that all the
//   rest knows: a mismatch, an eviction, a joined rank, a removed set, a stall.
//   Join. A rank that joins ends all sequences, and none begins while anybody has joined. As long as a member has not
//   said Arrived it may have submissions that only it knows of. Until then nobody arrives on behalf of who has joined,
//   and join does not end.
//   Wakes. As with bits. A rank stores its word, then looks whether the coordinator sleeps and whether all members have
//   come to where that is worth a wake (Segment::sequence_wake). The coordinator stores that count, then says that it
//   sleeps, then looks at the words. A thread that begins to wait stores what it waits for, then lowers that count,
//   then looks at the words. All of it is sequentially consistent: of any two one sees the other.
//
// Batches. A range is closed by the rules of coordinator.h, with two differences. If somebody waits for a part of it,
// but those who hold the others up are submitting, one name some microseconds after the other, all of them are waited
// for, a millisecond at most: the step is then one batch instead of a dozen. And the coordinator is not woken by the
// first name of a step when the last step was some milliseconds ago, and came as a whole: its engine looks by itself
// every few milliseconds, which costs less.
//
// When there is one: see Coordinator::consider_sequence. It ends by whatever withdraws one of its names, when a rank
// joins, by Disorder, when nothing has moved for so long that it may be a stall, and when its names are waited for one
// by one: then standing orders (standing_orders.h) are better. After an end that came soon it takes twice as many equal
// steps until the next one begins.
#ifndef HOROVOD_ENGINE_SEQUENCES_H_
#define HOROVOD_ENGINE_SEQUENCES_H_

#include <cstdint>
#include <vector>

namespace hvd {

// The words in the segment.
struct SequenceWord {
  static constexpr int kCountBits = 40;
  static constexpr uint64_t kMostCount = (uint64_t{1} << kCountBits) - 1;
  static constexpr uint64_t kMostNumber = (uint64_t{1} << (64 - kCountBits)) - 1;

  static uint64_t make(uint64_t sequence, uint64_t count) { return sequence << kCountBits | count; }
  // 0 if the word is about another sequence.
  static uint64_t count(uint64_t word, uint64_t sequence) {
    return word >> kCountBits == sequence ? word & kMostCount : 0;
  }
};

// A sequence as a member's engine has it.
struct Sequence {
  uint64_t number = 0;  // 0: there is none
  std::vector<uint32_t> ids;
  std::vector<int> members;  // local ranks
  uint64_t submitted = 0, run = 0;
  std::vector<uint64_t> wants;  // submissions that a thread waits for, counted from 1
  bool disorder = false;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_SEQUENCES_H_
