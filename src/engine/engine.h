// The engine of one rank: takes requests, agrees with the other ranks, runs the collectives, completes the handles.
//
// Who drives. At any time at most one thread has the driver's role: it alone touches the executor, the log reader and
// the coordinator. A thread that waits for a request takes the role if it is free; otherwise it sleeps until its
// request has ended or the role is handed to it. When nobody waits the background thread takes the role for as long as
// there is something to move. Submitting needs no role.
//
//   role free      the background thread is in epoll; `armed` in the segment holds its interests
//   role taken     `armed` is zero, or holds the interests of the waiter that sleeps with the role
//
// Giving up the role means: arm on behalf of the background thread, look at everything once more, and poke it if there
// is something to do. So no event is missed between two drivers, and a blocking operation with nothing else in flight
// hands nothing over. A background thread that has the role when somebody begins to wait hands it over at once.
//
// The network wakes the background thread too. Where blocking operations follow each other that would be a wake for
// each message, of which their waiters take care anyway. So once it was woken for nothing the background thread
// *rests*: it looks every few milliseconds whether there were further operations, and lets the network wake it again
// when there were none. It may rest only where nobody can need this rank: it has no request, and the job has no other
// process set.
//
// Locks. mutex_ guards the name tables, the role and the waiters. The driver takes it for short looks into the tables;
// nothing blocks under it. Lock order: mutex_ only, never two.
//
// When a peer is gone (it departed, died, fell silent or broke): what it had published is still used, batches that need
// more from it fail, requests that are not in the log fail, and new ones are refused. Batches that need nothing from it
// go on, but when none has moved for the heartbeat's timeout they fail too: whom they wait for may have gone with those
// who would have said so. A rank that failed a batch can't keep its channels in step any more: it says so in the
// segment (kBroken), which makes it gone for the others.
#ifndef HOROVOD_ENGINE_ENGINE_H_
#define HOROVOD_ENGINE_ENGINE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/completion_pool.h"
#include "engine/coordinator.h"
#include "engine/delegate.h"
#include "engine/executor.h"
#include "engine/hosts.h"
#include "engine/liveness.h"
#include "engine/messages.h"
#include "engine/request.h"
#include "engine/sequences.h"
#include "engine/standing_orders.h"
#include "engine/world.h"
#include "transport/arena.h"
#include "transport/byte_ring.h"
#include "transport/counters.h"
#include "transport/doorbell.h"
#include "transport/network.h"
#include "transport/segment.h"

namespace hvd {

class Engine {
 public:
  // What connects the engine with the other ranks, as in hvd_config.
  struct Wiring {
    std::shared_ptr<Segment> segment;
    const int* alive_fds = nullptr;
    const int* doorbells = nullptr;
    const int* arena_fds = nullptr;
    std::vector<Connected> links, controls;
  };
  // Throws Error.
  Engine(World world, const Settings& settings, const Wiring& wiring);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws Error if the request can't even be submitted. will_wait: the caller is going to wait for it at once.
  void submit(const std::shared_ptr<Request>& request, bool will_wait = false);
  // HVD_PENDING if the time is over. Negative: no limit.
  hvd_status wait(const std::shared_ptr<Request>& request, int64_t timeout_ns);
  // submit and wait as one: takes the role before submitting, so that no other thread is woken for it.
  hvd_status run(const std::shared_ptr<Request>& request, int64_t timeout_ns);
  void shutdown();

  const World& world() const { return world_; }
  // The members of a process set, ascending; none if there is no such set.
  std::vector<int> ranks_of(int set) const;
  const Counters& counters() const { return counters_; }
  // Every descriptor that the engine holds: for the child of a fork to close.
  std::vector<int> descriptors() const;

