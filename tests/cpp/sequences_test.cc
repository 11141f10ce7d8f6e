// Steps that are repeated in the same order and agreed on by counting, and everything that ends that.
#include "engine/sequences.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

constexpr int kTensors = 40;
constexpr int kEnough = 8;   // steps, until a sequence has begun
constexpr int kTries = 400;  // until it has, whatever else the machine does

// Some names of a step, by number.
std::vector<int> in_order(int count = kTensors) {
  std::vector<int> names(static_cast<size_t>(count));
  std::iota(names.begin(), names.end(), 0);
  return names;
}

// One step of sums: what a rank submits, in which order, and what it then waits for first.
struct Step {
  std::vector<int> names = in_order();
  std::vector<int> waits = {};  // before all others
  size_t elements = 3;
  int set = 0;
};

struct Submitted {
  std::vector<std::vector<int64_t>> data;
  std::vector<std::shared_ptr<Request>> requests;
};

Submitted submit(Engine& engine, const Step& step) {
  Submitted all;
  all.data.reserve(step.names.size());
  for (const int name : step.names) {
    all.data.emplace_back(step.elements, (engine.world().rank + 1) * 1000 + name);
    all.requests.push_back(sum_request("x" + std::to_string(name), all.data.back(), step.set));
    engine.submit(all.requests.back());
  }
  return all;
}

// Waits for all of it, and looks whether the sums are right.
void finish(Engine& engine, const Step& step, const Submitted& all) {
  for (const int name : step.waits) {
    const auto at = std::find(step.names.begin(), step.names.end(), name) - step.names.begin();
    REQUIRE(engine.wait(all.requests[static_cast<size_t>(at)], kPatience) == HVD_OK);
  }
  for (size_t i = 0; i < all.requests.size(); ++i) {
    REQUIRE_MESSAGE(engine.wait(all.requests[i], kPatience) == HVD_OK, all.requests[i]->error);
    int64_t sum = 0;
    for (const int rank : engine.ranks_of(step.set)) sum += (rank + 1) * 1000 + step.names[i];
    REQUIRE(all.data[i] == std::vector<int64_t>(step.elements, sum));
  }
}

void run(Engine& engine, const Step& step = {}, int times = 1) {
  for (int i = 0; i < times; ++i) finish(engine, step, submit(engine, step));
}

// How many requests of this rank were submitted as part of a sequence while it did that.
template <typename Body>
uint64_t counted_during(const Engine& engine, Body body) {
  const uint64_t before = engine.counters().requests_in_sequence.get();
  body();
  return engine.counters().requests_in_sequence.get() - before;
}

// Whether it is so on all ranks.
bool all_agree(Engine& engine, bool so) {
  std::vector<int64_t> vote(1, so ? 1 : 0);
  const auto request = sum_request("vote", vote);
  request->meta.reduce_op = HVD_MIN;  // not of the class of the sums: no part of their steps
  REQUIRE(engine.run(request, kPatience) == HVD_OK);
  return vote[0] == 1;
}

// Does it until all ranks have counted so many of its requests. A rank that gets no turn on the processor for a while
// tears steps apart, and so ends a sequence, or lets it begin later: no reason to fail, if one counts in the end.
template <typename Body>
void do_until_counted(Engine& engine, uint64_t least, Body body) {
  for (int i = 0; i < kTries; ++i) {
    if (all_agree(engine, counted_during(engine, body) >= least)) return;
  }
  FAIL_CHECK("no sequence counts");
}

void begin(Engine& engine, const Step& step = {}) {
  do_until_counted(engine, step.names.size() / 2, [&] { run(engine, step); });
}

std::shared_ptr<Request> other_request(hvd_op op, const char* name, const std::vector<int64_t>& ranks = {},
                                       int set = -1) {
  auto request = std::make_shared<Request>();
  request->key = {0, name};
  request->meta.op = op;
  request->meta.shape = ranks;
  request->meta.root = set;
  return request;
}

}  // namespace

TEST_CASE("a step that is repeated in one order is agreed on by a count, without a message") {
  for (const int size : {1, 2, 3}) {
    const RankGroup group(size);
    on_all_ranks(group, {}, [](int rank, Engine& engine) {
      begin(engine);
      // The last is waited for first, so that a batch is the whole step, unless a rank is slow.
      const Step step{.waits = {kTensors - 1}};
      bool few_bytes = false, few_messages = false;
      for (int i = 0; i < kTries && !all_agree(engine, few_bytes && few_messages); ++i) {
        const uint64_t bytes = engine.counters().log_bytes.get();
        const uint64_t messages = engine.counters().request_messages.get();
        // A name that happened to be run by itself some times stays out of it.
        const bool counted = counted_during(engine, [&] { run(engine, step, 20); }) >= 10 * kTensors;
        // Name by name it would be four bytes each.
        few_bytes =
            counted && (rank != 0 || engine.counters().log_bytes.get() - bytes < 20 * kTensors * sizeof(uint32_t));
        few_messages = engine.counters().request_messages.get() - messages < kTensors;
      }
      CHECK(few_bytes);
      CHECK(few_messages);
    });
  }
}

