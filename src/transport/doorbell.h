// Waking a rank that sleeps, and only then.
//
// Every rank has one word in the segment, `armed`: zero while a thread of it drives the engine, otherwise the set of
// events for which it wants to be woken (its interests). Who makes an event stores it and then looks at the word; who
// wants to sleep sets the word and then looks at the events again. All four accesses are sequentially consistent, so at
// least one of the two sees the other and no wake is lost. The word is taken by exchange, so one sleep costs at most
// one system call of all its peers together.
//
// A rank has two eventfds, for the two kinds of sleeper that it may have: its background thread, and a thread that
// waits for a handle. The highest bit of the word says which of them sleeps.
#ifndef HOROVOD_TRANSPORT_DOORBELL_H_
#define HOROVOD_TRANSPORT_DOORBELL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/segment.h"

namespace hvd {

struct Counters;

enum class Sleeper { kBackground = 0, kWaiter = 1 };

namespace interest {
inline constexpr uint64_t kWaiterSleeps = uint64_t{1} << 63;
inline constexpr uint64_t kLog = uint64_t{1} << 62;      // the coordinator appended to the log
inline constexpr uint64_t kRequest = uint64_t{1} << 61;  // to the coordinator: a full request
inline constexpr uint64_t kUrgent = uint64_t{1} << 60;   // to the coordinator: something to decide now
inline constexpr uint64_t kAll = ~kWaiterSleeps;
inline constexpr uint64_t kSubmitted = uint64_t{1} << 59;  // by another thread of this rank: something for its driver
// A peer published a chunk, or has finished with one. Ranks beyond 28 share bits: that costs a spurious wake, no more.
inline constexpr uint64_t published(int local_rank) { return uint64_t{1} << (local_rank % 28 * 2); }
inline constexpr uint64_t finished(int local_rank) { return uint64_t{2} << (local_rank % 28 * 2); }
}  // namespace interest

class Doorbells {
 public:
  // Duplicates the descriptors (two per local rank: background, waiter). Throws SystemError.
  Doorbells(std::shared_ptr<Segment> segment, int me, const int* eventfds, Counters& counters);
  ~Doorbells();
  Doorbells(const Doorbells&) = delete;
  Doorbells& operator=(const Doorbells&) = delete;

  // Wakes a rank if it sleeps and has one of these interests. Call after the event is stored.
  void ring(int local_rank, uint64_t interests);
  void ring_all(uint64_t interests);
  // Whether ring() would wake it.
  bool sleeps(int local_rank, uint64_t interests) const;
  // Says that this rank is about to sleep; look at the events again afterwards.
  void arm(uint64_t interests, Sleeper sleeper);
  void disarm();
  // Wakes one of our own threads whatever the word says.
  void poke(Sleeper sleeper);

  int fd(Sleeper sleeper) const { return fds_[static_cast<size_t>(2 * me_) + static_cast<size_t>(sleeper)]; }
  // All descriptors, for the child of a fork to close.
  const std::vector<int>& fds() const { return fds_; }

 private:
  std::shared_ptr<Segment> segment_;
  const int me_;
  std::vector<int> fds_;
  Counters& counters_;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_DOORBELL_H_