 private:
  struct NameEntry {
    int id = -1;
    std::shared_ptr<Request> pending;
  };
  struct IdEntry {
    bool live = false;
    Key key;
    Meta meta;
    NameEntry* name = nullptr;  // in names_, where it stays for as long as it has this id
    uint64_t order = 0;         // the standing order by which it is submitted
    int place = -1;             // of the sequence to which it belongs
    size_t index = 0;           // its place there
    bool in_sequence = false;   // it has been run since that began
  };
  struct Waiter {
    const Request* request;
    std::condition_variable wake;
    std::atomic<bool> has_role{false};
  };
  struct Failure {
    hvd_status status;
    std::string text;
  };
  // A rank of another host of whose end we have heard by one of two ways only.
  struct HalfGone {
    Nanoseconds since = 0;  // or since its last bytes
    uint64_t bytes_in = 0;  // that had come by then
    bool over = false;      // nothing more comes
  };

  // Submission (engine_validate.cc, engine_submit.cc). All with mutex_ held.
  void validate(Request& request) const;
  void validate_rows(Request& request, const std::vector<int>& ranks) const;
  void validate_set_change(const Request& request) const;
  void submit_locked(const std::shared_ptr<Request>& request);
  void arrive(Request& request);
  void send(const ToCoordinator& message, bool urgent);
  void want(Request& request);
  void submit_to_order(const std::shared_ptr<Request>& request, uint64_t order);

  // Sequences (engine_sequences.cc). All with mutex_ held.
  void submit_in_sequence(Request& request);
  bool all_have_submitted(int place, uint64_t word) const;
  void tell_wants(int place);
  void want_in_sequence(const Request& request);
  Sequence* find_sequence(uint64_t number);

  // The driver's role (engine.cc).
  hvd_status wait_locked(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& request,
                         int64_t timeout_ns);
  void release_role(Sleeper who);
  bool may_rest() const;
  bool stays_at_rest(const Liveness::Woken& woken);
  void drive(const Request* until, Nanoseconds deadline, Sleeper sleeper);
  void sleep(Nanoseconds deadline);
  uint64_t prepare_sleep(Sleeper sleeper);
  bool has_news() const;
  bool ticking() const;
  bool watching() const { return coordinator_ && coordinator_->watching(); }
  void background();

  // What the driver does (engine_progress.cc, engine_peers.cc).
  bool progress();
  bool drain();
  bool look_for_letter(const Wait& letter, bool& moved);
  bool flush_outbox();
  bool read_log();
  void apply(const Define& entry);
  void apply(const Run& entry);
  void apply(const Evict& entry);
  void apply(const Refuse& entry);
  void apply(const Stop& entry);
  void apply(const AddSet& entry);
  void apply(const RemoveSet& entry);
  void apply(const RemoveEnd& entry);
  void end_set_change(int32_t set);
  void apply(const JoinEnd& entry);
  void end_join();
  void apply(const Stand& entry);
  void apply(const Settle& entry);
  void apply(const BeginSequence& entry);
  void apply(const RunSequence& entry);
  void apply(const EndSequence& entry);
  void start(int set, Executor::Requests requests, bool complete_here);
  void close_sets();
  std::shared_ptr<Request> neutral_request(const Key& key, const Meta& meta) const;
  bool look_after_peers();

  // Standing orders (engine_orders.cc).
  void send_letters(std::unique_lock<std::mutex>& lock);
  bool start_rounds();
  void begin_rounds();
  void end_order(uint64_t number);
  void take_back(uint64_t number);
  void take_back_all();
  void close_order(uint64_t number);
  void round_ended(uint64_t number, bool wanted);
  void revoke(uint64_t number, StandingOrder& order, bool unfit = false);
  void look_closely_next();
  void look_after_orders();

  // Endings (engine_progress.cc, engine_peers.cc).
  void batch_ended(Executor::Requests requests, const std::exception_ptr& error);
  void complete(const Executor::Requests& requests, hvd_status status, const std::string& text);
  void complete_held(const std::shared_ptr<Request>& request, hvd_status status, const std::string& text);
  void complete_locked(const std::shared_ptr<Request>& request, hvd_status status, const std::string& text);
  void forget_pending(const std::shared_ptr<Request>& request);
  void orphan(const std::shared_ptr<Request>& request);
  void fail(hvd_status status, const std::string& text, int cause = -1, bool logged_too = false);
  void break_down(int cause);
  void say_farewell(RankState state, int cause);
  bool somebody_new_is_gone() const;
  void look_at_connections();
  bool nothing_comes_from(int rank) const;
  bool batches_are_stuck();
  int gave_up_on(int rank) const;
  int origin_of(int rank) const;
  Failure describe_gone(int rank) const;
  uint64_t members_here(int set) const { return members_here_[static_cast<size_t>(set)]; }
  void count_members_here();

