// The coordinator: the one place where the order of execution is decided. It is part of global rank 0's engine and runs
// on whichever thread drives that.
//
// State of a name (a process set and a tensor's name)
//
//   unknown      A rank that submits it sends a full request. When requests of all members are in, they are compared:
//                a difference becomes a Refuse in the log, for all members at once. Otherwise the name gets an id, a
//                Define, and is ready.
//   cached       Its id has a slot in the segment of every host. A rank that submits it with the same metadata adds
//                itself to `arrived` and toggles its bit in `present`; no message. The submission that makes its host's
//                round complete puts the id into the ready ring, and the host's desk (host_desk.h) tells us. When all
//                hosts with members have, the name is ready.
//   withdrawn    A member sent a full request for a cached name (its metadata changed), or the id is needed for another
//                name. The coordinator logs an Evict; who had arrived in the slot by bit and not been logged sends a
//                full request instead. The id is used again only when every host has released it.
//
// A rank that has joined counts as having submitted whatever the others of a set have, and its engine contributes the
// neutral element. On a host with other members of the set its desk sees to that; a host whose members have all joined
// counts as ready as soon as all others are. Where joining has no meaning the name is refused.
//
// The id of a removed process set is used again only when every rank has said that it is done with its channel.
//
// Between hosts. Every host's local rank 0 speaks for it, by one connection to us: it sends what its desk hears, and
// copies the log into its host's segment. Because the log is one sequence and each connection keeps its order, every
// host sees the same entries in the same order, and whatever a host has told about an id precedes its release of it.
//
// A name that is run alone again and again may get a standing order, by which its members need no agreement: see
// standing_orders.h. Names that are run together again and again, in the same order, may become a sequence, on which
// the ranks of one host agree by counting: see sequences.h.
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

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/host_desk.h"
#include "engine/host_messages.h"
#include "engine/hosts.h"
#include "engine/sequences.h"
#include "engine/world.h"
#include "transport/trays.h"

namespace hvd {

class Coordinator final : private HostDesk::Listener {
 public:
  static constexpr Nanoseconds kQuiet = HostDesk::kQuiet;
  static constexpr Nanoseconds kStallCheckInterval = 1'000'000'000;
  static constexpr uint32_t kUncachedIds = 1024;
  // Keeps one entry well below the size of the log.
  static constexpr size_t kMostIdsPerRun = 8192;

  // set_busy(set): whether this rank still runs a batch of that set.
  Coordinator(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
              Counters& counters, Hosts& hosts, std::function<bool(int)> set_busy);

  // Takes in what ranks submitted and appends what can be decided to the log. True if anything happened.
  // Throws BadMessage.
  bool poll();
  // Whether poll() would find something new; safe to ask after arming the doorbell.
  bool has_news() const { return desk_.has_news() || sequences_have_news(); }
  // Before this rank sleeps: says which submissions are worth a wake. Returns the interests to arm.
  uint64_t prepare_sleep(Sleeper sleeper);
  // Whether ready names wait for nothing but time, or something waits for the log's readers, who ring nobody: poll()
  // must be called again within kQuiet.
  bool ticking() const {
    return (ready_count_ > 0 && !stopped_) || sequences_gather() || desk_.ticking() || !no_id_yet_.empty() ||
           !joined_.empty();
  }
  // Whether a sequence is in use, so that its next step need not wake us when it begins: poll() should be called again
  // within some milliseconds. As prepare_sleep() has found.
  bool watching() const { return watching_; }
  // Whether somebody waits for a part of a sequence that is not about to come: not worth spinning for.
  bool far_off() const;
  // The next poll() looks for stalls, if it is time to. Most don't: a look at the clock costs as much as all the rest.
  void look_closely_next() { polls_ = kPollsPerLook - 1; }
  // Ends the job on all ranks with this error.
  void stop(hvd_status status, const std::string& text);

 private:
  static constexpr uint64_t kPollsPerLook = 64;  // for stalls

  enum class IdState : uint8_t { kFree, kLive, kWithdrawn };

