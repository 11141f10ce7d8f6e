// The engine's promises, with ranks as threads over the real shared-memory code.
#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

TEST_CASE("a sum reaches every rank, for one to seven ranks and sizes around every threshold") {
  for (const auto& [size, cores] : {std::pair(1, 1), {2, 1}, {2, 2}, {3, 2}, {3, 3}, {4, 2}, {4, 4}, {7, 2}, {7, 7}}) {
    const RankGroup group(size, {}, 1024, cores);
    on_all_ranks(group, {}, [size = size](int rank, Engine& engine) {
      for (const size_t n : {0ul, 1ul, 28ul, 29ul, 8192ul, 8193ul, 65536ul, 65537ul, 300000ul}) {
        std::vector<float> data(n);
        for (size_t i = 0; i < n; ++i) data[i] = static_cast<float>(rank + static_cast<int>(i % 1000));
        CHECK(engine.run(sum_request("x" + std::to_string(n), data), kPatience) == HVD_OK);
        bool right = true;
        for (size_t i = 0; i < n; ++i) {
          right &= data[i] == static_cast<float>(size * (size - 1) / 2 + size * static_cast<int>(i % 1000));
        }
        CHECK(right);
      }
    });
  }
}

TEST_CASE("a sum reaches every rank of every host, by each algorithm, with the same bits") {
  for (const HostOf& hosts : kLayouts) {
    for (const bool ring : {false, true}) {
      const RankGroup group(hosts);
      const int size = group.size();
      Settings settings;
      settings.allreduce_ring = ring;
      std::vector<std::vector<float>> inexact(static_cast<size_t>(size));
      on_all_ranks(group, settings, [&](int rank, Engine& engine) {
        for (const size_t n : {0ul, 1ul, 28ul, 29ul, 8192ul, 8193ul, 65537ul, 300000ul, 1000003ul}) {
          std::vector<float> data(n);
          for (size_t i = 0; i < n; ++i) data[i] = static_cast<float>(rank + static_cast<int>(i % 1000));
          CHECK(engine.run(sum_request("x" + std::to_string(n), data), kPatience) == HVD_OK);
          bool right = true;
          for (size_t i = 0; i < n; ++i) {
            right &= data[i] == static_cast<float>(size * (size - 1) / 2 + size * static_cast<int>(i % 1000));
          }
          CHECK(right);
        }
        std::vector<float>& data = inexact[static_cast<size_t>(rank)];
        for (size_t i = 0; i < 70000; ++i)
          data.push_back(1.0f / static_cast<float>(rank + 3 + static_cast<int>(i % 77)));
        CHECK(engine.run(sum_request("y", data), kPatience) == HVD_OK);
      });
      for (const auto& data : inexact) CHECK(data == inexact[0]);
    }
  }
}

TEST_CASE("tensors from hvd_alloc are reduced where they lie; mixed with others they are copied") {
  for (const int size : {2, 3, 5}) {
    for (const bool everywhere : {true, false}) {
      const RankGroup group(size);
      on_all_ranks(group, {}, [&](int rank, Engine& engine) {
        constexpr size_t kCount = 700001;
        std::vector<float> own(kCount);
        const bool placed = everywhere || rank == 0;
        auto* shared = placed ? static_cast<float*>(Arena::of_process().allocate(kCount * sizeof(float))) : own.data();
        for (int round = 0; round < 3; ++round) {
          for (size_t i = 0; i < kCount; ++i) shared[i] = static_cast<float>(rank + static_cast<int>(i % 100));
          const auto request = sum_request("x", own);
          request->input = request->output = shared;
          CHECK(engine.run(request, kPatience) == HVD_OK);
          bool right = true;
          for (size_t i = 0; i < kCount; ++i) {
            right &= shared[i] == static_cast<float>(size * (size - 1) / 2 + size * static_cast<int>(i % 100));
          }
          CHECK(right);
        }
        CHECK(engine.counters().bytes_placed.get() == (everywhere ? 3 * kCount * sizeof(float) : 0));
        if (placed) Arena::of_process().free(shared);
      });
    }
  }
}

TEST_CASE("a repeated name is agreed on by bits, without messages") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int, Engine& engine) {
    std::vector<float> data(4);
    for (int i = 0; i < 100; ++i) CHECK(engine.run(sum_request("x", data), kPatience) == HVD_OK);
    CHECK(engine.counters().request_messages.get() == 1);
    CHECK(engine.counters().requests_by_bit.get() == 99);
    CHECK(engine.counters().batches.get() == 100);
  });
}

TEST_CASE("names submitted together are fused, and the threshold bounds a batch") {
  const RankGroup group(2);
  Settings settings;
  settings.fusion_threshold = 64 * sizeof(float);
  on_all_ranks(group, settings, [](int, Engine& engine) {
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<float>> data(40, std::vector<float>(16, 1));
      std::vector<std::shared_ptr<Request>> requests;
      for (size_t i = 0; i < data.size(); ++i) {
        requests.push_back(sum_request("x" + std::to_string(i), data[i]));
        engine.submit(requests.back());
      }
      for (const auto& request : requests) CHECK(engine.wait(request, kPatience) == HVD_OK);
      for (const auto& tensor : data) CHECK(tensor[15] == 2);
    }
    // 40 tensors of 16 floats, 4 to a batch: at least 10 batches a step, and fusion must have happened.
    CHECK(engine.counters().tensors.get() == 120);
    CHECK(engine.counters().batches.get() >= 30);
    CHECK(engine.counters().batches.get() < 120);
  });
}

