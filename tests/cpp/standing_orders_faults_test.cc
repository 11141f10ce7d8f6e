// What operations under standing orders must survive: ranks that leave, stalls, a job that stops.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <numeric>
#include <thread>

#include "engine/standing_orders.h"
#include "standing_orders_cases.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

std::atomic<int> refusals{0};  // how many reservations of memory are to fail

}  // namespace

// In place of the C library's, for all of this program.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  int left = refusals;
  while (left > 0 && !refusals.compare_exchange_weak(left, left - 1)) {
  }
  if (left > 0) return ENOSPC;
  return syscall(SYS_fallocate, fd, 0, offset, bytes) == 0 ? 0 : errno;
}

namespace {

// Runs the body on ranks that stop after a stall of a second. Nobody leaves before the others have heard.
template <typename Body>
void on_ranks_that_stall(const RankGroup& group, Body body) {
  Settings settings;
  settings.stall_warning = 0;
  settings.stall_shutdown = 1;
  std::atomic<int> ended{0};
  on_all_ranks(group, settings, [&](int rank, Engine& engine) {
    body(rank, engine);
    for (++ended; ended < group.size();) std::this_thread::yield();
  });
}

}  // namespace

TEST_CASE("who waits under an order for a rank that has left hears of it, and gets what it had sent before") {
  const std::vector<Case> cases = with_counts({{1, 1}, {1, 1, 1}, {2}, {3}, {2, 1}, {2, 2}});
  for (int round = 0; round < 60; ++round) {
    const Case& each = cases[static_cast<size_t>(round) % cases.size()];
    const RankGroup group(each.hosts);
    const int n = group.size(), leaver = round / static_cast<int>(cases.size()) % n;
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      reduce(engine, "x", kEnough + round % 3, each.count);
      if (rank == leaver) return;
      std::vector<int64_t> data(each.count, 1);
      const auto request = sum_request("x", data);
      const hvd_status status = try_to_run(engine, request);
      // Of more than two, another one may have left because of it, and be heard first.
      CHECK((status == HVD_SHUT_DOWN || (n > 2 && status == HVD_PEER_LOST)));
      if (n == 2)
        CHECK_MESSAGE(request->error.find("rank " + std::to_string(leaver) + " (pid") != std::string::npos,
                      request->error);
    });
  }
}

TEST_CASE("a name for which a member has no memory is agreed on as ever, and does not stand again") {
  constexpr size_t kBeyondHead = 400;  // of a letter: the head's memory is always there
  for (const Case& each : std::vector<Case>{{hosts_with({2}), kBeyondHead},
                                            {hosts_with({2, 1}), kBeyondHead},
                                            {hosts_with({2, 2}), kOneChunk},
                                            {hosts_with({2, 2}), kByLane}}) {
    const RankGroup group(each.hosts);
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      reduce(engine, "before", 1);
      if (rank == 0) refusals = 1;
      reduce(engine, "before", 1);  // nobody goes on before that
      reduce(engine, "x", kEnough, each.count);
      CHECK(refusals == 0);
      CHECK(entries_during(engine, [&] { reduce(engine, "x", kEnough, each.count); }) >= kEnough);
      reduce(engine, "y", kEnough, each.count);
      CHECK(entries_during(engine, [&] { reduce(engine, "y", kEnough, each.count); }) == 0);
    });
  }
}

TEST_CASE("a stall under an order is told by the coordinator, with who is missing") {
  for (const Case& each : with_counts(kThreeRanks)) {
    on_ranks_that_stall(RankGroup(each.hosts), [count = each.count](int rank, Engine& engine) {
      reduce(engine, "x", kEnough, count);
      std::vector<int64_t> data(count, 1);
      const auto request = sum_request("x", data);
      if (rank != 1) {
        CHECK(engine.run(request, kPatience) == HVD_STALLED);
        CHECK_MESSAGE(request->error.find("tensor 'x' waits for rank 1 for ") != std::string::npos, request->error);
        CHECK_MESSAGE(request->error.find("submitted by ranks 0, 2") != std::string::npos, request->error);
      }
    });
  }
}

TEST_CASE("a job that stops for another reason fails what waits under an order") {
  for (const Case& each : with_counts(kTwoRanks)) {
    on_ranks_that_stall(RankGroup(each.hosts), [count = each.count](int rank, Engine& engine) {
      reduce(engine, "x", kEnough, count);
      reduce(engine, "y", kEnough, count);
      // Each waits for what the other one does not submit.
      std::vector<int64_t> data(count, 1);
      const auto request = sum_request(rank == 0 ? "x" : "y", data);
      CHECK(engine.run(request, kPatience) == HVD_STALLED);
    });
  }
}

TEST_CASE("a job that stops while large rounds follow each other fails one on every rank, and none hangs") {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}, {2, 2}}) {
    for (int time = 0; time < 2; ++time) {
      on_ranks_that_stall(RankGroup(hosts), [](int rank, Engine& engine) {
        std::vector<int64_t> alone(kSmall, 1);
        const auto stalled = sum_request("of rank 0", alone);
        if (rank == 0) engine.submit(stalled);
        hvd_status status = HVD_OK;
        while (status == HVD_OK) {
          std::vector<int64_t> data(kManyPieces, 1);
          const auto request = sum_request("x", data);
          status = try_to_run(engine, request);
          if (status == HVD_OK) REQUIRE(data.back() == engine.world().size);
        }
        CHECK(status == HVD_STALLED);
      });
    }
  }
}

TEST_CASE("who leaves in the middle of a large round ends it for all, and the others hear who it was") {
  constexpr size_t kCount = (4 << 20) / sizeof(int64_t);
  std::atomic<int> cut{0};
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}, {2, 2}}) {
    const int ranks = std::accumulate(hosts.begin(), hosts.end(), 0);
    for (int leaver = 0; leaver < ranks; ++leaver) {
      on_all_ranks(RankGroup(hosts), {}, [&](int rank, Engine& engine) {
        reduce(engine, "x", 6, kCount);
        std::vector<int64_t> data(kCount, 1);
        const auto request = sum_request("x", data);
        if (rank != leaver) {
          const hvd_status status = try_to_run(engine, request);
          if (status == HVD_OK) {  // its last bytes had been sent
            CHECK(data == std::vector<int64_t>(kCount, engine.world().size));
            return;
          }
          CHECK((status == HVD_SHUT_DOWN || status == HVD_PEER_LOST));  // between two frames, or in one
          // Of more than two, another one may have left because of it.
          if (ranks == 2) CHECK(request->error.find("rank " + std::to_string(leaver)) != std::string::npos);
          return;
        }
        const uint64_t before = engine.counters().net_payload_out.get();
        const uint64_t entries = entries_during(engine, [&] {
          engine.submit(request, true);
          // More than the letters: all have begun, and the lane is in use.
          while (engine.counters().net_payload_out.get() - before <= LetterBoxes::kMostBytes &&
                 request->status.load() == HVD_PENDING) {
            std::this_thread::yield();
          }
        });
        CHECK(entries == 0);
        engine.shutdown();
        if (request->status.load() != HVD_OK) ++cut;
      });
    }
  }
  CHECK(cut > 0);
}
