// Small allreduces that need no agreement any more, and everything that makes them need it again.
#include "engine/standing_orders.h"

#include <doctest/doctest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <random>
#include <thread>

#include "standing_orders_cases.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

// Members that are alone on their hosts, that share one, and both.
const std::vector<HostOf> kLayoutsOfOrders = {hosts_with({1, 1}), hosts_with({1, 1, 1}), HostOf{{0, 2, 1, 3}},
                                              hosts_with({2}),    hosts_with({4}),       hosts_with({2, 2}),
                                              hosts_with({3, 1}), HostOf{{0, 1, 0, 1}},  HostOf{{0, 1, 2, 2, 1, 0}}};

// The results of a name's rounds, of which the first are agreed on, for types and operations in which rounding shows.
void check_bits(int rank, Engine& engine, int count) {
  std::mt19937 random(static_cast<unsigned>(rank));
  for (const hvd_dtype dtype : {HVD_FLOAT32, HVD_BFLOAT16}) {
    for (const hvd_reduce_op op : {HVD_SUM, HVD_AVERAGE, HVD_MAX}) {
      // Numbers whose sum depends on the order in which they are added, and on how often that is rounded.
      std::vector<float> values;
      for (int i = 0; i < count; ++i) values.push_back(std::ldexp(random() % 65536 - 32768.f, i % 16));
      const bool half = dtype == HVD_BFLOAT16;
      std::vector<float> first;
      const uint64_t standing = engine.counters().requests_standing.get();
      for (int round = 0; round < kEnough; ++round) {
        std::vector<float> data = values;
        for (size_t i = 0; half && i < data.size(); ++i)
          data[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[i]) & 0xffff0000);
        auto request = sum_request("x" + std::to_string(count) + std::to_string(dtype) + std::to_string(op), data);
        std::vector<uint16_t> halves;
        if (half) {
          for (const float value : data) halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
          request->input = request->output = halves.data();
        }
        request->meta.dtype = dtype;
        request->meta.reduce_op = op;
        if (op != HVD_SUM) {
          request->meta.prescale = 0.3;
          request->meta.postscale = 1.7;
        }
        REQUIRE(engine.run(request, kPatience) == HVD_OK);
        for (size_t i = 0; i < halves.size(); ++i)
          data[i] = std::bit_cast<float>(static_cast<uint32_t>(halves[i]) << 16);
        if (round == 0) first = data;
        REQUIRE(data == first);
      }
      CHECK(engine.counters().requests_standing.get() - standing >= kEnough / 2);
    }
  }
}

std::shared_ptr<Request> join_request() {
  auto request = std::make_shared<Request>();
  request->key = {0, kJoinName};
  request->meta.op = HVD_JOIN;
  return request;
}

std::shared_ptr<Request> change_sets(hvd_op op, const std::vector<int64_t>& ranks, int set = -1) {
  auto request = std::make_shared<Request>();
  request->key = {0, kChangeSetsName};
  request->meta.op = op;
  request->meta.shape = ranks;
  request->meta.root = set;
  return request;
}

}  // namespace

TEST_CASE("an allreduce that is repeated alone needs no log and no control messages any more") {
  for (const HostOf& hosts : kLayoutsOfOrders) {
    const RankGroup group(hosts);
    std::vector<size_t> counts = {1, 400};
    if (have_lanes(hosts.ranks)) counts.insert(counts.end(), {kOneChunk, kByLane, kManyPieces});
    on_all_ranks(group, {}, [&](int, Engine& engine) {
      for (const size_t count : counts) {
        const std::string name = "x" + std::to_string(count);
        reduce(engine, name, kEnough, count);
        const uint64_t records = engine.counters().control_records.get();
        const bool quick = count < kByLane;
        CHECK(entries_during(engine, [&] { reduce(engine, name, quick ? 200 : 10, count); }) == 0);
        // Heartbeats, and what the others still say about other things.
        if (quick) CHECK(engine.counters().control_records.get() - records < 20);
      }
    });
  }
}

