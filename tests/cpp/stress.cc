// Stress of agreement, batching and the driver's role: tiny tensors, three overlapping process sets besides the global
// one, random order on every rank, several threads a rank, names that come and go, a small cache.
//
//   stress threads   N  [seed [hosts]]   ranks are threads of this process (run under TSan), N operations per rank
//   stress processes N  [seed [hosts]]   ranks are processes
//   stress kill      N  [seed [hosts]]   ranks are processes and one of them is killed with SIGKILL at a random moment:
//                                every other rank must get an error that names it, within the bound
//
// hosts, such as 2,1,1: how many of the four ranks each host has, which are then connected by TCP.
// Prints what the engines counted, and a last line "N passed, N failed".
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

constexpr int kRanks = 4;
constexpr int kNamesPerSet = 12;
constexpr int kThreadsPerRank = 2;

const std::vector<std::vector<int>> kSets = {{0, 1}, {1, 2, 3}, {0, 2, 3}};

struct Outcome {
  uint64_t operations = 0;
  uint64_t wrong = 0;
  hvd_status status = HVD_OK;
  char error[512] = "";
};

int64_t value_of(int rank, int step, int name) { return (rank + 1) * 1000003LL + step * 101LL + name; }

// One thread of one rank: submits its own names of all sets of this rank in random order, waits in another.
void work(Engine& engine, const RankGroup& group, int thread, uint64_t operations, uint64_t seed, Outcome& outcome) {
  const int rank = engine.world().rank;
  std::mt19937_64 random(seed * 7919 + static_cast<uint64_t>(rank * kThreadsPerRank + thread));
  struct Item {
    int set, name;
    std::vector<int64_t> data;
    std::shared_ptr<Request> request;
  };
  for (int step = 0; outcome.operations < operations; ++step) {
    std::vector<Item> items;
    for (int set = 0; set < static_cast<int>(group.sets().size()); ++set) {
      const auto& ranks = group.sets()[static_cast<size_t>(set)];
      if (!std::binary_search(ranks.begin(), ranks.end(), rank)) continue;
      for (int name = 0; name < kNamesPerSet; ++name) items.push_back({set, name, {}, nullptr});
    }
    std::shuffle(items.begin(), items.end(), random);
    for (Item& item : items) {
      // Most names repeat; some are new in every step, some change their shape from time to time.
      const size_t n = item.name == 3 ? 1 + static_cast<size_t>(step / 5 % 3) : 1;
      item.data.assign(n, value_of(rank, step, item.name));
      std::string name = "t" + std::to_string(thread) + "." + std::to_string(item.name);
      if (item.name == 7) name += "." + std::to_string(step);
      item.request = sum_request(name, item.data, item.set);
      try {
        if (item.name == 5) {
          engine.submit(item.request);
          engine.wait(item.request, static_cast<int64_t>(random() % 1000));  // may well be too short
        } else {
          engine.submit(item.request);
        }
      } catch (const Error& error) {
        outcome.status = error.status;
        std::snprintf(outcome.error, sizeof outcome.error, "%s", error.what());
        // What was submitted must still end before its memory goes.
        for (Item& earlier : items) {
          if (earlier.request && &earlier != &item) engine.wait(earlier.request, kPatience);
        }
        return;
      }
    }
    std::shuffle(items.begin(), items.end(), random);
    for (Item& item : items) {
      const hvd_status status = engine.wait(item.request, kPatience);
      if (status != HVD_OK) {
        outcome.status = status;
        std::snprintf(outcome.error, sizeof outcome.error, "%s", item.request->error.c_str());
        continue;
      }
      int64_t expected = 0;
      for (const int r : group.sets()[static_cast<size_t>(item.set)]) expected += value_of(r, step, item.name);
      for (const int64_t value : item.data) outcome.wrong += value != expected;
      ++outcome.operations;
    }
    if (outcome.status != HVD_OK) return;
  }
}

Outcome run_rank(const RankGroup& group, Engine& engine, uint64_t operations, uint64_t seed) {
  std::vector<Outcome> outcomes(kThreadsPerRank);
  std::vector<std::thread> threads;
  // Both threads of all ranks do the same number of steps: the number of operations depends on the sets of a rank.
  uint64_t sets = 0;
  for (const auto& ranks : group.sets()) sets += std::binary_search(ranks.begin(), ranks.end(), engine.world().rank);
  const uint64_t steps = operations / kThreadsPerRank / (kNamesPerSet * group.sets().size()) + 1;
  for (int t = 0; t < kThreadsPerRank; ++t) {
    threads.emplace_back(
        [&, t] { work(engine, group, t, steps * sets * kNamesPerSet, seed, outcomes[static_cast<size_t>(t)]); });
  }
  for (std::thread& thread : threads) thread.join();
  // Who leaves ends the job for all, also for sets without it: so nobody leaves before everyone is done.
  const auto barrier = std::make_shared<Request>();
  barrier->key.name = "barrier.noname";
  barrier->meta.op = HVD_BARRIER;
  try {
    engine.run(barrier, kPatience);
  } catch (const Error&) {
    // A rank was killed, which the outcomes say.
  }
  Outcome sum = outcomes[0];
  for (int t = 1; t < kThreadsPerRank; ++t) {
    const Outcome& other = outcomes[static_cast<size_t>(t)];
    sum.operations += other.operations;
    sum.wrong += other.wrong;
    if (sum.status == HVD_OK) {
      sum.status = other.status;
      std::memcpy(sum.error, other.error, sizeof sum.error);
    }
  }
  return sum;
}

