#include "engine/liveness.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "transport/durations.h"
#include "transport/errors.h"

namespace hvd {
namespace {

constexpr uint64_t kDoorbell = ~uint64_t{0};
constexpr uint64_t kNetwork = ~uint64_t{1};

void watch(int epoll, int fd, uint64_t tag, int operation = EPOLL_CTL_ADD, uint32_t events = EPOLLIN) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, operation, fd, &event) != 0) throw SystemError("can't watch a descriptor (epoll_ctl)");
}

}  // namespace

Liveness::Liveness(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, const int* alive_fds,
                   const Doorbells& doorbells, int network_fd)
    : world_(world),
      segment_(std::move(segment)),
      now_(settings.now),
      timeout_(nanoseconds_of(settings.heartbeat_timeout)),
      interval_(std::clamp<Nanoseconds>(timeout_ / 8, 10'000'000, 1'000'000'000)),
      network_fd_(network_fd),
      found_(static_cast<size_t>(world.size)),
      seen_(static_cast<size_t>(world.local_size)),
      silent_for_(static_cast<size_t>(world.local_size)) {
  try {
    for (const Sleeper sleeper : {Sleeper::kBackground, Sleeper::kWaiter}) {
      const int i = static_cast<int>(sleeper);
      epolls_[i] = epoll_create1(EPOLL_CLOEXEC);
      if (epolls_[i] < 0) throw SystemError("can't create an epoll descriptor");
      doorbell_fds_[i] = doorbells.fd(sleeper);
      watch(epolls_[i], doorbell_fds_[i], kDoorbell);
      if (network_fd_ < 0) continue;
      watch(epolls_[i], network_fd_, kNetwork, EPOLL_CTL_ADD,
            sleeper == Sleeper::kBackground ? EPOLLIN | EPOLLONESHOT : EPOLLIN);
    }
    for (int local = 0; local < world_.local_size; ++local) {
      if (local == world_.local_rank || alive_fds[local] < 0) continue;
      const int rank = world_.global(local);
      const int copy = fcntl(alive_fds[local], F_DUPFD_CLOEXEC, 3);
      if (copy < 0) throw SystemError("can't keep the descriptor that watches " + world_.describe(rank));
      fds_.push_back(copy);
      for (const int epoll : epolls_) {
        watch(epoll, copy, static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(copy));
      }
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

bool Liveness::gone(int rank) const {
  if (world_.is_local(rank)) return state(rank) > kAlive;
  return segment_->departure(rank).state.load() > kAlive;
}

RankState Liveness::state(int rank) const {
  if (rank == world_.rank) return kAlive;
  const auto found = static_cast<RankState>(found_[static_cast<size_t>(rank)].state.load());
  const Flag& said_in =
      world_.is_local(rank) ? segment_->rank(world_.local(rank)).state : segment_->departure(rank).state;
  const auto said = static_cast<RankState>(said_in.load());
  for (const RankState last_word : {said, found}) {
    if (last_word == kDeparted || last_word == kBroken) return last_word;
  }
  // Of a rank on another host those who speak for it know more than the end of our connection with it tells.
  if (said > kAlive && (found == kAlive || !world_.is_local(rank))) return said;
  return found;
}

int Liveness::cause(int rank) const {
  const int found = found_[static_cast<size_t>(rank)].cause.load();
  if (found >= 0) return found;
  const Flag& said_in =
      world_.is_local(rank) ? segment_->rank(world_.local(rank)).cause : segment_->departure(rank).cause;
  const auto said = static_cast<int64_t>(said_in.load());
  return said >= 0 && said < world_.size ? static_cast<int>(said) : -1;
}

void Liveness::connection_ended(int rank, RankState state, int cause) {
  Found& found = found_[static_cast<size_t>(rank)];
  if (cause >= 0 && cause < world_.size) found.cause.store(cause);
  found.state.store(state);
}

void Liveness::let_network_wake_background() {
  if (network_fd_ < 0) return;
  watch(epolls_[static_cast<int>(Sleeper::kBackground)], network_fd_, kNetwork, EPOLL_CTL_MOD, EPOLLIN | EPOLLONESHOT);
}

Liveness::Woken Liveness::sleep(Sleeper sleeper, int timeout_ms) {
  const int epoll = epolls_[static_cast<int>(sleeper)];
  epoll_event events[16];
  const int n = epoll_wait(epoll, events, 16, timeout_ms);
  Woken woken;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kDoorbell) {
      woken.by_doorbell = true;
      uint64_t value;
      (void)!read(doorbell_fds_[static_cast<int>(sleeper)], &value, sizeof value);
      continue;
    }
    if (events[i].data.u64 == kNetwork) {
      woken.by_network = true;
      continue;
    }
    // Stays readable for ever: each of the two sleepers hears it once.
    const auto fd = static_cast<int>(events[i].data.u64 & 0xffffffff);
    epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr);
    found_[events[i].data.u64 >> 32].state.store(kEnded);
    woken.by_end = true;
  }
  return woken;
}

bool Liveness::beat() {
  const Nanoseconds now = now_();
  if (last_beat_ != 0 && now - last_beat_ < interval_) return false;
  // Time in which this process did not run, stopped or starved, says nothing about its peers.
  const Nanoseconds elapsed = last_beat_ == 0 ? 0 : std::min(now - last_beat_, 2 * interval_);
  last_beat_ = now;
  segment_->rank(world_.local_rank).heartbeat.fetch_add(1);
  bool given_up = false;
  for (int local = 0; local < world_.local_size; ++local) {
    const auto i = static_cast<size_t>(local);
    std::atomic<int>& found = found_[static_cast<size_t>(world_.global(local))].state;
    if (local == world_.local_rank || found.load() != kAlive) continue;
    const uint64_t value = segment_->rank(local).heartbeat.load();
    silent_for_[i] = value == seen_[i] ? silent_for_[i] + elapsed : 0;
    seen_[i] = value;
    if (silent_for_[i] < timeout_) continue;
    found.store(kSilent);
    given_up = true;
  }
  return given_up;
}

}  // namespace hvd
