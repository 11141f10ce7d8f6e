// What the tests of standing orders share: layouts and sizes, rounds of a name, and what they cost.
#ifndef HOROVOD_TESTS_STANDING_ORDERS_CASES_H_
#define HOROVOD_TESTS_STANDING_ORDERS_CASES_H_

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "rank_group.h"

namespace hvd::testing {

constexpr int kEnough = 20;  // rounds, until an order stands

inline const std::vector<std::vector<int>> kTwoRanks = {{1, 1}, {2}}, kThreeRanks = {{1, 1, 1}, {3}, {2, 1}};

// Of int64: what goes in a letter, what begins with one and goes on over a lane, and several pieces of that; and what
// needs a lane only between hosts with several members, in one chunk.
constexpr size_t kSmall = 10, kByLane = 40'000, kManyPieces = 140'001, kOneChunk = 1'000;

// Whether large sums may stand: between hosts with as many members each.
inline bool have_lanes(const std::vector<int>& host_of) {
  std::map<int, int> numbers;
  for (const int host : host_of) ++numbers[host];
  return numbers.size() > 1 && std::all_of(numbers.begin(), numbers.end(),
                                           [&](const auto& each) { return each.second == numbers.begin()->second; });
}

// Layouts with numbers of elements, by each of the ways that there are for them.
struct Case {
  HostOf hosts;
  size_t count;
};
inline std::vector<Case> with_counts(const std::vector<std::vector<int>>& layouts,
                                     const std::vector<size_t>& by_lane = {kByLane}) {
  std::vector<Case> cases;
  for (const std::vector<int>& each : layouts) {
    const HostOf hosts = hosts_with(each);
    cases.push_back({hosts, kSmall});
    for (const size_t count : by_lane) {
      if (have_lanes(hosts.ranks)) cases.push_back({hosts, count});
    }
  }
  return cases;
}

// So many blocking sums of a name; their results are checked.
inline void reduce(Engine& engine, const std::string& name, int rounds, size_t count = 10, int set = 0) {
  const std::vector<int> ranks = engine.ranks_of(set);
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> data(count, engine.world().rank * 1000 + round);
    int64_t sum = 0;
    for (const int rank : ranks) sum += rank * 1000 + round;
    const auto request = sum_request(name, data, set);
    REQUIRE_MESSAGE(engine.run(request, kPatience) == HVD_OK, request->error);
    REQUIRE(data == std::vector<int64_t>(count, sum));
  }
}

// How many entries of the log this rank has read while it did that.
template <typename Body>
uint64_t entries_during(const Engine& engine, Body body) {
  const uint64_t before = engine.counters().log_entries.get();
  body();
  return engine.counters().log_entries.get() - before;
}

}  // namespace hvd::testing
#endif  // HOROVOD_TESTS_STANDING_ORDERS_CASES_H_
