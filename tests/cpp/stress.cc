// Stress of agreement, batching, the driver's role and the collectives: mostly tiny tensors, three overlapping process
// sets besides the global one, random order on every rank, several threads a rank, names that come and go, a small
// cache.
//
//   stress threads   N  [seed [hosts]]   ranks are threads of this process (run under TSan), N operations per rank
//   stress processes N  [seed [hosts]]   ranks are processes
//   stress kill      N  [seed [hosts]]   ranks are processes and one of them is killed with SIGKILL at a random moment:
//                                every other rank must get an error that names it, within the bound
//   stress stop      N  [seed [hosts]]   the same with SIGSTOP for all ranks of one host: the others must get an error
//                                that names one of them, when the heartbeat's timeout is over. With an odd seed only
//                                ranks 1 and 3 are at work, without those who speak for their hosts
//
// hosts, such as 2,1,1: how many of the four ranks each host has, which are then connected by TCP; or 0-1-0-1: the host
// of each rank.
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
const std::vector<std::vector<int>> kOnePair = {{1, 3}};

struct Outcome {
  uint64_t operations = 0;
  uint64_t wrong = 0;
  hvd_status status = HVD_OK;
  char error[512] = "";
};

int64_t value_of(int rank, int step, int name) { return (rank + 1) * 1000003LL + step * 101LL + name; }

// One operation of one rank. Which one, and of which size, follows from its name and the step.
struct Item {
  int set, name;
  std::vector<int64_t> input, output, expected;
  std::shared_ptr<Request> request;
};

// Few are large, and only at the beginning: enough to fill windows and chunks, and not to slow down all the rest.
size_t size_of(int step, int name) {
  if (name == 3) return 1 + static_cast<size_t>(step / 5 % 3);
  if (name == 2 || name >= 8) return step < 32 && step % 16 == name ? 200'000 : step % 64 == 0 ? 5'000 : 3;
  return 1;
}

// Of n elements, or about as many rows; `turn` says whose turn it is to be the root.
void prepare(Item& item, const std::vector<int>& ranks, int rank, const std::string& name, size_t n, int turn,
             int step) {
  const size_t members = ranks.size();
  const auto me = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  item.input.assign(n, value_of(rank, step, item.name));
  item.output.resize(n);
  item.expected.clear();
  int64_t sum = 0;
  for (const int r : ranks) sum += value_of(r, step, item.name);
  item.request = sum_request(name, item.input, item.set);
  Request& request = *item.request;
  request.output = item.output.data();
  if (item.name == 8) {  // member m sends n + m rows
    request.meta.op = HVD_ALLGATHER;
    item.input.resize(n + me, value_of(rank, step, item.name));
    for (size_t m = 0; m < members; ++m) {
      item.expected.insert(item.expected.end(), n + m, value_of(ranks[m], step, item.name));
    }
  } else if (item.name == 9) {
    request.meta.op = HVD_BROADCAST;
    const auto root = ranks[static_cast<size_t>(turn) % members];
    request.meta.root = root;
    item.expected.assign(n, value_of(root, step, item.name));
  } else if (item.name == 10) {  // member m sends n + m + k rows to member k
    request.meta.op = HVD_ALLTOALL;
    size_t rows = 0;
    for (size_t k = 0; k < members; ++k) {
      request.counts.push_back(static_cast<int64_t>(n + me + k));
      rows += n + me + k;
      item.expected.insert(item.expected.end(), n + k + me, value_of(ranks[k], step, item.name));
    }
    item.input.resize(rows, value_of(rank, step, item.name));
  } else if (item.name == 11) {
    request.meta.op = HVD_REDUCESCATTER;
    item.expected.assign(n / members + (me < n % members ? 1 : 0), sum);
    item.output.resize(item.expected.size());
    request.output = item.output.data();
  } else {
    item.expected.assign(n, sum);
  }
  request.input = item.input.data();
  if (!moves_rows(request.meta.op)) return;
  request.meta.shape = {kAnyRows};
  request.rows = static_cast<int64_t>(item.input.size());
}

bool is_right(const Item& item) {
  if (!moves_rows(item.request->meta.op)) return item.output == item.expected;
  const auto* const data = static_cast<const int64_t*>(item.request->data.get());
  return item.request->result_shape == std::vector<int64_t>{static_cast<int64_t>(item.expected.size())} &&
         std::equal(item.expected.begin(), item.expected.end(), data);
}

