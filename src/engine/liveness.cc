#include "engine/liveness.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "transport/errors.h"

namespace hvd {
namespace {

constexpr uint64_t kDoorbell = ~uint64_t{0};

void watch(int epoll, int fd, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) throw SystemError("can't watch a descriptor (epoll_ctl)");
}

}  // namespace

Liveness::Liveness(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, const int* alive_fds,
                   const Doorbells& doorbells)
    : world_(world),
      segment_(std::move(segment)),
      now_(settings.now),
      timeout_(static_cast<Nanoseconds>(settings.heartbeat_timeout * 1e9)),
      interval_(std::clamp<Nanoseconds>(timeout_ / 8, 10'000'000, 1'000'000'000)),
      reasons_(static_cast<size_t>(world.local_size)),
      seen_(static_cast<size_t>(world.local_size)),
      silent_for_(static_cast<size_t>(world.local_size)) {
  try {
    for (const Sleeper sleeper : {Sleeper::kBackground, Sleeper::kWaiter}) {
      const int i = static_cast<int>(sleeper);
      epolls_[i] = epoll_create1(EPOLL_CLOEXEC);
      if (epolls_[i] < 0) throw SystemError("can't create an epoll descriptor");
      doorbell_fds_[i] = doorbells.fd(sleeper);
      watch(epolls_[i], doorbell_fds_[i], kDoorbell);
    }
    for (int r = 0; r < world_.local_size; ++r) {
      if (r == world_.local_rank || alive_fds[r] < 0) continue;
      const int copy = fcntl(alive_fds[r], F_DUPFD_CLOEXEC, 3);
      if (copy < 0) throw SystemError("can't keep the descriptor that watches " + world_.describe(r));
      fds_.push_back(copy);
      for (const int epoll : epolls_) watch(epoll, copy, static_cast<uint64_t>(r) << 32 | static_cast<uint32_t>(copy));
    }
  } catch (...) {
    for (const int fd : descriptors()) close(fd);
    throw;
  }
}

Liveness::~Liveness() {
  for (const int fd : descriptors()) close(fd);
}

std::vector<int> Liveness::descriptors() const {
  std::vector<int> all = fds_;
  for (const int fd : epolls_) {
    if (fd >= 0) all.push_back(fd);
  }
  return all;
}

bool Liveness::gone(int local_rank) const {
  if (local_rank == world_.local_rank) return false;
  if (reasons_[static_cast<size_t>(local_rank)].load() != kThere) return true;
  const uint64_t state = segment_->rank(local_rank).state.load();
  return state == kDeparted || state == kBroken;
}

bool Liveness::sleep(Sleeper sleeper, int timeout_ms) {
  const int epoll = epolls_[static_cast<int>(sleeper)];
  epoll_event events[16];
  const int n = epoll_wait(epoll, events, 16, timeout_ms);
  bool ended = false;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kDoorbell) {
      uint64_t value;
      (void)!read(doorbell_fds_[static_cast<int>(sleeper)], &value, sizeof value);
      continue;
    }
    // Stays readable for ever: each of the two sleepers hears it once.
    const auto fd = static_cast<int>(events[i].data.u64 & 0xffffffff);
    epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr);
    reasons_[events[i].data.u64 >> 32].store(kEnded);
    ended = true;
  }
  return ended;
}

bool Liveness::beat() {
  const Nanoseconds now = now_();
  if (last_beat_ != 0 && now - last_beat_ < interval_) return false;
  // Time in which this process did not run, stopped or starved, says nothing about its peers.
  const Nanoseconds elapsed = last_beat_ == 0 ? 0 : std::min(now - last_beat_, 2 * interval_);
  last_beat_ = now;
  segment_->rank(world_.local_rank).heartbeat.fetch_add(1);
  bool given_up = false;
  for (int r = 0; r < world_.local_size; ++r) {
    const auto i = static_cast<size_t>(r);
    if (r == world_.local_rank || reasons_[i].load() != kThere) continue;
    const uint64_t value = segment_->rank(r).heartbeat.load();
    silent_for_[i] = value == seen_[i] ? silent_for_[i] + elapsed : 0;
    seen_[i] = value;
    if (silent_for_[i] < timeout_) continue;
    reasons_[i].store(kSilent);
    given_up = true;
  }
  return given_up;
}

}  // namespace hvd
