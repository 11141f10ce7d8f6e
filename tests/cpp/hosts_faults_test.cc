// What several hosts must survive: ranks that leave in the middle, hosts that fall silent, connections that break.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

TEST_CASE("after shutdown in the middle of an operation nothing touches the caller's memory any more") {
  constexpr size_t kRows = 8 << 20;
  for (const int leaver : {0, 1}) {
    const RankGroup group({1, 1});
    on_all_ranks(group, {}, [leaver](int rank, Engine& engine) {
      std::vector<uint8_t> input(2 * kRows, static_cast<uint8_t>(rank)), output(2 * kRows, 7);
      auto request = std::make_shared<Request>();
      request->key = {0, "a"};
      request->meta.op = HVD_ALLTOALL;
      request->meta.dtype = HVD_UINT8;
      request->meta.shape = {kAnyRows};
      request->rows = 2 * kRows;
      request->input = input.data();
      request->context = output.data();
      request->allocate = [](void* context, int32_t, const int64_t*) { return context; };
      engine.submit(request, true);
      if (rank != leaver) {
        const hvd_status status = engine.wait(request, kPatience);
        CHECK((status == HVD_OK || status == HVD_SHUT_DOWN || status == HVD_PEER_LOST));
        return;
      }
      // The first bytes are there: somebody is in the middle of it.
      while (engine.counters().net_payload_out.get() < 1000) std::this_thread::yield();
      std::atomic<bool> ended{false};
      std::thread waiter([&] {
        (void)engine.wait(request, kPatience);
        std::fill(output.begin(), output.end(), 9);
        ended = true;
      });
      engine.shutdown();
      waiter.join();
      if (request->status.load() != HVD_OK) CHECK(std::count(output.begin(), output.end(), 9) == 2 * kRows);
    });
  }
}

TEST_CASE("a rank whose job has failed sleeps, although its connections have ended") {
  const RankGroup group({1, 1, 1});
  std::atomic<bool> done{false};
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    std::vector<float> data(10, 1);
    REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
    if (rank == 2) return;
    const auto request = sum_request("y", data);
    CHECK(try_to_run(engine, request) == HVD_SHUT_DOWN);
    if (rank == 1) {
      while (!done) std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const uint64_t before = engine.counters().sleeps.get();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(engine.counters().sleeps.get() - before < 50);
    done = true;
  });
}

TEST_CASE("hosts that wait for each other for long hear each other's heartbeat") {
  for (const int cores : {0, 8}) {  // crowded, and not
    const RankGroup group({1, 1, 2}, {}, 1024, cores);
    Settings settings;
    settings.heartbeat_timeout = 2;
    on_all_ranks(group, settings, [&](int rank, Engine& engine) {
      for (int late = 0; late < group.size(); ++late) {
        std::vector<float> data(10, 1);
        if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        const auto request = sum_request("x", data);
        const hvd_status status = try_to_run(engine, request);
        CHECK_MESSAGE(status == HVD_OK, request->error);
        if (status != HVD_OK) return;
      }
    });
  }
}

TEST_CASE("a rank that leaves is said to have left, by whichever way the news comes first") {
  for (int round = 0; round < 40; ++round) {
    const int leaver = round % 4;
    const RankGroup group(HostOf{{0, 1, 2, 1}});
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      std::vector<float> data(10, 1);
      REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
      if (rank == leaver) return;
      const auto request = sum_request("y", data);
      CHECK(try_to_run(engine, request) == HVD_SHUT_DOWN);
      CHECK_MESSAGE(request->error.find("has called shutdown() or exited") != std::string::npos, request->error);
    });
  }
}

TEST_CASE("a host that idles is heard by one that works") {
  for (const int cores : {0, 8}) {  // crowded, and not
    const RankGroup group({2, 2}, {{0, 1}}, 1024, cores);
    Settings settings;
    settings.heartbeat_timeout = 2;
    on_all_ranks(group, settings, [&](int rank, Engine& engine) {
      const auto start = std::chrono::steady_clock::now();
      // They go on as long as both have time.
      for (std::vector<float> data = {2}; rank < 2 && data[0] == 2;) {
        data[0] = std::chrono::steady_clock::now() - start < std::chrono::seconds(6) ? 1 : 0;
        const auto request = sum_request("busy", data, 1);
        const hvd_status status = try_to_run(engine, request);
        CHECK_MESSAGE(status == HVD_OK, request->error);
      }
      std::vector<float> data(10, 1);
      const auto request = sum_request("x", data);
      const hvd_status status = try_to_run(engine, request);
      CHECK_MESSAGE(status == HVD_OK, request->error);
    });
  }
}

TEST_CASE("the last bytes of a rank that leaves reach one that was busy for a while") {
  for (const int64_t megabytes : {1, 2, 9}) {
    const RankGroup group({1, 1});
    on_all_ranks(group, {}, [megabytes](int rank, Engine& engine) {
      const std::vector<uint8_t> input(rank == 0 ? static_cast<size_t>(megabytes) << 20 : 0, 5);
      std::vector<uint8_t> output(static_cast<size_t>(megabytes) << 20);
      auto request = std::make_shared<Request>();
      request->key = {0, "g"};
      request->meta.op = HVD_ALLGATHER;
      request->meta.dtype = HVD_UINT8;
      request->meta.shape = {kAnyRows};
      request->rows = static_cast<int64_t>(input.size());
      request->input = input.data();
      request->context = output.data();
      request->allocate = [](void* context, int32_t, const int64_t*) { return context; };
      if (rank == 1) {
        request->allocate = [](void* context, int32_t, const int64_t*) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
          return context;
        };
      }
      REQUIRE(engine.run(request, kPatience) == HVD_OK);
      CHECK(std::count(output.begin(), output.end(), 5) == megabytes << 20);
    });
  }
}
