// The agreement protocol at its seams: interleavings that threads meet once in a million runs, played by hand against
// the coordinator alone, and engines in the states that only an unlucky moment brings about.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A coordinator without engines: the test is every rank, and decides when each of their steps is visible.
class HandPlayed {
 public:
  HandPlayed(int size, int cache_capacity) {
    const int fd = Segment::create(size, size, cache_capacity, 1, 42);
    segment_ = Segment::map(fd);
    close(fd);
    for (int i = 0; i < 2 * size; ++i) eventfds_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    const auto n = static_cast<size_t>(size);
    world_ = World::make(0, {"test"}, std::vector<int>(n), std::vector<int32_t>(n));
    doorbells_ = std::make_unique<Doorbells>(segment_, 0, eventfds_.data(), counters_);
    for (int r = 0; r < size; ++r) {
      requests_.emplace_back(segment_->request_lines(r).written, segment_->request_bytes(r),
                             Segment::kRequestRingBytes);
      logs_.emplace_back(segment_->log_lines().written, segment_->rank(r).log_read, segment_->log_bytes(),
                         Segment::kLogBytes);
    }
    const std::vector<int> none(n, -1);
    network_ = std::make_unique<Network>(std::vector<Connected>(n), std::vector<Connected>(1), world_.hosts,
                                         settings_.heartbeat_timeout, counters_);
    liveness_ = std::make_unique<Liveness>(world_, settings_, segment_, none.data(), *doorbells_, -1);
    hosts_ = std::make_unique<Hosts>(world_, settings_, segment_, *doorbells_, *liveness_, *network_);
    coordinator_ = std::make_unique<Coordinator>(world_, settings_, segment_, *doorbells_, counters_, *hosts_,
                                                 [](int) { return false; });
  }
  ~HandPlayed() {
    for (const int fd : eventfds_) close(fd);
  }

  Coordinator& coordinator() { return *coordinator_; }

  void all_submit(const std::string& name) {
    for (size_t r = 0; r < requests_.size(); ++r) {
      Submit message;
      message.key = {0, name};
      message.meta.dtype = HVD_FLOAT32;
      message.meta.shape = {1};
      message.wanted = true;
      REQUIRE(requests_[r].write(encode(message), segment_->request_lines(static_cast<int>(r)).read.load()));
    }
  }

  // Everybody arrives in the slot, by bit.
  void all_arrive(uint32_t id) {
    Slot& slot = segment_->slot(static_cast<int>(id));
    for (int r = 0; r < world_.size; ++r) {
      slot.present[r / 64].fetch_xor(uint64_t{1} << (r % 64));
      slot.arrived.fetch_add(1);
    }
    const uint64_t ticket = segment_->coordinator().ready_tail.fetch_add(1);
    ReadyCell& cell = segment_->ready_cell(ticket);
    cell.id = id;
    cell.sequence.store(ticket + 1);
  }

  // Every rank reads all of the log; returns what is new in it.
  std::vector<LogEntry> all_read_log() {
    std::vector<LogEntry> entries;
    for (size_t r = 0; r < logs_.size(); ++r) {
      while (logs_[r].next([&](BytesView bytes) {
        if (r == 0) entries.push_back(decode_log_entry(bytes));
      })) {
      }
    }
    return entries;
  }

 private:
  World world_;
  Settings settings_;
  Counters counters_;
  std::shared_ptr<Segment> segment_;
  std::vector<int> eventfds_;
  std::unique_ptr<Doorbells> doorbells_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Hosts> hosts_;
  std::vector<RingWriter> requests_;
  std::vector<RingReader> logs_;
  std::unique_ptr<Coordinator> coordinator_;
};

template <typename Entry>
std::vector<Entry> only(const std::vector<LogEntry>& entries) {
  std::vector<Entry> found;
  for (const LogEntry& entry : entries) {
    if (const auto* one = std::get_if<Entry>(&entry)) found.push_back(*one);
  }
  return found;
}

}  // namespace

TEST_CASE("an arrival in a slot whose id was withdrawn and given to another name does not run that name") {
  HandPlayed ranks(2, 1);
  ranks.all_submit("a");
  ranks.coordinator().poll();
  const auto defined = only<Define>(ranks.all_read_log());
  REQUIRE(defined.size() == 1);
  const uint32_t id = defined[0].id;

  ranks.all_submit("b");  // for which "a" must make room
  ranks.coordinator().poll();
  ranks.all_arrive(id);  // "a" once more: nobody has read the Evict yet
  CHECK(only<Evict>(ranks.all_read_log()).front().id == id);
  ranks.coordinator().poll();
  CHECK(ranks.all_read_log().empty());  // the arrival counts for nothing, and the id is free
  ranks.all_submit("a");                // what the Evict asks for
  ranks.coordinator().poll();

  std::vector<uint32_t> run;
  for (const Run& entry : only<Run>(ranks.all_read_log())) run.insert(run.end(), entry.ids.begin(), entry.ids.end());
  REQUIRE(run.size() == 1);
  CHECK(run[0] == id);
}

TEST_CASE("names that wait for an id are looked after until the log's readers have freed one") {
  HandPlayed ranks(2, 0);
  for (uint32_t i = 0; i <= Coordinator::kUncachedIds; ++i) ranks.all_submit("x" + std::to_string(i));
  ranks.coordinator().poll();
  // All but one have their id. Nothing will ring when the readers have read that these are free again.
  CHECK(ranks.coordinator().ticking());
  CHECK(only<Define>(ranks.all_read_log()).size() == Coordinator::kUncachedIds);
  ranks.coordinator().poll();
  const auto late = only<Define>(ranks.all_read_log());
  REQUIRE(late.size() == 1);
  CHECK(late[0].key.name == "x" + std::to_string(Coordinator::kUncachedIds));
  CHECK(!ranks.coordinator().ticking());
}