// Operations in a row, each alone and waited for: these get standing orders, which their next change of shape ends, or
// an allgather or alltoall of more rows than a letter holds.
void work_in_a_row(Engine& engine, const RankGroup& group, const std::vector<int>& sets, int thread, int step,
                   std::mt19937_64& random, Outcome& outcome) {
  const int rank = engine.world().rank;
  for (const int set : sets) {
    for (int round = 0; round < 14; ++round) {
      constexpr size_t kSizes[] = {1, 700, 400};
      constexpr int kNames[] = {0, 8, 0, 9, 10, 0, 11};
      const int turn = step / 16;
      Item item{set, kNames[turn % 7], {}, {}, {}, nullptr};
      // One that had too many rows stands no more: such a name is used for one turn.
      const bool many = item.name == 8 && round == 12;
      // More than a letter: by a lane, where hosts have as many members each. At the beginning only, as above.
      const bool long_sum = item.name == 0 && turn == 2;
      const size_t n = many || long_sum ? 40'000 : item.name == 9 ? 3'000 : kSizes[turn % 3];
      const std::string name = "row" + std::to_string(thread) + (item.name == 8 ? "." + std::to_string(turn) : "");
      prepare(item, group.sets()[static_cast<size_t>(set)], rank, name, n, turn, step * 16 + round);
      const auto& request = item.request;
      try {
        if (round % 4 == 3) {
          engine.submit(request);
          engine.wait(request, static_cast<int64_t>(random() % 1000));  // may be too short
        } else {
          engine.run(request, static_cast<int64_t>(random() % 100'000));
        }
      } catch (const Error& error) {
        outcome.status = error.status;
        std::snprintf(outcome.error, sizeof outcome.error, "%s", error.what());
        return;
      }
      if (const hvd_status status = engine.wait(request, kPatience); status != HVD_OK) {
        outcome.status = status;
        std::snprintf(outcome.error, sizeof outcome.error, "%s", request->error.c_str());
        return;
      }
      outcome.wrong += !is_right(item);
    }
  }
}

// Steps that are repeated in one order: these become sequences. Some are then submitted in another order, or in part.
void work_in_steps(Engine& engine, const RankGroup& group, const std::vector<int>& sets, int thread, int step,
                   std::mt19937_64& random, Outcome& outcome) {
  const int rank = engine.world().rank;
  constexpr int kNames = 9, kSteps = 7;
  for (const int set : sets) {
    for (int round = 0; round < kSteps; ++round) {
      std::vector<Item> items;
      for (int name = 0; name < kNames; ++name) items.push_back({set, name, {}, {}, {}, nullptr});
      if (random() % 64 == 0) std::shuffle(items.begin(), items.end(), random);
      // All ranks alike: a changed shape, or a part of the step only.
      const size_t elements = step % 64 == 16 && round == kSteps - 2 ? 2 : 1;
      if (step % 32 == 24 && round == kSteps - 2) std::erase_if(items, [](const Item& item) { return item.name > 5; });
      for (Item& item : items) {
        item.input.assign(elements, value_of(rank, step * kSteps + round, item.name));
        const auto& ranks = group.sets()[static_cast<size_t>(set)];
        const int winner = thread == 0 ? ranks.front() : ranks.back();
        item.expected.assign(elements, value_of(winner, step * kSteps + round, item.name));
        item.request = sum_request("s" + std::to_string(thread) + "." + std::to_string(item.name), item.input, set);
        // A class of its own for each thread: else the names of both are one step, in any order.
        item.request->meta.reduce_op = thread == 0 ? HVD_MIN : HVD_MAX;
        try {
          engine.submit(item.request);
          if (random() % 64 == 0) engine.wait(item.request, static_cast<int64_t>(random() % 1000));  // may be too short
        } catch (const Error& error) {
          outcome.status = error.status;
          std::snprintf(outcome.error, sizeof outcome.error, "%s", error.what());
          item.request = nullptr;
          break;
        }
      }
      if (random() % 4 == 0) std::shuffle(items.begin(), items.end(), random);
      for (Item& item : items) {
        if (!item.request) continue;
        if (const hvd_status status = engine.wait(item.request, kPatience); status != HVD_OK) {
          outcome.status = status;
          std::snprintf(outcome.error, sizeof outcome.error, "%s", item.request->error.c_str());
          continue;
        }
        outcome.wrong += item.input != item.expected;
      }
      if (outcome.status != HVD_OK) return;
    }
  }
}

// One thread of one rank: submits its own names of all sets of this rank in random order, waits in another.
void work(Engine& engine, const RankGroup& group, const std::vector<int>& sets, int thread, uint64_t operations,
          uint64_t seed, Outcome& outcome) {
  const int rank = engine.world().rank;
  std::mt19937_64 random(seed * 7919 + static_cast<uint64_t>(rank * kThreadsPerRank + thread));
  for (int step = 0; outcome.operations < operations; ++step) {
    std::vector<Item> items;
    for (const int set : sets) {
      for (int name = 0; name < kNamesPerSet; ++name) items.push_back({set, name, {}, {}, {}, nullptr});
    }
    std::shuffle(items.begin(), items.end(), random);
    for (Item& item : items) {
      // Most names repeat; some are new in every step, some change their shape from time to time.
      std::string name = "t" + std::to_string(thread) + "." + std::to_string(item.name);
      if (item.name == 7) name += "." + std::to_string(step);
      prepare(item, group.sets()[static_cast<size_t>(item.set)], rank, name, size_of(step, item.name), step, step);
      try {
        engine.submit(item.request);
        if (item.name == 5) engine.wait(item.request, static_cast<int64_t>(random() % 1000));  // may be too short
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
      outcome.wrong += !is_right(item);
      ++outcome.operations;
    }
    if (outcome.status == HVD_OK && step % 8 == 0) work_in_a_row(engine, group, sets, thread, step, random, outcome);
    if (outcome.status == HVD_OK && step % 8 == 4) work_in_steps(engine, group, sets, thread, step, random, outcome);
    if (outcome.status != HVD_OK) return;
  }
}

// first_set: 0, or 1 if the set of all ranks is to be left alone.
Outcome run_rank(const RankGroup& group, Engine& engine, uint64_t operations, uint64_t seed, int first_set = 0) {
  std::vector<Outcome> outcomes(kThreadsPerRank);
  std::vector<std::thread> threads;
  // Both threads of all ranks do the same number of steps: the number of operations depends on the sets of a rank.
  std::vector<int> sets;
  for (int set = first_set; set < static_cast<int>(group.sets().size()); ++set) {
    const auto& ranks = group.sets()[static_cast<size_t>(set)];
    if (std::binary_search(ranks.begin(), ranks.end(), engine.world().rank)) sets.push_back(set);
  }
  const uint64_t steps = operations / kThreadsPerRank / (kNamesPerSet * group.sets().size()) + 1;
  for (int t = 0; t < kThreadsPerRank; ++t) {
    threads.emplace_back([&, t] {
      work(engine, group, sets, t, steps * sets.size() * kNamesPerSet, seed, outcomes[static_cast<size_t>(t)]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Who leaves ends the job for all, also for sets without it: so nobody leaves before everyone is done.
  const auto barrier = std::make_shared<Request>();
  barrier->key.name = "barrier.noname";
  barrier->meta.op = HVD_BARRIER;
  Outcome at_end;
  try {
    at_end.status = engine.run(barrier, kPatience);
    std::snprintf(at_end.error, sizeof at_end.error, "%s", barrier->error.c_str());
  } catch (const Error& error) {
    at_end.status = error.status;
    std::snprintf(at_end.error, sizeof at_end.error, "%s", error.what());
  }
  outcomes.push_back(at_end);
  Outcome sum = outcomes[0];
  for (size_t i = 1; i < outcomes.size(); ++i) {
    const Outcome& other = outcomes[i];
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
      "%s: %llu requests (%llu by bit, %llu standing, %llu in sequence, %llu messages), %llu batches, %llu doorbells, "
      "%llu sleeps, %llu "
      "role "
      "changes, %llu log bytes, %llu evictions\n",
      who, static_cast<unsigned long long>(c.requests_submitted.get()),
      static_cast<unsigned long long>(c.requests_by_bit.get()),
      static_cast<unsigned long long>(c.requests_standing.get()),
      static_cast<unsigned long long>(c.requests_in_sequence.get()),
      static_cast<unsigned long long>(c.request_messages.get()), static_cast<unsigned long long>(c.batches.get()),
      static_cast<unsigned long long>(c.doorbells.get()), static_cast<unsigned long long>(c.sleeps.get()),
      static_cast<unsigned long long>(c.role_changes.get()), static_cast<unsigned long long>(c.log_bytes.get()),
      static_cast<unsigned long long>(c.cache_evictions.get()));
}

int finish(int passed, int failed) {
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

int run_threads(uint64_t operations, uint64_t seed, const HostOf& hosts) {
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

enum class Fault { kNone, kKill, kStop };

int run_processes(uint64_t operations, uint64_t seed, Fault fault, const HostOf& hosts) {
  std::mt19937_64 random(seed);
  const bool only_one_pair = fault == Fault::kStop && seed % 2 == 1;
  RankGroup group(hosts, only_one_pair ? kOnePair : kSets, 64);
  // One rank, or all of one host.
  std::vector<int> victims;
  if (fault == Fault::kKill) victims = {static_cast<int>(random() % kRanks)};
  if (fault == Fault::kStop) victims = group.make_world(static_cast<int>(random() % kRanks)).here();
  Settings settings;
  if (fault == Fault::kStop) settings.heartbeat_timeout = 2;
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
        const auto engine = group.make_engine(r, settings);
        outcome = run_rank(group, *engine, operations, seed, only_one_pair ? 1 : 0);
        if (r == 0 && fault == Fault::kNone) report("rank 0", engine->counters());
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
  std::chrono::steady_clock::time_point struck;
  if (fault != Fault::kNone) {
    usleep(static_cast<useconds_t>(1000 + random() % (fault == Fault::kStop ? 1'000'000 : 100'000)));
    for (const int victim : victims) {
      kill(children[static_cast<size_t>(victim)], fault == Fault::kStop ? SIGSTOP : SIGKILL);
    }
    struck = std::chrono::steady_clock::now();
  }
  int failed = 0;
  for (int r = 0; r < kRanks; ++r) {
    if (std::find(victims.begin(), victims.end(), r) != victims.end()) continue;
    int status = 0;
    waitpid(children[static_cast<size_t>(r)], &status, 0);
    const Outcome& outcome = shared->outcomes[r];
    const bool named = std::any_of(victims.begin(), victims.end(), [&outcome](int victim) {
      return std::strstr(outcome.error, ("rank " + std::to_string(victim) + " (pid").c_str()) != nullptr;
    });
    const bool right = fault == Fault::kNone ? outcome.status == HVD_OK : outcome.status == HVD_PEER_LOST && named;
    if (WIFEXITED(status) && right && outcome.wrong == 0) continue;
    ++failed;
    std::printf("rank %d: wait status %d, status %d, %llu operations, %llu wrong values, %s\n", r, status,
                outcome.status, static_cast<unsigned long long>(outcome.operations),
                static_cast<unsigned long long>(outcome.wrong), outcome.error);
  }
  if (fault != Fault::kNone) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - struck).count();
    std::printf("%zu ranks, the first of them %d, %s; all others had ended %.3f s later\n", victims.size(), victims[0],
                fault == Fault::kStop ? "stopped" : "killed", seconds);
    if (seconds > 10) ++failed;
    for (const int victim : victims) {
      kill(children[static_cast<size_t>(victim)], SIGKILL);
      waitpid(children[static_cast<size_t>(victim)], nullptr, 0);
    }
  }
  return finish(kRanks - failed, failed);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s threads|processes|kill|stop OPERATIONS [SEED [HOSTS]]\n", argv[0]);
    return 2;
  }
  const std::string mode = argv[1];
  const uint64_t operations = std::strtoull(argv[2], nullptr, 10);
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const char* text = argc > 4 ? argv[4] : "4";
  const bool by_rank = std::strchr(text, '-') != nullptr;
  std::vector<int> numbers;
  while (*text != '\0') {
    char* end = nullptr;
    numbers.push_back(static_cast<int>(std::strtol(text, &end, 10)));
    text = *end == '\0' ? end : end + 1;
  }
  const HostOf hosts = by_rank ? HostOf{numbers} : hosts_with(numbers);
  if (hosts.ranks.size() != kRanks) {
    std::fprintf(stderr, "the hosts must have %d ranks in all\n", kRanks);
    return 2;
  }
  if (mode == "threads") return run_threads(operations, seed, hosts);
  return run_processes(operations, seed,
                       mode == "kill"   ? Fault::kKill
                       : mode == "stop" ? Fault::kStop
                                        : Fault::kNone,
                       hosts);
}
