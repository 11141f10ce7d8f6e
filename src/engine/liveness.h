// Which peers are still there.
//
// A peer is gone when its process has ended (its descriptor, a pidfd, becomes readable) or when its heartbeat in the
// segment has not moved for the timeout, counted only while this process itself ran. What a peer says about itself
// (departed, broken) is in its line of the segment. gone() joins the three.
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
  enum Reason : int { kThere = 0, kEnded = 1, kSilent = 2 };

  // Duplicates the descriptors. Throws SystemError.
  Liveness(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, const int* alive_fds,
           const Doorbells& doorbells);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  bool gone(int local_rank) const;
  Reason reason(int local_rank) const { return static_cast<Reason>(reasons_[static_cast<size_t>(local_rank)].load()); }

  // Sleeps until our doorbell rings, a peer ends, or the time is over. Returns whether a peer has ended.
  bool sleep(Sleeper sleeper, int timeout_ms);

  // Background thread: shows that we live and looks at the others. True if a peer was newly given up.
  bool beat();
  int beat_interval_ms() const { return static_cast<int>(interval_ / 1'000'000); }

  std::vector<int> descriptors() const;

 private:
  const World& world_;
  std::shared_ptr<Segment> segment_;
  Nanoseconds (*const now_)();
  const Nanoseconds timeout_, interval_;
  std::vector<int> fds_;
  int epolls_[2] = {-1, -1};
  int doorbell_fds_[2];
  std::vector<std::atomic<int>> reasons_;
  // Background thread only.
  Nanoseconds last_beat_ = 0;
  std::vector<uint64_t> seen_;
  std::vector<Nanoseconds> silent_for_;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_LIVENESS_H_
