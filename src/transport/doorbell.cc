#include "transport/doorbell.h"

#include <fcntl.h>
#include <unistd.h>

#include "transport/counters.h"
#include "transport/errors.h"

namespace hvd {

Doorbells::Doorbells(std::shared_ptr<Segment> segment, int me, const int* eventfds, Counters& counters)
    : segment_(std::move(segment)), me_(me), counters_(counters) {
  for (int i = 0; i < 2 * segment_->local_size(); ++i) {
    const int copy = fcntl(eventfds[i], F_DUPFD_CLOEXEC, 3);
    if (copy < 0) {
      SystemError error("can't keep the doorbell of local rank " + std::to_string(i / 2));
      for (const int fd : fds_) close(fd);
      throw error;
    }
    fds_.push_back(copy);
  }
}

Doorbells::~Doorbells() {
  for (const int fd : fds_) close(fd);
}

void Doorbells::ring(int local_rank, uint64_t interests) {
  Flag& armed = segment_->rank(local_rank).armed;
  if ((armed.load() & interests) == 0) return;
  const uint64_t taken = armed.exchange(0);
  if (taken == 0) return;  // another peer was quicker
  const bool waiter = (taken & interest::kWaiterSleeps) != 0;
  const uint64_t one = 1;
  counters_.doorbells.add();
  // Can only fail with EAGAIN, when the counter is full and the sleeper therefore wakes anyway.
  (void)!write(fds_[static_cast<size_t>(2 * local_rank) + (waiter ? 1 : 0)], &one, sizeof one);
}

bool Doorbells::sleeps(int local_rank, uint64_t interests) const {
  return (segment_->rank(local_rank).armed.load() & interests) != 0;
}

void Doorbells::ring_all(uint64_t interests) {
  for (int r = 0; r < segment_->local_size(); ++r) {
    if (r != me_) ring(r, interests);
  }
}

void Doorbells::arm(uint64_t interests, Sleeper sleeper) {
  segment_->rank(me_).armed.store(interests | (sleeper == Sleeper::kWaiter ? interest::kWaiterSleeps : 0));
}

void Doorbells::disarm() {
  Flag& armed = segment_->rank(me_).armed;
  if (armed.load(std::memory_order_relaxed) != 0) armed.store(0);
}

void Doorbells::poke(Sleeper sleeper) {
  const uint64_t one = 1;
  counters_.doorbells.add();
  (void)!write(fd(sleeper), &one, sizeof one);
}

}  // namespace hvd
