// The records that ranks exchange: what a rank sends to the coordinator, and the entries of the log.
//
// Plain bytes in host order (the ranks of a host share them in memory). Every read is checked against the record's
// length; a record that does not parse throws BadMessage, whatever is in it.
#ifndef HOROVOD_ENGINE_MESSAGES_H_
#define HOROVOD_ENGINE_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"

namespace hvd {

using Bytes = std::vector<std::byte>;
using BytesView = std::span<const std::byte>;

struct BadMessage : Error {
  explicit BadMessage(const std::string& what) : Error(HVD_SYSTEM, "a message between ranks makes no sense: " + what) {}
};

// ---- To the coordinator ----

// A rank submits a name that has no cached id, or whose metadata has changed.
struct Submit {
  Key key;
  Meta meta;
  bool wanted = false;
};
// A rank begins to wait for a name that it submitted by such a message.
struct Want {
  Key key;
};
// A rank has nothing to do with a removed process set any more.
struct Closed {
  int32_t set = 0;
};
// A rank would rather have no standing order for this name (standing_orders.h). unfit: also not later.
struct Revoke {
  uint64_t order = 0;
  bool unfit = false;
};
// A rank has read that a standing order has ended, and has taken part in so many of its rounds.
struct Ended {
  uint64_t order = 0;
  uint64_t rounds = 0;
};
// A rank neither reads nor writes letters of a settled order any more: its tray may be used again.
struct Vacated {
  uint64_t order = 0;
};
// A rank submits the names of a sequence in another order (sequences.h).
struct Disorder {
  uint64_t sequence = 0;
};
// A rank has read that a sequence has ended, and has arrived by bit for what it had submitted in it.
struct Arrived {
  uint64_t sequence = 0;
};
using ToCoordinator = std::variant<Submit, Want, Closed, Revoke, Ended, Vacated, Disorder, Arrived>;

// ---- The log ----

// From here on, id stands for this name with this metadata.
struct Define {
  uint32_t id = 0;
  Key key;
  Meta meta;
};
// Run these together, now. All have the same operation, dtype, set and factors.
struct Run {
  std::vector<uint32_t> ids;
};
// The id stands for nothing any more.
struct Evict {
  uint32_t id = 0;
};
// The ranks disagree about this name: it fails on all of them.
struct Refuse {
  Key key;
  std::string text;
};
// There is a new process set.
struct AddSet {
  int32_t set = 0;
  std::vector<int> ranks;
};
// A process set is not to be used any more.
struct RemoveSet {
  int32_t set = 0;
};
// Every rank is done with a removed process set: its id may be used again.
struct RemoveEnd {
  int32_t set = 0;
};
// All ranks have joined.
struct JoinEnd {
  int32_t last = 0;  // the rank that joined last
};
// After its next Run the id has a standing order (standing_orders.h), until it is evicted.
struct Stand {
  uint64_t order = 0;
  uint32_t id = 0;
  int32_t tray = -1;     // of members that share a host (transport/trays.h); -1: there are none
  uint64_t letters = 0;  // that were written in this tray before
};
// The rounds of an order that has ended which all members have taken part in, and which therefore count.
struct Settle {
  uint64_t order = 0;
  uint64_t rounds = 0;
};
// Each of these ids, from its next Run on, is submitted in this order, as a sequence (sequences.h).
struct BeginSequence {
  uint64_t sequence = 0;
  uint32_t place = 0;  // of its words in the segment
  std::vector<uint32_t> ids;
};
// Run the submissions from begin to end of a sequence, counted from its first one; as Run does.
struct RunSequence {
  uint64_t sequence = 0;
  uint64_t begin = 0, end = 0;
};
// The ids of a sequence are on their own again; what was submitted in it and has not been run counts as never said.
struct EndSequence {
  uint64_t sequence = 0;
};
// Everything ends, with this error.
struct Stop {
  hvd_status status = HVD_STALLED;
  std::string text;
};
using LogEntry = std::variant<Define, Run, Evict, Refuse, Stop, AddSet, RemoveSet, RemoveEnd, JoinEnd, Stand, Settle,
                              BeginSequence, RunSequence, EndSequence>;

Bytes encode(const ToCoordinator& message);
Bytes encode(const LogEntry& entry);
ToCoordinator decode_to_coordinator(BytesView bytes);
LogEntry decode_log_entry(BytesView bytes);

}  // namespace hvd
#endif  // HOROVOD_ENGINE_MESSAGES_H_
