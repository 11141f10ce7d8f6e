// What several hosts add: bytes and messages between them, and what happens when one of them is gone.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

// The bytes that the ranks of each host have sent to other hosts.
std::vector<uint64_t> bytes_by_host(const RankGroup& group, const std::vector<uint64_t>& by_rank) {
  std::vector<uint64_t> sums;
  for (int r = 0; r < group.size(); ++r) {
    const auto host = static_cast<size_t>(group.make_world(r).host);
    sums.resize(std::max(sums.size(), host + 1));
    sums[host] += by_rank[static_cast<size_t>(r)];
  }
  return sums;
}

}  // namespace

TEST_CASE("an allreduce sends at most 2 (H - 1) / H of its bytes, and 5 percent, out of each host") {
  const std::vector<std::vector<int>> layouts = {{1, 1}, {2, 2}, {1, 3}, {1, 1, 1}, {2, 2, 2}, {1, 2, 1, 3}};
  for (const std::vector<int>& hosts : layouts) {
    for (const bool ring : {false, true}) {
      const RankGroup group(hosts);
      Settings settings;
      settings.allreduce_ring = ring;
      std::vector<uint64_t> sent(static_cast<size_t>(group.size()));
      constexpr size_t kCount = 3 << 20;
      on_all_ranks(group, settings, [&](int rank, Engine& engine) {
        std::vector<float> data(kCount, 1);
        const uint64_t before = engine.counters().net_bytes_out.get();
        REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
        sent[static_cast<size_t>(rank)] = engine.counters().net_bytes_out.get() - before;
      });
      const auto n = static_cast<double>(hosts.size());
      const double most = 2 * (n - 1) / n * kCount * sizeof(float) * 1.05;
      for (const uint64_t bytes : bytes_by_host(group, sent)) CHECK(static_cast<double>(bytes) <= most);
    }
  }
}

TEST_CASE("the bytes of an allgather enter each host once, those of a reducescatter leave it once") {
  const RankGroup group({2, 2});
  std::vector<uint64_t> gathered(4), scattered(4);
  constexpr int64_t kRows = 1 << 18;
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    const std::vector<float> data(kRows, 1);
    auto request = std::make_shared<Request>();
    request->key = {0, "g"};
    request->meta.op = HVD_ALLGATHER;
    request->meta.dtype = HVD_FLOAT32;
    request->meta.shape = {kAnyRows};
    request->rows = kRows;
    request->input = data.data();
    REQUIRE(engine.run(request, kPatience) == HVD_OK);
    gathered[static_cast<size_t>(rank)] = engine.counters().net_payload_out.get();

    std::vector<float> part(kRows / 4);
    request = std::make_shared<Request>();
    request->key = {0, "s"};
    request->meta.op = HVD_REDUCESCATTER;
    request->meta.dtype = HVD_FLOAT32;
    request->meta.shape = {kRows};
    request->input = data.data();
    request->output = part.data();
    REQUIRE(engine.run(request, kPatience) == HVD_OK);
    scattered[static_cast<size_t>(rank)] =
        engine.counters().net_payload_out.get() - gathered[static_cast<size_t>(rank)];
  });
  constexpr uint64_t kBytes = kRows * sizeof(float);
  for (const uint64_t bytes : bytes_by_host(group, gathered)) CHECK(bytes <= 2 * kBytes + 100);
  for (const uint64_t bytes : bytes_by_host(group, scattered)) CHECK(bytes == kBytes / 2);
}

TEST_CASE("a repeated step costs messages by hosts, not by ranks and tensors") {
  const RankGroup group({3, 3});
  std::vector<uint64_t> records(6);
  constexpr int kTensors = 100, kSteps = 20;
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    std::vector<std::vector<float>> data(kTensors, std::vector<float>(10, 1));
    uint64_t before = 0;
    for (int step = 0; step < kSteps + 2; ++step) {
      if (step == 2) before = engine.counters().control_records.get();
      std::vector<std::shared_ptr<Request>> requests;
      for (int t = 0; t < kTensors; ++t) {
        requests.push_back(sum_request("x" + std::to_string(t), data[static_cast<size_t>(t)]));
        engine.submit(requests.back());
      }
      for (const auto& request : requests) REQUIRE(engine.wait(request, kPatience) == HVD_OK);
    }
    records[static_cast<size_t>(rank)] = engine.counters().control_records.get() - before;
  });
  for (int r = 0; r < 6; ++r) {
    // Only those who speak for a host send any: far fewer than tensors, let alone tensors times ranks.
    CHECK(records[static_cast<size_t>(r)] <= (r % 3 == 0 ? kSteps * kTensors / 2 : 0));
  }
}

TEST_CASE("a rank that dies on another host is named on every rank, also where nobody was connected to it yet") {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{2, 2}, {1, 1, 2}}) {
    for (const int victim : {0, 1, 2, 3}) {
      const RankGroup group(hosts);
      std::atomic<int> ready{0};
      on_all_ranks(group, {}, [&](int rank, Engine& engine) {
        std::vector<float> data(10, 1);
        REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
        ++ready;
        if (rank == victim) {
          while (ready < 4) std::this_thread::yield();
          return;  // leaves in order
        }
        const auto request = sum_request("y", data);
        hvd_status status = HVD_PENDING;
        try {
          status = engine.run(request, kPatience);
        } catch (const Error& error) {
          status = error.status;
          request->error = error.what();
        }
        CHECK(status == HVD_SHUT_DOWN);
        CHECK(request->error.find("rank " + std::to_string(victim) + " (pid") != std::string::npos);
      });
    }
  }
}

TEST_CASE("a stall on several hosts names all who are missing and all who are there") {
  const RankGroup group({2, 2, 1}, {{1, 2, 3}});
  Settings settings;
  settings.stall_warning = 0;
  settings.stall_shutdown = 1;
  on_all_ranks(group, settings, [&](int rank, Engine& engine) {
    std::vector<float> data(10, 1);
    for (int round = 0; round < 2; ++round) REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
    std::string text;
    if (rank == 0 || rank == 4) {
      const auto request = sum_request("x", data);
      CHECK(engine.run(request, kPatience) == HVD_STALLED);
      text = request->error;
    }
    // The others are busy with something else: one of the first host, and all of the second.
    for (hvd_status status = HVD_OK; text.empty();) {
      const auto request = sum_request("y", data, 1);
      try {
        status = engine.run(request, kPatience);
        if (status != HVD_OK) text = request->error;
      } catch (const Error& error) {
        status = error.status;
        text = error.what();
      }
      CHECK((status == HVD_OK || status == HVD_STALLED || status == HVD_SHUT_DOWN));
      if (status == HVD_SHUT_DOWN) return;  // somebody was quicker to leave
    }
    CHECK(text.find("tensor 'x' waits for ranks 1, 2, 3 for ") != std::string::npos);
    CHECK(text.find(" s; submitted by ranks 0, 4") != std::string::npos);
  });
}