TEST_CASE("changed metadata withdraws the cached id; a difference is an error on all ranks and the job goes on") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    for (const size_t n : {4ul, 4ul, 5ul, 5ul, 4ul}) {
      std::vector<float> data(n, 1);
      CHECK(engine.run(sum_request("x", data), kPatience) == HVD_OK);
      CHECK(data[n - 1] == 3);
    }
    std::vector<float> odd(rank == 1 ? 6 : 4, 1);
    const auto request = sum_request("x", odd);
    CHECK(engine.run(request, kPatience) == HVD_MISMATCH);
    CHECK(
        request->error.find("Mismatched ALLREDUCE tensor shapes for tensor 'x': ranks 0, 2 have shape [4]; rank 1 has "
                            "shape [6]") == 0);
    std::vector<float> data(4, 1);
    CHECK(engine.run(sum_request("x", data), kPatience) == HVD_OK);
    CHECK(data[0] == 3);
  });
}

TEST_CASE("more names than the cache holds, and no cache at all") {
  for (const int capacity : {0, 1, 8}) {
    const RankGroup group(2, {}, capacity);
    on_all_ranks(group, {}, [](int, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 2000; ++i) {
          std::vector<float> data(1, 1);
          CHECK(engine.run(sum_request("x" + std::to_string(i), data), kPatience) == HVD_OK);
          CHECK(data[0] == 2);
        }
      }
    });
  }
}

TEST_CASE("a barrier overtakes a pending named operation") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    std::vector<float> data(1, 1);
    const auto pending = sum_request("late", data);
    if (rank == 0) engine.submit(pending);
    const auto barrier = std::make_shared<Request>();
    barrier->key = {0, "barrier.noname"};
    barrier->meta.op = HVD_BARRIER;
    CHECK(engine.run(barrier, kPatience) == HVD_OK);
    if (rank == 1) engine.submit(pending);
    CHECK(engine.wait(pending, kPatience) == HVD_OK);
    CHECK(data[0] == 2);
  });
}

TEST_CASE("callbacks run, also when one blocks until another has run") {
  const RankGroup group(1);
  on_all_ranks(group, {}, [](int, Engine& engine) {
    static std::promise<void> second;
    static std::promise<void> first;
    second = {};
    first = {};
    std::vector<float> a(1), b(1);
    const auto blocks = sum_request("a", a), releases = sum_request("b", b);
    blocks->callback = [](void*, hvd_status, const char*) {
      second.get_future().wait();
      first.set_value();
    };
    releases->callback = [](void*, hvd_status, const char*) { second.set_value(); };
    engine.submit(blocks);
    engine.submit(releases);
    CHECK(first.get_future().wait_for(std::chrono::seconds(30)) == std::future_status::ready);
  });
}

TEST_CASE("a dead peer fails what waits for it, by name") {
  const RankGroup group(3);
  std::atomic<int> waiting{0};
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    std::vector<float> data(1, 1);
    CHECK(engine.run(sum_request("ok", data), kPatience) == HVD_OK);
    if (rank == 2) {
      while (waiting < 2) std::this_thread::yield();
      group.declare_dead(2);
      while (waiting < 4) std::this_thread::yield();
      return;
    }
    const auto request = sum_request("lost", data);
    engine.submit(request);
    ++waiting;
    CHECK(engine.wait(request, kPatience) == HVD_PEER_LOST);
    CHECK(request->error.find("because rank 2 (pid") != std::string::npos);
    CHECK(request->error.find("'lost'") != std::string::npos);
    CHECK_THROWS_AS(engine.submit(sum_request("after", data)), Error);
    ++waiting;
  });
}

TEST_CASE("a rank may shut down as soon as its own operations have ended") {
  for (int round = 0; round < 50; ++round) {
    const RankGroup group(3);
    on_all_ranks(group, {}, [](int rank, Engine& engine) {
      std::vector<float> data(100000, static_cast<float>(rank));
      CHECK(engine.run(sum_request("x", data), kPatience) == HVD_OK);
      CHECK(data[99999] == 3);
      engine.shutdown();
    });
  }
}

TEST_CASE("a shut down peer fails pending operations with the shutdown error") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    if (rank == 1) return;
    std::vector<float> data(1, 1);
    const auto request = sum_request("x", data);
    hvd_status status = HVD_PENDING;
    try {
      status = engine.run(request, kPatience);
    } catch (const Error& error) {
      status = error.status;
    }
    CHECK(status == HVD_SHUT_DOWN);
  });
}

TEST_CASE("many threads of one rank wait at once") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int, Engine& engine) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&engine, t] {
        for (int i = 0; i < 200; ++i) {
          std::vector<float> data(10, 1);
          CHECK(engine.run(sum_request("t" + std::to_string(t), data), kPatience) == HVD_OK);
          CHECK(data[9] == 2);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}