TEST_CASE("between hosts nothing is counted") {
  const RankGroup group(std::vector<int>{2, 1});
  on_all_ranks(group, {},
               [](int, Engine& engine) { CHECK(counted_during(engine, [&] { run(engine, {}, 2 * kEnough); }) == 0); });
}

TEST_CASE("parts of a step, waited for in any order, by some ranks or by all") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    begin(engine);
    std::mt19937_64 random(static_cast<uint64_t>(rank));
    for (int round = 0; round < 30; ++round) {
      do_until_counted(engine, kTensors / 2, [&] {
        Step step;
        for (int i = 0; i < 3; ++i) step.waits.push_back(static_cast<int>(random() % kTensors));
        run(engine, step);
      });
    }
    // Half of it is waited for before the rest comes; the rest together with the next step's half.
    Step half, rest;
    half.names.resize(kTensors / 2);
    rest.names.erase(rest.names.begin(), rest.names.begin() + kTensors / 2);
    run(engine, half);
    for (int round = 0; round < 5; ++round) {
      const Submitted second = submit(engine, rest), first = submit(engine, half);
      finish(engine, rank == 1 ? rest : half, rank == 1 ? second : first);
      finish(engine, rank == 1 ? half : rest, rank == 1 ? first : second);
    }
    run(engine, rest);
    begin(engine);
  });
}

TEST_CASE("what nobody waits for is run, also when the step stays incomplete") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int, Engine& engine) {
    Step rest;
    rest.names.erase(rest.names.begin(), rest.names.begin() + kTensors / 2);
    // All but a few: also of the rest some are counted.
    do_until_counted(engine, kTensors * 3 / 4, [&] {
      std::atomic<int> ended{0};
      Submitted all;
      for (int name = 0; name < kTensors / 2; ++name) {
        all.data.emplace_back(3, 1);
        all.requests.push_back(sum_request("x" + std::to_string(name), all.data.back()));
        all.requests.back()->callback = [](void* count, hvd_status, const char*) {
          ++*static_cast<std::atomic<int>*>(count);
        };
        all.requests.back()->context = &ended;
      }
      for (const auto& request : all.requests) engine.submit(request);
      while (ended < kTensors / 2) std::this_thread::yield();
      run(engine, rest);
    });
  });
}

TEST_CASE("the threshold bounds a batch of a sequence") {
  const RankGroup group(2);
  Settings settings;
  settings.fusion_threshold = 10 * 3 * sizeof(int64_t);
  on_all_ranks(group, settings, [](int, Engine& engine) {
    do_until_counted(engine, kTensors / 2, [&] {
      const uint64_t batches = engine.counters().batches.get();
      run(engine);
      CHECK(engine.counters().batches.get() - batches >= kTensors / 10);
    });
  });
}

TEST_CASE("who waits for a part of a step gets it while the rest trickles in") {
  const RankGroup group(2);
  std::atomic<bool> has_it{false};
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    Step first, rest;
    first.names.resize(1);
    rest.names.erase(rest.names.begin());
    bool early = false;
    // Many times in a row: once may be luck.
    int in_a_row = 0;
    for (int i = 0; i < kTries && in_a_row < 5; ++i) {
      begin(engine);
      has_it = false;
      engine.run(other_request(HVD_BARRIER, "barrier"), kPatience);
      const Submitted one = submit(engine, first);
      Submitted others;
      if (rank == 1) {
        others = submit(engine, rest);
        finish(engine, first, one);
        has_it = true;
        early = true;
      } else {
        for (const int name : rest.names) {
          early = has_it;  // before the last of them, in the end
          Submitted next = submit(engine, {.names = {name}});
          others.data.push_back(std::move(next.data[0]));
          others.requests.push_back(std::move(next.requests[0]));
          std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        finish(engine, first, one);
      }
      finish(engine, rest, others);
      in_a_row = all_agree(engine, early) ? in_a_row + 1 : 0;
    }
    CHECK(in_a_row == 5);
  });
}

TEST_CASE("another order ends a sequence: on one rank, on all, or names left out and names more") {
  for (int kind = 0; kind < 4; ++kind) {
    const RankGroup group(3);
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      begin(engine);
      Step step;
      if (kind == 0 && rank == 1) std::reverse(step.names.begin(), step.names.end());
      if (kind == 1) std::rotate(step.names.begin(), step.names.begin() + rank + 1, step.names.end());
      if (kind == 2) step.names.erase(step.names.begin() + 7);
      if (kind == 3) step.names.insert(step.names.begin() + 7, kTensors);
      run(engine, step, 3);
      begin(engine);  // again
    });
  }
}

TEST_CASE("a name of a sequence changes its shape: together, or as an error on all ranks") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    begin(engine);
    begin(engine, {.elements = 5});
    Step half;
    half.elements = 5;
    half.names.resize(kTensors / 2);
    const Submitted before = submit(engine, half);
    std::vector<int64_t> other(rank == 2 ? 4 : 5);
    const auto request = sum_request("x20", other);
    CHECK(try_to_run(engine, request) == HVD_MISMATCH);
    CHECK(request->error.find("x20") != std::string::npos);
    finish(engine, half, before);
    run(engine, {.elements = 5}, 2);
  });
}

