// N ranks in one test: engines over one real segment, as threads of this process or as forked processes.
#ifndef HOROVOD_TESTS_CPP_RANK_GROUP_H_
#define HOROVOD_TESTS_CPP_RANK_GROUP_H_

#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace hvd::testing {

// What the ranks of a group share. Each rank then makes its engine.
class RankGroup {
 public:
  // cores: how many the ranks believe to have; the choice of algorithms depends on it.
  explicit RankGroup(int size, std::vector<std::vector<int>> extra_sets = {}, int cache_capacity = 1024,
                     int cores = available_cores())
      : size_(size) {
    sets_.emplace_back(static_cast<size_t>(size));
    std::iota(sets_[0].begin(), sets_[0].end(), 0);
    for (auto& set : extra_sets) sets_.push_back(std::move(set));
    const int fd = Segment::create(size, cache_capacity, 1, 42, cores);
    segment_ = Segment::map(fd);
    close(fd);
    for (int r = 0; r < size; ++r) {
      doorbells_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      doorbells_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      alive_fds_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
  }
  ~RankGroup() {
    for (const int fd : doorbells_) close(fd);
    for (const int fd : alive_fds_) close(fd);
  }

  std::unique_ptr<Engine> make_engine(int rank, const Settings& settings = {}) const {
    World world;
    world.rank = world.local_rank = rank;
    world.size = world.local_size = size_;
    world.host = "test";
    world.pids.assign(static_cast<size_t>(size_), static_cast<int32_t>(getpid()));
    world.process_sets = sets_;
    const std::vector<int> arena_fds(static_cast<size_t>(size_), Arena::of_process().fd());
    return std::make_unique<Engine>(world, settings, segment_, alive_fds_.data(), doorbells_.data(), arena_fds.data());
  }

  // Makes a rank look dead: its descriptor becomes readable, as a pidfd does.
  void declare_dead(int rank) const {
    const uint64_t one = 1;
    (void)!write(alive_fds_[static_cast<size_t>(rank)], &one, sizeof one);
  }

  int size() const { return size_; }
  const std::vector<std::vector<int>>& sets() const { return sets_; }
  Segment& segment() const { return *segment_; }

 private:
  const int size_;
  std::vector<std::vector<int>> sets_;
  std::shared_ptr<Segment> segment_;
  std::vector<int> doorbells_, alive_fds_;
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr hvd_dtype value = HVD_FLOAT32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr hvd_dtype value = HVD_INT64;
};

// A sum in place of the vector's elements.
template <typename T>
std::shared_ptr<Request> sum_request(const std::string& name, std::vector<T>& data, int set = 0) {
  auto request = std::make_shared<Request>();
  request->key = {set, name};
  request->meta.op = HVD_ALLREDUCE;
  request->meta.dtype = DTypeOf<T>::value;
  request->meta.reduce_op = HVD_SUM;
  request->meta.shape = {static_cast<int64_t>(data.size())};
  request->input = request->output = data.data();
  return request;
}

inline constexpr int64_t kSecond = 1'000'000'000;
inline constexpr int64_t kPatience = 30 * kSecond;

// Runs body(rank, engine) on a thread per rank.
template <typename Body>
void on_all_ranks(const RankGroup& group, const Settings& settings, Body body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      const auto engine = group.make_engine(r, settings);
      body(r, *engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hvd::testing
#endif  // HOROVOD_TESTS_CPP_RANK_GROUP_H_