void report(const char* who, const Counters& c) {
  std::printf(
      "%s: %llu requests (%llu by bit, %llu messages), %llu batches, %llu doorbells, %llu sleeps, %llu role "
      "changes, %llu log bytes, %llu evictions\n",
      who, static_cast<unsigned long long>(c.requests_submitted.get()),
      static_cast<unsigned long long>(c.requests_by_bit.get()),
      static_cast<unsigned long long>(c.request_messages.get()), static_cast<unsigned long long>(c.batches.get()),
      static_cast<unsigned long long>(c.doorbells.get()), static_cast<unsigned long long>(c.sleeps.get()),
      static_cast<unsigned long long>(c.role_changes.get()), static_cast<unsigned long long>(c.log_bytes.get()),
      static_cast<unsigned long long>(c.cache_evictions.get()));
}

int finish(int passed, int failed) {
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

int run_threads(uint64_t operations, uint64_t seed, const std::vector<int>& hosts) {
  const RankGroup group(hosts, kSets, 64);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < kRanks; ++r) engines.push_back(group.make_engine(r));
  std::vector<Outcome> outcomes(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<size_t>(r);
      outcomes[i] = run_rank(group, *engines[i], operations, seed);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int failed = 0;
  for (int r = 0; r < kRanks; ++r) {
    const Outcome& outcome = outcomes[static_cast<size_t>(r)];
    report(("rank " + std::to_string(r)).c_str(), engines[static_cast<size_t>(r)]->counters());
    if (outcome.status == HVD_OK && outcome.wrong == 0) continue;
    ++failed;
    std::printf("rank %d: status %d, %llu wrong values, %s\n", r, outcome.status,
                static_cast<unsigned long long>(outcome.wrong), outcome.error);
  }
  return finish(kRanks - failed, failed);
}

int run_processes(uint64_t operations, uint64_t seed, bool kill_one, const std::vector<int>& hosts) {
  std::mt19937_64 random(seed);
  const int victim = kill_one ? static_cast<int>(random() % kRanks) : -1;
  RankGroup group(hosts, kSets, 64);
  struct Shared {
    Outcome outcomes[kRanks];
    std::atomic<int> go[kRanks];
    int32_t pids[kRanks];
  };
  auto* shared =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (int r = 0; r < kRanks; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);
      while (shared->go[r].load() == 0) usleep(100);
      group.become(r, {shared->pids, shared->pids + kRanks});
      Outcome outcome;
      {
        const auto engine = group.make_engine(r);
        outcome = run_rank(group, *engine, operations, seed);
        if (r == 0 && !kill_one) report("rank 0", engine->counters());
      }
      shared->outcomes[r] = outcome;
      std::fflush(stdout);
      _exit(0);
    }
    children.push_back(child);
    shared->pids[r] = child;
  }
  group.close_all_connections();
  for (int r = 0; r < kRanks; ++r) shared->go[r] = 1;
  std::chrono::steady_clock::time_point killed;
  if (kill_one) {
    usleep(static_cast<useconds_t>(1000 + random() % 100000));
    kill(children[static_cast<size_t>(victim)], SIGKILL);
    killed = std::chrono::steady_clock::now();
  }
  int failed = 0;
  for (int r = 0; r < kRanks; ++r) {
    int status = 0;
    waitpid(children[static_cast<size_t>(r)], &status, 0);
    if (r == victim) continue;
    const Outcome& outcome = shared->outcomes[r];
    const std::string expected = "rank " + std::to_string(victim) + " (pid";
    const bool right = kill_one
                           ? outcome.status == HVD_PEER_LOST && std::strstr(outcome.error, expected.c_str()) != nullptr
                           : outcome.status == HVD_OK;
    if (WIFEXITED(status) && right && outcome.wrong == 0) continue;
    ++failed;
    std::printf("rank %d: wait status %d, status %d, %llu operations, %llu wrong values, %s\n", r, status,
                outcome.status, static_cast<unsigned long long>(outcome.operations),
                static_cast<unsigned long long>(outcome.wrong), outcome.error);
  }
  if (kill_one) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - killed).count();
    std::printf("rank %d killed; all others had ended %.3f s later\n", victim, seconds);
    if (seconds > 10) ++failed;
  }
  return finish(kRanks - failed, failed);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s threads|processes|kill OPERATIONS [SEED [HOSTS]]\n", argv[0]);
    return 2;
  }
  const std::string mode = argv[1];
  const uint64_t operations = std::strtoull(argv[2], nullptr, 10);
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  std::vector<int> hosts;
  for (const char* text = argc > 4 ? argv[4] : "4"; *text != '\0';) {
    char* end = nullptr;
    hosts.push_back(static_cast<int>(std::strtol(text, &end, 10)));
    text = *end == ',' ? end + 1 : end;
  }
  if (std::accumulate(hosts.begin(), hosts.end(), 0) != kRanks) {
    std::fprintf(stderr, "the hosts must have %d ranks in all\n", kRanks);
    return 2;
  }
  if (mode == "threads") return run_threads(operations, seed, hosts);
  return run_processes(operations, seed, mode == "kill", hosts);
}
