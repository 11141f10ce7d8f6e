// Which ranks are still there.
//
// A rank of this host is gone when its process has ended (its descriptor, a pidfd, becomes readable), when its
// heartbeat in the segment has not moved for the timeout, counted only while this process itself ran, or when it says
// so in its line of the segment. A rank of another host is gone when its connection says so or ends, or when those who
// speak for the hosts have written it into the segment (hosts.h).
//
// Descriptors are watched by the two places where the engine sleeps; heartbeats by the background thread alone.
#ifndef HOROVOD_ENGINE_LIVENESS_H_
#define HOROVOD_ENGINE_LIVENESS_H_

#include <atomic>
#include <memory>
#include <vector>

#include "engine/world.h"
#include "transport/doorbell.h"
#include "transport/segment.h"

namespace hvd {

class Liveness {
 public:
  // network_fd: readable when there is something to do for the network; -1: there is none. Duplicates the descriptors
  // of peers. Throws SystemError.
  Liveness(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, const int* alive_fds,
           const Doorbells& doorbells, int network_fd);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  bool gone(int rank) const;
  // What is known of a rank, also by its connection. What it said of itself (kDeparted, kBroken) goes before what was
  // found out.
  RankState state(int rank) const;
  // Because of which rank it gave up (kBroken); -1 if that is not known.
  int cause(int rank) const;
  // The connection with a rank of another host has ended, with these last words or (kEnded) without any.
  void connection_ended(int rank, RankState state, int cause);

  // Sleeps until our doorbell rings, a peer ends, the network has something, or the time is over. Returns which.
  struct Woken {
    bool by_doorbell = false, by_end = false, by_network = false;
  };
  Woken sleep(Sleeper sleeper, int timeout_ms);
  // Lets the network wake the background thread too, once. A waiter is always woken.
  void let_network_wake_background();

  // Background thread: shows that we live and looks at the others of this host. True if a peer was newly given up.
  bool beat();
  int beat_interval_ms() const { return static_cast<int>(interval_ / 1'000'000); }

  std::vector<int> descriptors() const;

 private:
  struct Found {
    std::atomic<int> state{kAlive};
    std::atomic<int> cause{-1};
  };

  const World& world_;
  std::shared_ptr<Segment> segment_;
  Nanoseconds (*const now_)();
  const Nanoseconds timeout_, interval_;
  std::vector<int> fds_;
  int epolls_[2] = {-1, -1};
  int doorbell_fds_[2];
  const int network_fd_;
  std::vector<Found> found_;  // by rank: what this process found out itself
  // Background thread only; by local rank.
  Nanoseconds last_beat_ = 0;
  std::vector<uint64_t> seen_;
  std::vector<Nanoseconds> silent_for_;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_LIVENESS_H_