TEST_CASE("what an order can't do better is agreed on as ever") {
  struct Case {
    const char* what;
    std::vector<int> hosts;
    size_t count;
    bool ring;
  };
  const std::vector<Case> cases = {{"no bytes", {1, 1}, 0, false},
                                   {"no bytes, one host", {2}, 0, false},
                                   {"too many bytes", {1, 1}, kLongestSumByLane / 8 + 1, false},
                                   {"too many bytes, two a host", {2, 2}, kLongestSumByLane / 8 + 1, false},
                                   {"too many bytes for a tray", {2}, Trays::kMostBytes / 8 + 1, false},
                                   {"too many bytes for each pair on a cable", {2, 1}, 5000, false},
                                   {"too many members", {9}, 10, false},
                                   {"the ring folds in another order", {1, 1, 1}, 10, true}};
  for (const Case& each : cases) {
    CAPTURE(each.what);
    const RankGroup group(each.hosts);
    Settings settings;
    settings.allreduce_ring = each.ring;
    on_all_ranks(group, settings, [&](int, Engine& engine) {
      reduce(engine, "x", kEnough, each.count);
      CHECK(entries_during(engine, [&] { reduce(engine, "x", 10, each.count); }) >= 10);
    });
  }
}

TEST_CASE("the bits are the same with and without an order") {
  for (const HostOf& hosts : kLayoutsOfOrders) {
    const std::vector<int> counts =
        have_lanes(hosts.ranks) ? std::vector{900, 2'003, 20'003, 140'003} : std::vector{900};
    for (const int count : counts) {
      // Another job for each: the names of all of them would need more trays than there are.
      on_all_ranks(RankGroup(hosts), {}, [&](int rank, Engine& engine) { check_bits(rank, engine, count); });
    }
  }
}

TEST_CASE("where there are more names than trays, the others are agreed on; trays are used again") {
  for (const auto& [hosts, least] : std::vector<Case>{{hosts_with({2}), 1},
                                                      {hosts_with({2, 1}), 1},
                                                      {hosts_with({1, 1}), kByLane},
                                                      {hosts_with({2, 2}), kOneChunk}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [first = least](int, Engine& engine) {
      constexpr int kNames = Trays::kTrays + 4;
      for (int time = 0; time < 4; ++time) {
        // Another size each time: that ends the orders of the last one, on whose trays the new ones' letters then lie.
        const size_t count = first + (time % 2 == 0 ? 0 : 40);
        for (int name = 0; name < kNames; ++name) reduce(engine, "x" + std::to_string(name), kEnough, count);
        const uint64_t standing = engine.counters().requests_standing.get();
        for (int round = 0; round < 10; ++round) {
          for (int name = 0; name < kNames; ++name) reduce(engine, "x" + std::to_string(name), 1, count);
        }
        CHECK(engine.counters().requests_standing.get() - standing == 10 * Trays::kTrays);
      }
    });
  }
}

TEST_CASE("a lane passes from an order of one set to one of another, which shares only some members with it") {
  const std::vector<std::vector<int>> sets = {{0, 1, 3, 4}, {1, 2, 4, 5}, {0, 1, 2, 3, 4, 5}, {0, 3}};
  const RankGroup group({3, 3}, sets);
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    for (size_t time = 0; time < 24; ++time) {
      const int set = 1 + static_cast<int>(time % sets.size());
      const std::vector<int> ranks = engine.ranks_of(set);
      // Another size each time: that ends the set's last order, whose lane is then free for the next set's.
      const size_t count = kByLane + 100 * (time / sets.size());
      if (std::binary_search(ranks.begin(), ranks.end(), rank)) {
        reduce(engine, "x", 8, count, set);
        const uint64_t standing = engine.counters().requests_standing.get();
        reduce(engine, "x", 4, count, set);
        CHECK(engine.counters().requests_standing.get() - standing == 4);
        reduce(engine, "x", 1, count + 50, set);
      }
      reduce(engine, "all of them", 1);
    }
  });
}

TEST_CASE("who sleeps under an order is woken by the last letter") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    reduce(engine, "x", kEnough);
    const uint64_t rung = engine.counters().doorbells.get();
    for (int round = 0; round < 3; ++round) {
      const auto sleeps = [&](int of) { return (group.segment().rank(of).armed.load() & interest::published(2)) != 0; };
      while (rank == 2 && !(sleeps(0) && sleeps(1))) std::this_thread::yield();
      reduce(engine, "x", 1);
    }
    if (rank == 2) CHECK(engine.counters().doorbells.get() > rung + 1);
    reduce(engine, "end", 1);  // all are still there
  });
}

