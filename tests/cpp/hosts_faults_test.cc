// What several hosts must survive: ranks that leave in the middle, hosts that fall silent, connections that break.
#include <doctest/doctest.h>
#include <linux/filter.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <latch>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

// Swallows what comes to a socket in packets with more than so many bytes, TCP's header among them.
void swallow(int fd, uint32_t above) {
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0), BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, above, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, 0), BPF_STMT(BPF_RET | BPF_K, 0xffffffff)};
  const sock_fprog filter{std::size(program), program};
  REQUIRE(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0);
}

// The sockets of a rank: those of its links, by rank, and after them those of its control connections, by host.
std::vector<int> sockets_of(const Engine& engine) {
  std::vector<int> sockets;
  for (const int fd : engine.descriptors()) {
    int protocol = 0;
    socklen_t length = sizeof protocol;
    if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) == 0 && protocol == IPPROTO_TCP)
      sockets.push_back(fd);
  }
  return sockets;
}

}  // namespace

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

TEST_CASE("a heartbeat may be given any time, however long") {
  for (const double timeout : {1e10, 1e12, 1e300}) {
    const RankGroup group({2, 1});
    Settings settings;
    settings.heartbeat_timeout = timeout;
    on_all_ranks(group, settings, [&](int, Engine& engine) {
      for (int i = 0; i < 3; ++i) {
        std::vector<float> data(10, 1);
        const auto request = sum_request("x", data);
        CHECK_MESSAGE(try_to_run(engine, request) == HVD_OK, request->error);
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
      }
      for (const int fd : sockets_of(engine)) {
        int idle = 0;
        socklen_t length = sizeof idle;
        REQUIRE(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &length) == 0);
        CHECK(idle == 3600);
      }
    });
  }
}

TEST_CASE("ranks that have given up on each other are both named") {
  const RankGroup group({1, 1, 1});
  std::latch told(1);
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    if (rank != 0) return told.wait();
    // As if they had said so, both at once.
    Segment& segment = group.segment();
    for (const int gone : {1, 2}) {
      segment.departure(gone).cause.store(static_cast<uint64_t>(3 - gone));
      segment.departure(gone).state.store(kBroken);
    }
    segment.coordinator().departures.fetch_add(1);
    std::vector<float> data(10, 1);
    const auto request = sum_request("x", data);
    CHECK(try_to_run(engine, request) == HVD_PEER_LOST);
    for (const char* const part : {"rank 1 (", "on host test1", "rank 2 (", "on host test2", "is the network"}) {
      CHECK_MESSAGE(request->error.find(part) != std::string::npos, request->error);
    }
    told.count_down();
  });
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