  struct Name {
    IdState state = IdState::kFree;
    Key key;
    Meta meta;
    uint64_t bytes = 0;
    uint64_t last_use = 0;
    uint64_t step = 0;   // of its class, in which it was last ready
    bool ready = false;  // in a queue, not yet logged
    int queue = -1;      // index into queues_
    int alone = 0;       // how often in a row it was run by itself, with somebody waiting for it
    uint64_t order = 0;  // standing
    uint64_t sequence = 0;
    // The round that is not complete yet.
    std::vector<int> arrived;  // hosts
    bool wanted = false, with_joined = false;
    struct Missing {
      std::vector<int> ranks;
      Nanoseconds when = 0;
    };
    std::map<int, Missing> waiting;  // by host: who was missing there when it last looked
    Nanoseconds partial_since = 0, last_warning = 0;
  };

  struct Pending {  // an unknown name that some ranks have submitted
    std::map<int, Meta> by_rank;
    bool wanted = false;
    Nanoseconds since = 0, last_warning = 0;
  };

  struct EndingOrder {  // evicted, but not all members have read that
    Key key;
    Meta meta;
    size_t expected = 0;              // members of the set, which may have been removed since
    std::map<int, uint64_t> members;  // who has, and its number of rounds
  };

  struct Tray {            // transport/trays.h
    uint64_t order = 0;    // that has it; 0: it is free
    uint64_t letters = 0;  // that were ever written there
    size_t members = 0;    // that have not vacated it
  };

  struct Queue {
    int set = 0;
    Meta like;  // shape left out
    std::vector<uint32_t> ids;
    uint64_t bytes = 0;
    Nanoseconds last_added = 0;
    bool wanted = false;
    uint64_t step = 1, seen = 0, expected = 0;
    Key first;                                  // of the step
    std::vector<uint32_t> step_ids, last_step;  // in the order in which they became ready
    size_t closed = 0;                          // times in this step
    uint64_t equal_steps = 0, equal_steps_needed = 0;
  };

  struct SequenceState {
    uint64_t number = 0;  // 0: there is none
    int place = 0, set = 0;
    std::vector<int> members;  // local ranks
    std::vector<uint32_t> ids;
    uint64_t ready = 0, run = 0;  // submissions
    uint64_t bytes = 0;           // ready, and not run
    uint64_t wake = 0;            // as prepare_sequences() has stored it
    Nanoseconds last_added = 0;
    uint64_t last_use = 0;
    Nanoseconds wanted_since = 0;  // somebody waits for what is ready; 0: nobody does
    size_t closed = 0;             // batches of this step
    size_t parts = 0;              // of these, such that nobody waited for and were not its last
    bool in_parts = false;         // the last step had some
    int torn_steps = 0;
    uint64_t ready_at_look = 0, most_at_look = 0;  // for stalls

    uint32_t id(uint64_t submission) const { return ids[submission % ids.size()]; }
    // Of the step to which the next submission to run belongs.
    uint64_t step_end() const { return (run / ids.size() + 1) * ids.size(); }
  };