  const World world_;
  const Settings settings_;
  const std::shared_ptr<Segment> segment_;
  Counters counters_;
  Network network_;
  Doorbells doorbells_;
  Liveness liveness_;
  PeerArenas arenas_;
  CompletionPool completion_pool_;
  const Nanoseconds spin_;  // how long a waiter spins before it sleeps
  const bool crowded_;      // more ranks than cores: spin by giving the core away

  mutable std::mutex mutex_;
  bool role_taken_ = false;
  bool background_has_role_ = false;
  bool stopping_ = false;
  bool resting_ = false;                  // the background thread: see above
  bool nudged_ = false;                   // it was told to
  int rest_ms_ = 0;                       // how long it sleeps meanwhile
  uint64_t releases_ = 0;                 // how often a waiter gave the role up
  uint64_t releases_seen_ = 0;            // by the background thread
  uint64_t pending_ = 0;                  // requests that have not ended
  std::atomic<bool> role_wanted_{false};  // somebody began to wait while the background thread had the role
  std::condition_variable role_free_;     // for shutdown
  std::list<Waiter*> waiters_;
  std::optional<Failure> failure_;
  int failure_cause_ = -1;              // the rank because of which
  std::vector<std::vector<int>> sets_;  // by id, ranks ascending; empty: there is none
  std::vector<uint64_t> members_here_;  // by id: how many of them are on this host
  std::unordered_map<Key, NameEntry, KeyHash> names_;
  std::vector<IdEntry> ids_;
  std::array<Sequence, Segment::kMaxSequences> sequences_;  // by place
  RingWriter requests_;
  std::deque<Bytes> outbox_;  // messages for which the request ring had no room
  std::atomic<bool> outbox_waits_{false};
  std::vector<std::shared_ptr<Request>> for_orders_;  // submitted under standing orders, and not started yet
  std::atomic<bool> for_orders_wait_{false};
  int background_timeout_ms_ = 0;  // of its next sleep
  int background_sleeps_ms_ = 0;   // of this one

  std::atomic<bool> stop_driving_{false};

  // The driver's own.
  RingReader log_;
  Executor executor_;
  Hosts hosts_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Delegate> delegate_;        // where the coordinator is on another host, and we speak for ours
  std::map<uint64_t, StandingOrder> orders_;  // of which this rank is a member, by number
  static constexpr uint64_t kPassesPerLook = 64;
  uint64_t order_looks_ = 0, letter_looks_ = 0;
  bool letter_is_near_ = false;                 // a round has begun, and nobody has slept since
  bool submitter_drives_ = false;               // for one pass, to send letters
  std::vector<int> closing_sets_;               // removed, but a batch of theirs still runs here
  std::shared_ptr<Request> ending_join_;        // all have joined, but a batch from before that still runs here
  std::weak_ptr<const void> before_join_end_;   // expires when the last of them has ended
  std::vector<bool> known_gone_;                // by rank
  uint64_t seen_departures_ = 0;                // of other hosts' ranks, as the segment has them
  int seen_ended_ = 0;                          // connections
  std::vector<HalfGone> halves_;                // by rank
  int half_gone_ = 0;                           // how many of these there are from whom something may come
  Nanoseconds stuck_since_ = 0;                 // the job has failed, and no batch has moved
  uint64_t stuck_at_ = 0;                       // what the links had moved then
  uint64_t moves_before_sleep_ = ~uint64_t{0};  // what they had when a waiter last went to sleep
  bool broken_ = false;

  std::thread background_thread_;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_ENGINE_H_