TEST_CASE("who waits for bytes that the network swallows is told, also if nobody else waits for that") {
  // Nothing gets through, or only what is small: then it looks as if all were well.
  for (const uint32_t above : {0, 600}) {
    CAPTURE(above);
    const RankGroup group({1, 1, 1});
    Settings settings;
    settings.heartbeat_timeout = 1;
    std::barrier all_there(3);
    on_all_ranks(group, settings, [&](int rank, Engine& engine) {
      std::vector<float> data(50'000, static_cast<float>(rank));
      const auto broadcast = [&](const std::string& name) {
        auto request = request_of(HVD_BROADCAST, name);
        request->meta.dtype = HVD_FLOAT32;
        request->meta.root = 1;
        request->meta.shape = {static_cast<int64_t>(data.size())};
        request->input = request->output = data.data();
        return request;
      };
      for (int i = 0; i < 10; ++i) REQUIRE(engine.run(broadcast("before"), kPatience) == HVD_OK);
      if (rank == 2) swallow(sockets_of(engine)[1], above);
      all_there.arrive_and_wait();
      const auto start = std::chrono::steady_clock::now();
      const auto lost = broadcast("lost");
      const hvd_status status = try_to_run(engine, lost);
      if (rank == 2) CHECK(status == HVD_PEER_LOST);
      if (rank == 2) CHECK(lost->error.find("the connection with rank 1") != std::string::npos);
      // The root is done as soon as its kernel has the bytes, and goes on.
      std::vector<float> more(10, 1);
      const auto after = sum_request("after", more);
      CHECK_MESSAGE(try_to_run(engine, after) == HVD_PEER_LOST, after->error);
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    });
  }
}

TEST_CASE("the last bytes of a rank that leaves reach the others over a slow network") {
  const RankGroup group({1, 1});
  std::barrier both_there(2);
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    constexpr size_t kCount = 750'000;
    std::vector<float> data(kCount);
    for (int i = 0; i < 10; ++i) {
      const bool last = i == 9;
      std::fill(data.begin(), data.end(), static_cast<float>(rank == 1 ? i : -1));
      // It takes some seconds, of which the sender's kernel has most to itself.
      const uint32_t bytes_per_second = 1'000'000;
      if (last && rank == 1) {
        const int link = sockets_of(engine)[0];
        REQUIRE(setsockopt(link, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_second, sizeof bytes_per_second) == 0);
      }
      both_there.arrive_and_wait();
      auto request = request_of(HVD_BROADCAST, "x");
      request->meta.dtype = HVD_FLOAT32;
      request->meta.root = 1;
      request->meta.shape = {kCount};
      request->input = request->output = data.data();
      const hvd_status status = engine.run(request, kPatience);
      CHECK_MESSAGE(status == HVD_OK, request->error);
      CHECK(std::count(data.begin(), data.end(), static_cast<float>(i)) == kCount);
    }
  });
}

TEST_CASE("what a rank sends and then leaves is not waited for without end, and the network is suspected") {
  const RankGroup group({1, 1});
  Settings settings;
  settings.heartbeat_timeout = 1;
  std::barrier both_there(2);
  on_all_ranks(group, settings, [&](int rank, Engine& engine) {
    std::vector<float> data(50'000, 1);
    for (int i = 0; i < 10; ++i) {
      const bool last = i == 9;
      if (last && rank == 0) swallow(sockets_of(engine)[0], 600);
      both_there.arrive_and_wait();
      auto request = request_of(HVD_BROADCAST, "x");
      request->meta.dtype = HVD_FLOAT32;
      request->meta.root = 1;
      request->meta.shape = {static_cast<int64_t>(data.size())};
      request->input = request->output = data.data();
      const auto start = std::chrono::steady_clock::now();
      const hvd_status status = try_to_run(engine, request);
      CHECK((status == HVD_OK) == (!last || rank == 1));
      if (!last || rank == 1) continue;
      CHECK_MESSAGE(request->error.find("is the network to its host broken?") != std::string::npos, request->error);
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    }
  });
}

TEST_CASE("a path that swallows everything is given up also where neither end had room for more") {
  const auto [one, other] = tcp_pair();
  Counters counters;
  constexpr double kTimeout = 0.5;
  Network a({{}, {one}}, {{}, {}}, {"a", "b"}, kTimeout, counters);
  Network b({{other}, {}}, {{}, {}}, {"a", "b"}, kTimeout, counters);
  // Both write and read nothing until no more goes.
  const std::vector<std::byte> bytes(Link::kWindow);
  for (int lane = 0; lane < 5; ++lane) {
    a.link(1)->send(lane, bytes.data(), bytes.size());
    b.link(0)->send(lane, bytes.data(), bytes.size());
  }
  for (int i = 0; i < 100; ++i) {
    a.flush();
    b.flush();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  REQUIRE(a.blocked());
  REQUIRE(b.blocked());
  for (const int fd : {one, other}) {
    swallow(fd, 0);
    close(fd);
  }
  const Nanoseconds start = monotonic_now();
  for (Network* const network : {&a, &b}) {
    while (network->ended() == 0 && monotonic_now() - start < 10 * kSecond) {
      a.poll();
      b.poll();
      a.give_up_unconfirmed(monotonic_now());
      b.give_up_unconfirmed(monotonic_now());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(network->ended() == 1);
  }
}