TEST_CASE("a damaged log ends everything that is pending, also what it already had put into a batch") {
  const RankGroup group(2);
  const auto engine = group.make_engine(1);
  RingWriter log(group.segment().log_lines().written, group.segment().log_bytes(), Segment::kLogBytes);
  std::vector<float> data(1);
  const auto request = sum_request("x", data);
  engine->submit(request);
  REQUIRE(log.write(encode(Define{0, request->key, request->meta}), 0));
  REQUIRE(log.write(encode(Run{{0, 77}}), 0));  // nothing defines 77
  CHECK(engine->wait(request, 3 * kSecond) == HVD_SYSTEM);
}

TEST_CASE("a wait ends when its time is over, although data moves all the while") {
  const RankGroup group(1);
  const auto engine = group.make_engine(0);
  std::vector<float> data(32 << 20, 1);
  const auto request = sum_request("x", data);
  CHECK(engine->run(request, kSecond / 1000) == HVD_PENDING);
  CHECK(engine->wait(request, kPatience) == HVD_OK);
}

TEST_CASE("an error names the rank that began it, however many gave up because of it and of each other") {
  const RankGroup group(4);
  const auto engine = group.make_engine(0);
  std::vector<float> data(1);
  const auto request = sum_request("x", data);
  engine->submit(request);
  // Rank 3 is silent. Rank 2 gave up because of it, rank 1 because of rank 2.
  group.segment().rank(2).cause.store(3);
  group.segment().rank(2).state.store(kBroken);
  group.segment().rank(1).cause.store(2);
  group.segment().rank(1).state.store(kBroken);
  CHECK(engine->wait(request, kPatience) == HVD_PEER_LOST);
  CHECK_MESSAGE(request->error.find("because rank 3 (pid") != std::string::npos, request->error);
}

TEST_CASE("a rank that breaks down because of one that broke down tells its peers where it began") {
  const RankGroup group(3);
  {
    const auto engine = group.make_engine(0);
    std::vector<float> data(1);
    const auto request = sum_request("x", data);
    engine->submit(request);
    group.segment().rank(1).cause.store(2);
    group.segment().rank(1).state.store(kBroken);
    CHECK(engine->wait(request, kPatience) == HVD_PEER_LOST);
  }
  CHECK(group.segment().rank(0).state.load() == kBroken);
  CHECK(group.segment().rank(0).cause.load() == 2);
}

TEST_CASE("a rank that was given up on is told so, though nobody has shut down") {
  const RankGroup group(3);
  std::atomic<int> failed{0}, left{3};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      const auto engine = group.make_engine(r);
      std::vector<float> data(1, 1);
      CHECK(engine->run(sum_request("ok", data), kPatience) == HVD_OK);
      // Rank 2 was stopped for so long that the others gave it up. Now it continues.
      if (r == 2) group.declare_dead(2);
      while (r == 2 && failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      hvd_status status = HVD_PENDING;
      try {
        status = engine->run(sum_request(r == 2 ? "late" : "lost", data), 3 * kSecond);
      } catch (const Error& error) {
        status = error.status;
      }
      CHECK(status == HVD_PEER_LOST);
      ++failed;
      --left;
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("a rank that only moves data in the background still shows its heartbeat") {
  // Set 1 has rank 0 alone, so that its batches never wait for anybody.
  const RankGroup group(2, {{0}});
  Settings settings;
  settings.heartbeat_timeout = 0.5;
  std::thread other([&] {
    const auto engine = group.make_engine(1, settings);
    std::vector<float> data(1, 1);
    const auto request = sum_request("x", data);
    CHECK(engine->run(request, kPatience) == HVD_OK);
    CHECK(request->error == "");
  });
  {
    const auto engine = group.make_engine(0, settings);
    std::vector<float> large(16 << 20, 1), data(1, 1);
    std::vector<std::shared_ptr<Request>> requests;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; seconds_since(start) < 1.5; ++i) {
      requests.push_back(sum_request("large" + std::to_string(i), large, 1));
      engine->submit(requests.back());
      // Keeps two of them in flight, without waiting: that would take the work from the background thread.
      while (requests.size() > 2 && requests[requests.size() - 2]->status.load() == HVD_PENDING) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
    for (const auto& request : requests) engine->wait(request, kPatience);
    const auto request = sum_request("x", data);
    hvd_status status = HVD_PENDING;
    try {
      status = engine->run(request, kPatience);
    } catch (const Error& error) {
      status = error.status;
    }
    CHECK(status == HVD_OK);
    other.join();
  }
}

TEST_CASE("a full request ring is emptied although a thread of this rank sleeps in a wait") {
  const RankGroup group(2);
  const auto other = group.make_engine(0);
  const auto engine = group.make_engine(1);
  std::vector<float> never(1), data(1);
  const auto pending = sum_request("never", never);
  engine->submit(pending);
  std::thread waiter([&] { engine->wait(pending, 3 * kSecond); });
  while (engine->counters().sleeps.get() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has the role and is asleep
  // More than fits into the ring at once.
  std::vector<std::shared_ptr<Request>> requests;
  const std::string prefix(4000, 'x');
  for (int i = 0; i < 100; ++i) {
    requests.push_back(sum_request(prefix + std::to_string(i), data));
    engine->submit(requests.back());
  }
  const auto start = std::chrono::steady_clock::now();
  uint64_t written = 0;
  while (seconds_since(start) < 2 && written < 100 * 4000) {
    written = group.segment().request_lines(1).read.load();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(seconds_since(start) < 0.5);
  engine->shutdown();
  waiter.join();
}