TEST_CASE("a name changes its shape under an order: together, or as an error on all ranks") {
  for (const Case& each : with_counts({{1, 1, 1}, {3}, {2, 1}, {2, 2}})) {
    const RankGroup group(each.hosts);
    on_all_ranks(group, {}, [count = each.count](int rank, Engine& engine) {
      for (int time = 0; time < 5; ++time) {
        reduce(engine, "x", kEnough + time, count);
        reduce(engine, "x", kEnough, count + 1);
        // One rank differs; before or after the others, who may have sent their letters already.
        std::vector<int64_t> data(rank == time % 3 ? count + 2 : count + 1, 1);
        const auto request = sum_request("x", data);
        CHECK(engine.run(request, kPatience) == HVD_MISMATCH);
        CHECK_MESSAGE(request->error.find("'x'") != std::string::npos, request->error);
      }
      reduce(engine, "x", 2 * kEnough, count);
    });
  }
}

TEST_CASE("a name is pending once, also under an order") {
  const RankGroup group(2);
  std::atomic<bool> refused{false};
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    reduce(engine, "x", kEnough);
    std::vector<int64_t> data(10, 1), again(10, 1);
    const auto request = sum_request("x", data);
    if (rank == 0) {
      engine.submit(request);
      CHECK_THROWS_AS(engine.submit(sum_request("x", again)), InvalidError);
      refused = true;
    } else {
      while (!refused) std::this_thread::yield();
      engine.submit(request);
    }
    CHECK(engine.wait(request, kPatience) == HVD_OK);
    CHECK(data == std::vector<int64_t>(10, 2));
  });
}

TEST_CASE("an order that nobody waits for ends, and one that is waited for again begins") {
  for (const Case& each : with_counts(kTwoRanks)) {
    const RankGroup group(each.hosts);
    on_all_ranks(group, {}, [count = each.count](int, Engine& engine) {
      for (int time = 0; time < 3; ++time) {
        reduce(engine, "x", kEnough, count);
        CHECK(entries_during(engine, [&] { reduce(engine, "x", kEnough, count); }) == 0);
        const auto without_waiting = [&] {
          for (int round = 0; round < StandingOrder::kUnwanted; ++round) {
            std::vector<int64_t> data(count, 1);
            const auto request = sum_request("x", data);
            engine.submit(request);
            while (request->status.load() == HVD_PENDING) std::this_thread::yield();
            REQUIRE(request->status.load() == HVD_OK);
          }
        };
        // A round that ends while it is submitted does not count, and the end takes a few more.
        bool ended = false;
        for (int i = 0; i < 200 && !ended; ++i) {
          std::vector<int64_t> with_entries(1, entries_during(engine, without_waiting) > 0 ? 1 : 0);
          REQUIRE(engine.run(sum_request("with entries " + std::to_string(i), with_entries), kPatience) == HVD_OK);
          ended = with_entries[0] == 2;
        }
        CHECK(ended);
        CHECK(entries_during(engine, [&] { reduce(engine, "x", 3, count); }) >= 3);
      }
    });
  }
}

TEST_CASE("a step of many names keeps its few messages when one of them was reduced alone before") {
  constexpr int kTensors = 50, kSteps = 60;
  for (const std::vector<int>& hosts : kTwoRanks) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [](int, Engine& engine) {
      reduce(engine, "x0", kEnough);
      CHECK(entries_during(engine, [&] { reduce(engine, "x0", kEnough); }) == 0);
      std::vector<std::vector<int64_t>> data(kTensors, std::vector<int64_t>(10));
      const uint64_t messages = engine.counters().request_messages.get();
      for (int step = 0; step < kSteps; ++step) {
        std::vector<std::shared_ptr<Request>> requests;
        for (int t = 0; t < kTensors; ++t) {
          requests.push_back(sum_request("x" + std::to_string(t), data[static_cast<size_t>(t)]));
          engine.submit(requests.back());
        }
        for (const auto& request : requests) REQUIRE(engine.wait(request, kPatience) == HVD_OK);
      }
      // Every name once, and a few for orders that ended.
      CHECK(engine.counters().request_messages.get() - messages < 2 * kTensors);
    });
  }
}