TEST_CASE("names that are waited for one by one leave their sequence") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int, Engine& engine) {
    begin(engine);
    const auto one_by_one = [&] {
      for (const int name : in_order()) run(engine, {.names = {name}});
    };
    for (int i = 0; i < 2 * kEnough; ++i) one_by_one();
    CHECK(counted_during(engine, one_by_one) == 0);
    CHECK(engine.counters().requests_standing.get() > 0);
  });
}

TEST_CASE("join ends sequences, and what was submitted in them counts") {
  for (const int size : {2, 3}) {
    const RankGroup group(size);
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      for (int round = 0; round < 2; ++round) {
        begin(engine);
        // Who joins last has submitted half of a step, the others less or nothing.
        std::vector<std::vector<int64_t>> data(kTensors / 2, std::vector<int64_t>(3, 7));
        std::vector<std::shared_ptr<Request>> left;
        for (int name = 0; name < rank * kTensors / 2 / (size - 1); ++name) {
          left.push_back(sum_request("x" + std::to_string(name), data[static_cast<size_t>(name)]));
          engine.submit(left.back());
        }
        CHECK(engine.run(other_request(HVD_JOIN, kJoinName), kPatience) == HVD_OK);
        for (const auto& request : left) CHECK(engine.wait(request, kPatience) == HVD_OK);
        if (rank == size - 1) CHECK(data.back() == std::vector<int64_t>(3, 7));
      }
    });
  }
}

TEST_CASE("a joined rank's part of a sequence counts, also if another rank gives a name another shape") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      begin(engine);
      std::vector<int64_t> data(3, 1), longer(5, 1);
      const auto request = sum_request("x0", rank == 0 ? longer : data);
      if (rank == 1) engine.submit(request);
      if (rank == 0) CHECK(engine.run(request, kPatience) == HVD_MISMATCH);
      CHECK(engine.run(other_request(HVD_JOIN, kJoinName), kPatience) == HVD_OK);
      CHECK(engine.wait(request, kPatience) == HVD_MISMATCH);
    }
  });
}

TEST_CASE("sequences of process sets that come and go, beside each other") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      const auto add = other_request(HVD_ADD_PROCESS_SET, kChangeSetsName, {0, 2});
      REQUIRE(engine.run(add, kPatience) == HVD_OK);
      for (int i = 0; i < kEnough; ++i) {
        const Submitted all = submit(engine, {});
        if (rank != 1) run(engine, {.elements = 2, .set = add->value});
        finish(engine, {}, all);
      }
      // Removed while a part of a step is pending on some.
      Step half{.set = add->value};
      half.names.resize(kTensors / 2);
      Submitted left;
      if (rank == 2) left = submit(engine, half);
      REQUIRE(engine.run(other_request(HVD_REMOVE_PROCESS_SET, kChangeSetsName, {}, add->value), kPatience) == HVD_OK);
      for (const auto& request : left.requests) CHECK(engine.wait(request, kPatience) == HVD_INVALID);
    }
  });
}

TEST_CASE("more steps than places and than the cache holds") {
  for (const int capacity : {16, kTensors, 2 * kTensors, 1024}) {
    const RankGroup group(2, {}, capacity);
    on_all_ranks(group, {}, [](int, Engine& engine) {
      for (int round = 0; round < 4; ++round) {
        run(engine, {}, kEnough);
        Step other;
        for (int& name : other.names) name += kTensors;
        run(engine, other, kEnough);
      }
    });
  }
}

TEST_CASE("a stall in a sequence is told with who is missing") {
  const RankGroup group(3);
  Settings settings;
  settings.stall_warning = 0;
  settings.stall_shutdown = 1;
  std::atomic<int> ended{0};
  on_all_ranks(group, settings, [&](int rank, Engine& engine) {
    begin(engine);
    Step step;
    if (rank == 1) step.names.resize(5);
    const Submitted all = submit(engine, step);
    for (size_t i = 0; i < all.requests.size(); ++i) {
      const hvd_status status = engine.wait(all.requests[i], kPatience);
      CHECK(status == (i < 5 ? HVD_OK : HVD_STALLED));
      if (i >= 5) CHECK(all.requests[i]->error.find("waits for rank 1 for") != std::string::npos);
    }
    // Nobody leaves before the others have heard.
    for (++ended; ended < group.size();) std::this_thread::yield();
  });
}

TEST_CASE("who waits in a sequence for a rank that has left hears of it") {
  const RankGroup group(2);
  std::atomic<bool> submitted{false};
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    begin(engine);
    Step half;
    half.names.resize(kTensors / 2);
    if (rank == 1) {
      while (!submitted) std::this_thread::yield();
      return run(engine, half);
    }
    const Submitted all = submit(engine, {});
    submitted = true;
    for (int i = 0; i < kTensors; ++i) {
      CHECK(engine.wait(all.requests[static_cast<size_t>(i)], kPatience) ==
            (i < kTensors / 2 ? HVD_OK : HVD_SHUT_DOWN));
    }
  });
}
