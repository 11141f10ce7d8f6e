// The coordinator: the one place where the order of execution is decided. It is part of global rank 0's engine and runs
// on whichever thread drives that.
//
// State of a name (a process set and a tensor's name)
//
//   unknown      A rank that submits it sends a full request. When requests of all members are in, they are compared:
//                a difference becomes a Refuse in the log, for all members at once. Otherwise the name gets an id, a
//                Define, and is ready.
//   cached       Its id has a slot in the segment. A rank that submits it with the same metadata adds itself to
//                `arrived` and toggles its bit in `present`; no message. The submission that makes the round complete
//                puts the id into the ready ring. Rounds can't overlap: a rank submits a name again only after the
//                batch that ended its last round, and that batch is logged only when all members had arrived.
//   withdrawn    A member sent a full request for a cached name (its metadata changed), or the id is needed for another
//                name. The coordinator logs an Evict; who had arrived in the slot by bit and not been logged sends a
//                full request instead. The id is used again only when every rank has read the Evict: until then
//                somebody may still add to its slot.
//
// A rank that has joined counts as having submitted whatever the others of a set have: the coordinator arrives in the
// slots on its behalf, and its engine contributes the neutral element. Where that has no meaning the name is refused.
// While anybody has joined the coordinator looks again every kQuiet, since submissions that do not complete a round
// don't wake it.
//
// The id of a removed process set is used again only when every rank has said that it is done with its channel.
//
// Ids beyond the cache's capacity have no slot: they are defined, run once and evicted.
//
// From ready to a batch: ready ids wait in a queue per class (same set, operation, dtype, reduction, root, factors),
// which is closed into one or more Run entries when
//   - a rank waits for a member of it, or
//   - its bytes reach the fusion threshold (a batch never exceeds it, unless one tensor does alone), or
//   - as many ids are ready as came in the whole last step of this class: nothing more is to be expected (a step ends
//   when
//     an id becomes ready for the second time), or
//   - nothing was added for kQuiet and the set's batches before have ended.
#ifndef HOROVOD_ENGINE_COORDINATOR_H_
#define HOROVOD_ENGINE_COORDINATOR_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/messages.h"
#include "engine/world.h"
#include "transport/byte_ring.h"
#include "transport/counters.h"
#include "transport/doorbell.h"
#include "transport/segment.h"

namespace hvd {

class Coordinator {
 public:
  static constexpr Nanoseconds kQuiet = 1'000'000;
  static constexpr Nanoseconds kStallCheckInterval = 1'000'000'000;
  static constexpr uint32_t kUncachedIds = 1024;

  // set_busy(set): whether this rank still runs a batch of that set.
  Coordinator(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
              Counters& counters, std::function<bool(int)> set_busy);

  // Takes in what ranks submitted and appends what can be decided to the log. True if anything happened.
  // Throws BadMessage.
  bool poll();
  // Whether poll() would find something new; safe to ask after arming the doorbell.
  bool has_news() const;
  // Before this rank sleeps: says which submissions are worth a wake. Returns the interests to arm.
  uint64_t prepare_sleep();
  // Whether ready names wait for nothing but time, or something waits for the log's readers, who ring nobody: poll()
  // must be called again within kQuiet.
  bool ticking() const {
    return (ready_count_ > 0 && !stopped_) || !outbox_.empty() || !no_id_yet_.empty() || !joined_.empty();
  }
  // Ends the job on all ranks with this error.
  void stop(hvd_status status, const std::string& text);

 private:
  enum class IdState : uint8_t { kFree, kLive, kWithdrawn };

  struct Name {
    IdState state = IdState::kFree;
    Key key;
    Meta meta;
    uint64_t members = 0;
    uint64_t bytes = 0;
    uint64_t last_use = 0;
    uint64_t step = 0;           // of its class, in which it was last ready
    uint64_t rounds = 0;         // complete rounds of its slot that were taken from the ready ring
    bool ready = false;          // in a queue, not yet logged
    int queue = -1;              // index into queues_
    uint64_t partial_round = 0;  // the round whose incomplete state was first seen at partial_since
    Nanoseconds partial_since = 0, last_warning = 0;
  };

  struct Pending {  // an unknown name that some ranks have submitted
    std::map<int, Meta> by_rank;
    bool wanted = false;
    Nanoseconds since = 0, last_warning = 0;
  };

  struct Queue {
    int set = 0;
    Meta like;  // shape left out
    std::vector<uint32_t> ids;
    uint64_t bytes = 0;
    Nanoseconds last_added = 0;
    bool wanted = false;
    uint64_t step = 1, seen = 0, expected = 0;
  };

  // Requests, ids, batches and the log: coordinator.cc. Joined ranks and process sets: coordinator_membership.cc.
  void take(int rank, const Submit& message);
  void take(int rank, const Want& message);
  void take(int rank, const Closed& message);
  void join(int rank);
  void submit_for_joined();
  std::vector<int> missing_ranks(uint32_t id) const;
  void complete(const Key& key, Pending pending);
  void change_sets(const Meta& meta);
  bool is_member(int set, int rank) const;
  static bool works_with_join(hvd_op op);
  void define(const Key& key, Pending pending);
  std::optional<uint32_t> free_id();
  void make_room();
  void recycle();
  void withdraw(uint32_t id);
  void add_ready(uint32_t id, bool wanted);
  int queue_for(const Name& name);
  bool must_close(const Queue& queue, Nanoseconds now) const;
  void close(Queue& queue);
  void look_at_wants();
  void append(const LogEntry& entry);
  bool flush_outbox();
  uint64_t slowest_reader() const;
  uint64_t current_round(uint32_t id) const;
  bool cached(uint32_t id) const { return id < static_cast<uint32_t>(segment_->cache_capacity()); }
  void check_stalls(Nanoseconds now);
  void report_stall(const Key& key, const Meta& meta, const std::vector<int>& arrived, const std::vector<int>& missing,
                    Nanoseconds age, Nanoseconds& last_warning, Nanoseconds now);

  const World& world_;
  const Settings& settings_;
  std::shared_ptr<Segment> segment_;
  Doorbells& doorbells_;
  Counters& counters_;
  std::function<bool(int)> set_busy_;

  std::vector<RingReader> requests_;  // by local rank
  RingWriter log_;
  std::deque<Bytes> outbox_;  // entries for which the log had no room
  uint64_t appended_ = 0;     // entries ever appended, those in the outbox included
  uint64_t logged_ = 0;       // entries in the log
  uint64_t ready_head_ = 0;   // tickets taken from the ready ring
  uint64_t want_epoch_ = 0;

  std::vector<std::vector<int>> sets_;  // by id, ranks ascending; empty: there is none
  std::map<int, int> closing_;          // removed sets, and how many ranks still use their channels
  std::vector<int> joined_;             // ranks, in the order in which they came
  std::vector<Name> names_;             // by id
  std::vector<uint32_t> free_cached_, free_uncached_;
  struct Withdrawn {
    uint32_t id;
    uint64_t entry;                        // index of its Evict
    std::optional<uint64_t> log_position;  // end of it, once it is in the log
  };
  std::deque<Withdrawn> withdrawn_;
  std::unordered_map<Key, uint32_t, KeyHash> ids_;
  std::unordered_map<Key, Pending, KeyHash> pending_;
  std::deque<std::pair<Key, Pending>> no_id_yet_;  // complete, but all ids are taken
  std::vector<Queue> queues_;
  size_t ready_count_ = 0;
  uint64_t use_clock_ = 0;
  Nanoseconds last_stall_check_ = 0;
  uint64_t polls_ = 0;
  bool stopped_ = false;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_COORDINATOR_H_
