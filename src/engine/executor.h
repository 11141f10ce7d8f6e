// Runs the batches of the log: those of one process set one after the other, those of different sets side by side.
//
// Used by the driver alone. Because each set has a channel of its own and a queue of its own, and all members read the
// same log, two ranks never wait for each other in batches of different order: overlapping sets can't deadlock.
//
// A round of a standing order (standing_orders.h) is a batch of its own: it uses neither, and waits for no other batch.
#ifndef HOROVOD_ENGINE_EXECUTOR_H_
#define HOROVOD_ENGINE_EXECUTOR_H_

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "collectives/batch.h"
#include "collectives/collectives.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "engine/request.h"
#include "engine/world.h"
#include "transport/arena.h"

namespace hvd {

class Executor {
 public:
  using Requests = std::vector<std::shared_ptr<Request>>;
  // Called for every batch that has ended; error is null if it went well.
  using Ended = std::function<void(Requests, std::exception_ptr error)>;
  // Whether nothing more will come from a rank.
  using IsGone = std::function<bool(int rank)>;

  Executor(const World& world, const Settings& settings, const std::shared_ptr<Segment>& segment, Doorbells& doorbells,
           Counters& counters, PeerArenas& arenas, Network& network, IsGone is_gone, Ended ended);

  // Opens and closes the lane of a process set; closing one drops nothing, so it must not be busy.
  void add_set(int set, const std::vector<int>& ranks);
  void remove_set(int set) { lanes_[static_cast<size_t>(set)] = {}; }
  // Queues a batch; requests are in the order of the log, all of one set and class.
  void add(int set, Requests requests);
  // Gets ready for a standing order of members that share hosts and use its tray's lane. False: there is no memory.
  bool open_lane(int set, int tray) { return lanes_[static_cast<size_t>(set)].group->open_channel(tray); }
  // Starts a round of a standing order, of which no other one runs.
  void add_to_order(const OrderRound& round, std::shared_ptr<Request> request);
  bool has_round(uint64_t order) const { return rounds_.contains(order); }
  // Gives up that round; null if there is none.
  std::shared_ptr<Request> withdraw(uint64_t order);
  // Resumes what can go on. True if anything moved.
  bool poll();
  bool busy(int set) const;
  bool idle() const;
  // Expires when all that has been added up to now has ended, whatever is added later.
  std::weak_ptr<const void> all_so_far();
  // Whether a round of a standing order runs that somebody may never take part in; and nothing else.
  bool waits_for_letters(uint64_t order) const;
  bool only_waits_for_letters() const;
  // What the only batch waits for, if that is a round of a standing order by nothing but letters; otherwise null.
  const Wait* only_wait() const;
  // Whether poll() would move something.
  bool can_move() const;
  // Which peers' doorbells could make it so.
  uint64_t interests() const;
  // Drops everything and returns the requests that it belonged to.
  Requests abandon();

 private:
  struct Job {
    std::shared_ptr<const void> era;
    Batch batch;
    Requests requests;
    Task task;
    bool started = false;
    int set = 0;
    OrderRound round;  // none: a batch of the log
    bool begun_by_all = false;
  };
  struct Lane {
    std::unique_ptr<Group> group;  // null where this rank is not a member
    std::vector<int> ranks;
    std::deque<std::unique_ptr<Job>> queue;
  };

  enum class Step { kWaits, kMoved, kEnded };

  static std::shared_ptr<const void> new_era() { return std::make_shared<char>(); }
  std::unique_ptr<Job> make_job(int set, Requests requests);
  bool advance(Lane& lane);
  bool advance_rounds();
  Step advance(Job& job, std::exception_ptr& error);
  bool can_move(const Job& job) const;
  // Whether no batch of the log runs.
  bool only_rounds() const;
  Task start(const Job& job);

  const World& world_;
  const Settings& settings_;
  const std::shared_ptr<Segment> segment_;
  Doorbells& doorbells_;
  Counters& counters_;
  PeerArenas& arenas_;
  Network& network_;
  IsGone is_gone_;
  Ended ended_;
  std::shared_ptr<const void> era_ = new_era();
  std::vector<Lane> lanes_;                          // by set
  std::map<uint64_t, std::unique_ptr<Job>> rounds_;  // by standing order
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_EXECUTOR_H_