TEST_CASE("join ends orders, and what was sent under them counts") {
  for (const Case& each : with_counts({{1, 1}, {1, 1, 1}, {2}, {3}, {2, 1}, {2, 2}})) {
    for (int early = 0; early < 2; ++early) {
      const RankGroup group(each.hosts);
      const size_t count = each.count;
      on_all_ranks(group, {}, [&](int rank, Engine& engine) {
        reduce(engine, "x", kEnough, count);
        const int n = engine.world().size;
        // Some have nothing more to do; the last rank has, and leaves one operation pending when it joins too.
        for (int more = 0; rank == n - 1 && more < 3; ++more) {
          std::vector<int64_t> data(count, 7);
          REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
          CHECK(data == std::vector<int64_t>(count, 7));
        }
        std::vector<int64_t> left(count, 7);
        const auto pending = sum_request("y" + std::to_string(early), left);
        if (rank == n - 1) engine.submit(pending);
        CHECK(engine.run(join_request(), kPatience) == HVD_OK);
        if (rank == n - 1) CHECK(engine.wait(pending, kPatience) == HVD_OK);
        reduce(engine, "x", 2 * kEnough, count);
        // Left pending under an order itself.
        std::vector<int64_t> last(count, 5);
        const auto under_order = sum_request("x", last);
        if (rank == early) engine.submit(under_order);
        CHECK(engine.run(join_request(), kPatience) == HVD_OK);
        if (rank == early) {
          CHECK(engine.wait(under_order, kPatience) == HVD_OK);
          CHECK(last == std::vector<int64_t>(count, 5));
        }
      });
    }
  }
}

TEST_CASE("orders of process sets that come and go") {
  for (const Case& each : with_counts(kThreeRanks)) {
    const RankGroup group(each.hosts);
    on_all_ranks(group, {}, [count = each.count](int rank, Engine& engine) {
      for (int time = 0; time < 4; ++time) {
        const auto add = change_sets(HVD_ADD_PROCESS_SET, {0, 2});
        REQUIRE(engine.run(add, kPatience) == HVD_OK);
        const int set = add->value;
        reduce(engine, "all", kEnough, count);
        std::vector<int64_t> data(count, 1);
        const auto pending = sum_request("x", data, set);
        if (rank != 1) {
          reduce(engine, "x", kEnough, count, set);
          CHECK(entries_during(engine, [&] { reduce(engine, "x", kEnough, count, set); }) == 0);
          // Odd: both leave one behind, which therefore ends; even: only one does.
          if (rank == 0 || time % 2 == 1) engine.submit(pending);
        }
        REQUIRE(engine.run(change_sets(HVD_REMOVE_PROCESS_SET, {}, set), kPatience) == HVD_OK);
        if (rank == 1 || (rank == 2 && time % 2 == 0)) continue;
        CHECK(engine.wait(pending, kPatience) == (time % 2 == 1 ? HVD_OK : HVD_INVALID));
      }
    });
  }
}

TEST_CASE("a large and a small sum under orders at the same time") {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}, {2, 2}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [](int rank, Engine& engine) {
      reduce(engine, "large", kEnough, kManyPieces);
      reduce(engine, "small", kEnough);
      const auto at_once = [&] {
        for (int round = 0; round < 15; ++round) {
          std::vector<int64_t> data(kManyPieces, rank + round);
          const auto large = sum_request("large", data);
          engine.submit(large, true);
          reduce(engine, "small", round % 3);
          REQUIRE(engine.wait(large, kPatience) == HVD_OK);
          const int n = engine.world().size;
          REQUIRE(data == std::vector<int64_t>(kManyPieces, n * round + n * (n - 1) / 2));
        }
      };
      CHECK(entries_during(engine, at_once) == 0);
    });
  }
}

TEST_CASE("a full cache ends orders without harm") {
  for (const std::vector<int>& hosts : kTwoRanks) {
    const RankGroup group(hosts, {}, 8);
    on_all_ranks(group, {}, [](int, Engine& engine) {
      for (int time = 0; time < 10; ++time) {
        reduce(engine, "x", kEnough);
        for (int name = 0; name < 20; ++name) reduce(engine, "y" + std::to_string(name), 2);
        for (int name = 0; name < 9; ++name) reduce(engine, "z" + std::to_string(name), kEnough);
      }
    });
  }
}