  // Hosts, requests, ids, batches: coordinator.cc. Joined ranks and process sets: coordinator_membership.cc. Standing
  // orders: coordinator_orders.cc. Sequences: coordinator_sequences.cc.
  void request(int rank, const ToCoordinator& message, BytesView bytes) override;
  void ready(uint32_t id, bool wanted, bool with_joined) override;
  void wanted(uint32_t id) override;
  void released(uint32_t id) override;
  void waiting(uint32_t id, const std::vector<int>& missing) override;
  bool take_from_hosts();
  void arrived(int host, uint32_t id, bool wanted, bool with_joined);
  void end_round(uint32_t id);
  void note_missing(int host, uint32_t id, const std::vector<int>& missing);
  Name& name_of_id(uint32_t id);
  void take(int rank, const Submit& message);
  void take(int rank, const Want& message);
  void take(int rank, const Closed& message);
  void take(int rank, const Revoke& message);
  void take(int rank, const Ended& message);
  void take(int rank, const Vacated& message);
  void take(int rank, const Disorder& message);
  void take(int rank, const Arrived& message);
  void consider_order(uint32_t id, bool alone_and_wanted);
  bool may_stand(uint32_t id) const;
  bool shares_hosts(int set) const;
  uint64_t most_bytes(const Name& name) const;
  bool needs_tray(const Name& name) const;
  int free_tray() const;
  void end_order(Name& name);
  void end_all_orders();
  void consider_sequence(Queue& queue);
  static bool is_in_steps(const Name& name);
  SequenceState* find_sequence(uint64_t number);
  uint64_t ready_of(const SequenceState& sequence) const;
  uint64_t wanted_of(const SequenceState& sequence) const;
  bool poll_sequences();
  void note_ready(SequenceState& sequence, uint64_t ready) const;
  bool must_close(const SequenceState& sequence) const;
  bool more_is_coming(const SequenceState& sequence) const;
  void run_ready(SequenceState& sequence);
  void close(SequenceState& sequence);
  void end_sequence(SequenceState& sequence);
  void go_on_with_queue(const SequenceState& ended);
  void end_all_sequences();
  void end_stuck_sequences();
  bool sequences_gather() const;
  bool prepare_sequences(Sleeper sleeper);
  bool sequences_have_news() const;
  void join(int rank);
  void end_join();
  void submit_for_joined();
  bool has_joined(int rank) const;
  bool is_withdrawn(const Key& key) const;
  void complete(const Key& key, Pending pending);
  void change_sets(const Meta& meta);
  bool is_member(int set, int rank) const;
  static bool works_with_join(hvd_op op);
  void define(const Key& key, Pending pending);
  std::optional<uint32_t> free_id();
  void make_room();
  void withdraw(uint32_t id);
  void add_ready(uint32_t id, bool wanted);
  int queue_for(const Name& name);
  static bool is_queue_for(const Queue& queue, const Name& name);
  bool must_close(const Queue& queue, Nanoseconds now) const;
  void close(Queue& queue);
  void append(const LogEntry& entry);
  // What has a standing order or is in a sequence is used, although not by way of its name.
  uint64_t last_use(uint32_t id) const {
    return names_[id].order != 0 || names_[id].sequence != 0 ? use_clock_ : names_[id].last_use;
  }
  bool cached(uint32_t id) const { return id < static_cast<uint32_t>(segment_->cache_capacity()); }
  void check_stalls(Nanoseconds now);
  void report_stall(const Key& key, const Meta& meta, const std::vector<int>& arrived, const std::vector<int>& missing,
                    Nanoseconds age, Nanoseconds& last_warning, Nanoseconds now);

  const World& world_;
  const Settings& settings_;
  std::shared_ptr<Segment> segment_;
  Counters& counters_;
  Hosts& hosts_;
  std::function<bool(int)> set_busy_;
  HostDesk desk_;

  std::vector<std::vector<int>> sets_;          // by id, ranks ascending; empty: there is none
  std::vector<std::vector<int>> hosts_of_set_;  // by id: the hosts of its members
  std::map<int, int> closing_;                  // removed sets, and how many ranks still use their channels
  std::vector<int> joined_;                     // ranks, in the order in which they came
  std::vector<Name> names_;                     // by id
  std::vector<uint32_t> free_cached_, free_uncached_;
  std::unordered_map<uint32_t, int> withdrawn_;  // and how many hosts have not released it
  std::unordered_map<Key, uint32_t, KeyHash> ids_;
  std::unordered_map<Key, Pending, KeyHash> pending_;
  std::deque<std::pair<Key, Pending>> no_id_yet_;  // complete, but all ids are taken
  std::map<uint64_t, uint32_t> orders_;            // those that stand, and their ids
  std::map<uint64_t, EndingOrder> ending_orders_;
  std::unordered_set<Key, KeyHash> unfit_;  // not to stand again
  uint64_t last_order_ = 0;
  std::array<Tray, Trays::kTrays> trays_;
  std::array<SequenceState, Segment::kMaxSequences> sequences_;  // by place
  int live_sequences_ = 0;
  bool watching_ = false;
  uint64_t last_sequence_ = 0;
  std::map<uint64_t, size_t> ending_sequences_;  // and how many members have not read that
  std::vector<Queue> queues_;
  size_t ready_count_ = 0;
  uint64_t use_clock_ = 0;
  Nanoseconds last_stall_check_ = 0;
  uint64_t polls_ = 0;
  bool stopped_ = false;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_COORDINATOR_H_
