// Life cycle and the driver's role: who drives, who sleeps, who is woken.
#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "engine/logging.h"

namespace hvd {
namespace {

// Sleeping and being woken costs some 45 us of two cores; spinning longer than that would waste more than it saves.
constexpr Nanoseconds kWaiterSpin = 50'000;
// Between hosts: more than the time in which 64 KiB, which come at once, go over a cable of 1 Gbit/s. Who sleeps
// between two of them is late for the last, and may come back on a core that another one uses. Who spins gives its core
// away all the while.
constexpr Nanoseconds kNetworkSpin = 700'000;
// With more ranks than cores those who are waited for have to get a core first; who spins gives its own away to them.
constexpr Nanoseconds kCrowdedSpin = 250'000;
// The background thread competes with the training itself for a core.
constexpr Nanoseconds kBackgroundSpin = 10'000;
// How long a waiter spins for the role that the background thread is about to hand over.
constexpr Nanoseconds kRoleSpin = 20'000;
constexpr int kTickMs = 1;
// How often the background thread looks at a sequence that is in use, unasked.
constexpr int kWatchMs = 4;
// Operations after which a background thread that seems to sleep is told to rest.
constexpr uint64_t kReleasesUnseen = 4;
// Between two looks of one that has been at rest for a while.
constexpr int kLongestRestMs = 4;
constexpr int kLongestSleepMs = 1000;
// How long a rank that leaves waits for the other hosts to take note. They do so at once, unless they hang; while they
// have not taken all bytes yet, they may be busy for as long as the heartbeat's timeout.
constexpr int kLeaveMs = 1000;

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Engine::Engine(World world, const Settings& settings, const Wiring& wiring)
    : world_(std::move(world)),
      settings_(settings),
      segment_(wiring.segment),
      network_(wiring.links, wiring.controls, world_.hosts, settings_.heartbeat_timeout, counters_),
      doorbells_(segment_, world_.local_rank, wiring.doorbells, counters_),
      liveness_(world_, settings_, segment_, wiring.alive_fds, doorbells_, network_.fd()),
      arenas_(wiring.arena_fds, world_.local_size, world_.local_rank),
      spin_(segment_->crowded() ? kCrowdedSpin
            : network_.empty()  ? kWaiterSpin
                                : kNetworkSpin),
      crowded_(segment_->crowded()),
      sets_(world_.process_sets),
      ids_(static_cast<size_t>(segment_->cache_capacity()) + Coordinator::kUncachedIds),
      requests_(segment_->request_lines(world_.local_rank).written, segment_->request_bytes(world_.local_rank),
                Segment::kRequestRingBytes),
      log_(segment_->log_lines().written, segment_->rank(world_.local_rank).log_read, segment_->log_bytes(),
           Segment::kLogBytes),
      executor_(
          world_, settings_, segment_, doorbells_, counters_, arenas_, network_,
          [this](int rank) { return nothing_comes_from(rank); },
          [this](Executor::Requests requests, const std::exception_ptr& error) {
            batch_ended(std::move(requests), error);
          }),
      hosts_(world_, settings_, segment_, doorbells_, liveness_, network_),
      known_gone_(static_cast<size_t>(world_.size)),
      halves_(static_cast<size_t>(world_.size)) {
  count_members_here();
  if (world_.is_coordinator()) {
    coordinator_ = std::make_unique<Coordinator>(world_, settings_, segment_, doorbells_, counters_, hosts_,
                                                 [this](int set) { return executor_.busy(set); });
  } else if (world_.is_leader()) {
    delegate_ = std::make_unique<Delegate>(world_, settings_, segment_, doorbells_, hosts_);
  }
  segment_->rank(world_.local_rank).state.store(kAlive);
  background_thread_ = std::thread(&Engine::background, this);
}

Engine::~Engine() { shutdown(); }

std::vector<int> Engine::descriptors() const {
  std::vector<int> all = liveness_.descriptors();
  all.push_back(segment_->fd());
  all.insert(all.end(), doorbells_.fds().begin(), doorbells_.fds().end());
  for (const int fd : arenas_.descriptors()) {
    if (fd >= 0) all.push_back(fd);
  }
  for (const int fd : network_.descriptors()) all.push_back(fd);
  return all;
}

void Engine::shutdown() {
  {
    std::unique_lock lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    stop_driving_ = true;
    doorbells_.poke(Sleeper::kBackground);
    doorbells_.poke(Sleeper::kWaiter);
    role_free_.wait(lock, [this] { return !role_taken_; });
    role_taken_ = true;  // for good
  }
  // Who leaves because of a peer says so: the others then learn of that peer, not of us.
  if (failure_cause_ >= 0) break_down(failure_cause_);
  // What batches have given to the network to fill or to send is their callers' again.
  network_.abandon();
  complete(executor_.abandon(), HVD_SHUT_DOWN, "Horovod has been shut down.");
  fail(HVD_SHUT_DOWN, "Horovod has been shut down.", -1, true);
  if (!broken_) say_farewell(kDeparted, -1);
  // What a rank had sent before it gave up is of no use to anybody.
  network_.take_leave(kLeaveMs, broken_ ? 0 : static_cast<int>(std::min(settings_.heartbeat_timeout, 3600.0) * 1000));
  background_thread_.join();
}

// ---- Waiting --------------------------------------------------------------------------------------------------------

hvd_status Engine::wait(const std::shared_ptr<Request>& request, int64_t timeout_ns) {
  if (const hvd_status status = request->status.load(); status != HVD_PENDING) return status;
  if (timeout_ns == 0) return HVD_PENDING;
  std::unique_lock lock(mutex_);
  if (!role_taken_ && !stopping_) doorbells_.disarm();  // as in run(): we take the role ourselves
  want(*request);
  return wait_locked(lock, request, timeout_ns);
}

hvd_status Engine::run(const std::shared_ptr<Request>& request, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  validate(*request);
  // Awake before the others can answer: they need not ring.
  if (!role_taken_) doorbells_.disarm();
  request->wanted = true;
  try {
    submit_locked(request);
  } catch (...) {
    if (!role_taken_ && !stopping_) {
      role_taken_ = true;
      release_role(Sleeper::kWaiter);
    }
    throw;
  }
  return wait_locked(lock, request, timeout_ns);
}

hvd_status Engine::wait_locked(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& request,
                               int64_t timeout_ns) {
  const Nanoseconds deadline =
      timeout_ns < 0 ? ~Nanoseconds{0} : settings_.now() + static_cast<Nanoseconds>(timeout_ns);
  Waiter me{request.get(), {}};
  if (!role_taken_ && !stopping_) {
    role_taken_ = true;
    me.has_role = true;
    if (background_timeout_ms_ != kWatchMs) background_timeout_ms_ = liveness_.beat_interval_ms();
  } else {
    const auto self = waiters_.insert(waiters_.end(), &me);
    const auto over = [&] { return me.has_role || request->status.load() != HVD_PENDING; };
    if (background_has_role_) role_wanted_ = true;
    if (background_has_role_ && !crowded_) {
      lock.unlock();
      for (const Nanoseconds start = settings_.now(); !over() && settings_.now() - start < kRoleSpin;) pause_core();
      lock.lock();
    }
    if (timeout_ns < 0) {
      me.wake.wait(lock, over);
    } else {
      me.wake.wait_for(lock, std::chrono::nanoseconds(timeout_ns), over);
    }
    waiters_.erase(self);
  }
  if (me.has_role) {
    lock.unlock();
    doorbells_.disarm();
    drive(request.get(), deadline, Sleeper::kWaiter);
    lock.lock();
    release_role(Sleeper::kWaiter);
  }
  return request->status.load();
}

// With mutex_ held.
void Engine::release_role(Sleeper who) {
  if (stopping_) {
    role_taken_ = false;
    role_free_.notify_all();
    return;
  }
  for (Waiter* waiter : waiters_) {
    if (waiter->has_role || waiter->request->status.load() != HVD_PENDING) continue;
    waiter->has_role = true;  // role_taken_ stays
    background_has_role_ = false;
    counters_.role_changes.add();
    waiter->wake.notify_one();
    return;
  }
  const uint64_t interests = prepare_sleep(Sleeper::kBackground);
  background_timeout_ms_ = ticking() ? kTickMs : watching() ? kWatchMs : liveness_.beat_interval_ms();
  if (who == Sleeper::kWaiter) ++releases_;
  resting_ = (who == Sleeper::kWaiter ? resting_ : std::exchange(nudged_, false)) && may_rest();
  if (!resting_) {
    network_.listen();
    liveness_.let_network_wake_background();
  }
  doorbells_.arm(interests, Sleeper::kBackground);
  role_taken_ = background_has_role_ = false;
  // It does not notice when the network wakes it for what a waiter has read before it could look: the kernel lets it
  // sleep on. So where it has not stirred for a few operations it is told to rest.
  const bool unseen = releases_ - releases_seen_ == kReleasesUnseen && who == Sleeper::kWaiter;
  if (unseen && !network_.empty() && !resting_ && may_rest()) {
    nudged_ = true;
    doorbells_.poke(Sleeper::kBackground);
  }
  // The background thread knows its own new timeout; a waiter has to tell it, unless it wakes up early enough anyway.
  if (has_news() || (who == Sleeper::kWaiter && background_timeout_ms_ < background_sleeps_ms_)) {
    counters_.role_changes.add();
    doorbells_.poke(Sleeper::kBackground);
  }
}

// With mutex_ held.
bool Engine::may_rest() const {
  const bool one_set = std::all_of(sets_.begin() + 1, sets_.end(), [](const auto& ranks) { return ranks.empty(); });
  return pending_ == 0 && one_set && executor_.idle() && !network_.blocked() && !failure_;
}

// With mutex_ held: whether the background thread, which has just woken up, need not look at anything.
bool Engine::stays_at_rest(const Liveness::Woken& woken) {
  const bool others_work = releases_ != std::exchange(releases_seen_, releases_);
  if (role_taken_) {
    // A waiter that keeps the role for long lets the network wake us when it gives it up.
    resting_ = woken.by_network || std::exchange(nudged_, false) || (resting_ && others_work);
    if (!others_work) background_timeout_ms_ = liveness_.beat_interval_ms();
    return true;
  }
  if (!others_work || woken.by_doorbell || woken.by_end) return false;
  // Between two operations: what has come is likely to be for the next one.
  return resting_ = (resting_ || woken.by_network) && may_rest();
}

// ---- Driving --------------------------------------------------------------------------------------------------------

// Moves things until the request has ended, the time is over, or (background) there is nothing to move.
void Engine::drive(const Request* until, Nanoseconds deadline, Sleeper sleeper) {
  const bool waits = sleeper == Sleeper::kWaiter;
  // Where there is a network a pass makes a system call anyway: one more costs little, and may let those run for whom
  // we wait.
  const bool networked = !network_.empty();
  Nanoseconds idle_since = 0;
  for (unsigned passes = 0;; ++passes) {
    const bool moved = progress();
    // The background thread beats, also while it has no time to sleep.
    if (!waits && passes % 16 == 0) liveness_.beat();
    if (until != nullptr && until->status.load() != HVD_PENDING) return;
    if (stop_driving_ || (!waits && role_wanted_)) return;
    if (moved) {
      idle_since = 0;
      if (waits && passes % 16 == 0 && settings_.now() >= deadline) return;
      continue;
    }
    if (look_after_peers()) continue;
    // Looking at the clock costs more than a look at the flags.
    if (idle_since != 0 && passes % 16 != 0) {
      networked ? (void)sched_yield() : pause_core();
      continue;
    }
    const Nanoseconds now = settings_.now();
    if (waits && now >= deadline) return;
    if (networked && network_.give_up_unconfirmed(now)) continue;
    if (idle_since == 0) idle_since = now;
    // The background thread spins for a batch that moves, not for names that gather while others submit them.
    // Who was woken by a heartbeat, or to look for Ctrl-C, need not look for long again.
    const bool nothing_came = network_.link_moves() == moves_before_sleep_;
    const Nanoseconds patience = !waits         ? (crowded_ || executor_.idle() ? 0 : kBackgroundSpin)
                                 : nothing_came ? kWaiterSpin
                                                : spin_;
    const bool in_vain =
        until != nullptr && until->in_sequence && executor_.idle() && coordinator_ && coordinator_->far_off();
    if (now - idle_since < patience && !in_vain) {
      if (crowded_ || networked) sched_yield();
      continue;
    }
    if (!waits) return;
    if (networked) moves_before_sleep_ = network_.link_moves();
    sleep(deadline - now);
    idle_since = 0;
  }
}

// Sleeps with the role. An event after arming rings; one before is seen by has_news().
void Engine::sleep(Nanoseconds longest) {
  doorbells_.arm(prepare_sleep(Sleeper::kWaiter), Sleeper::kWaiter);
  network_.listen();
  if (!has_news() && !stop_driving_) {
    counters_.sleeps.add();
    // Who drives also shows the other hosts that this one lives.
    const int most = hosts_.alone() ? kLongestSleepMs : liveness_.beat_interval_ms();
    const auto ms = static_cast<int>(std::min<Nanoseconds>(longest / 1'000'000 + 1, static_cast<Nanoseconds>(most)));
    liveness_.sleep(Sleeper::kWaiter, ticking() ? kTickMs : watching() ? std::min(ms, kWatchMs) : ms);
  }
  doorbells_.disarm();
  look_closely_next();
}

uint64_t Engine::prepare_sleep(Sleeper sleeper) {
  letter_is_near_ = false;
  return interest::kLog | interest::kSubmitted | executor_.interests() |
         (coordinator_ ? coordinator_->prepare_sleep(sleeper) : 0) | (delegate_ ? delegate_->prepare_sleep() : 0);
}

bool Engine::has_news() const {
  if (broken_) return false;
  if (!log_.empty() || for_orders_wait_ || executor_.can_move()) return true;
  if (coordinator_ && coordinator_->has_news()) return true;
  if (delegate_ && delegate_->has_news()) return true;
  return somebody_new_is_gone();
}

bool Engine::ticking() const {
  if (broken_) return false;
  return (coordinator_ && coordinator_->ticking()) || (delegate_ && delegate_->ticking()) || outbox_waits_ ||
         half_gone_ > 0;
}

void Engine::background() {
  pthread_setname_np(pthread_self(), "hvd-engine");  // as top -H and debuggers show it
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    rest_ms_ = resting_ ? std::min(2 * rest_ms_, kLongestRestMs) : kTickMs;
    background_sleeps_ms_ = resting_ ? rest_ms_ : std::min(background_timeout_ms_, liveness_.beat_interval_ms());
    const int timeout_ms = background_sleeps_ms_;
    lock.unlock();
    Liveness::Woken woken = liveness_.sleep(Sleeper::kBackground, timeout_ms);
    woken.by_end |= liveness_.beat();
    lock.lock();
    if (stopping_) break;
    if (role_taken_ && woken.by_end) doorbells_.poke(Sleeper::kWaiter);
    if (stays_at_rest(woken)) continue;
    role_taken_ = background_has_role_ = true;
    role_wanted_ = false;
    counters_.role_changes.add();
    lock.unlock();
    doorbells_.disarm();
    look_closely_next();
    drive(nullptr, 0, Sleeper::kBackground);
    lock.lock();
    counters_.sleeps.add();
    release_role(Sleeper::kBackground);
  }
}

}  // namespace hvd
