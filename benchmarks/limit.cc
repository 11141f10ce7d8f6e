// The limit: what processes of one host can do with plain loads and stores on pages that all of them share.
//
//   limit <ranks>
//
// forks into so many processes, which read commands from the first one's standard input, one a line,
//
//   allreduce <bytes> <buffers>    prepares: every rank has so many buffers of float32, all on shared pages
//   own-pages <bytes> <buffers>    the same, but no rank writes into another one's buffers
//   memcpy <bytes> <buffers>       prepares: every rank copies its own memory to its own memory
//   run <iterations>               runs them and prints the nanoseconds of each, on one line
//
// An allreduce in place: every rank adds up its slice of all ranks' buffers and stores the sum into all of them, or if
// it writes into its own pages only, there; then it copies the other slices from those who have added them up. Small
// ones: every rank reads all others. The time of an iteration runs from the moment when the last rank begins until the
// last one has ended, and has in it the flags by which the ranks see that the others' buffers are there, and are done.
// Buffers rotate and are rewritten between iterations, outside of that time.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int kMostRanks = 64;
constexpr size_t kSmall = size_t{16} << 10;  // bytes; larger ones are worth a second synchronisation
constexpr size_t kBlock = 1024;              // elements added up at a time
constexpr int kSpins = 20000;                // before a core is given away that should be ours
constexpr int kMostIterations = 1 << 16;

struct alignas(128) Flag {
  std::atomic<uint64_t> value{0};
};

struct Control {
  Flag command[kMostRanks], gate[kMostRanks], ready[kMostRanks], folded[kMostRanks], done[kMostRanks];
  char kind[16];
  uint64_t bytes, buffers, iterations;
  int64_t starts[kMostRanks][kMostIterations], ends[kMostRanks][kMostIterations];
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

void* shared_memory(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("limit: no shared memory");
  return memory;
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// By plain loads and stores; the build sees to it that the compiler makes no memcpy of it, which some processors run
// slower.
void store(float* __restrict to, const float* __restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = from[i];
}

class Rank {
 public:
  Rank(Control& control, float* arena, size_t arena_bytes, int rank, int ranks)
      : control_(control), arena_(arena), arena_bytes_(arena_bytes), rank_(rank), ranks_(ranks) {
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
    crowded_ = CPU_COUNT(&cores) < ranks;
    if (!crowded_) stay_on(cores);
  }

  void prepare() {
    elements_ = control_.bytes / sizeof(float);
    if (is_copy()) {
      own_.assign(2 * control_.buffers * elements_, 1.0F);
      return;
    }
    if (control_.bytes * control_.buffers * static_cast<size_t>(ranks_) > arena_bytes_) {
      std::fprintf(stderr, "limit: %zu buffers of %zu bytes are too much\n", control_.buffers, control_.bytes);
      std::exit(1);
    }
    for (size_t b = 0; b < control_.buffers; ++b) std::fill_n(buffer(rank_, b), elements_, 1.0F);
    result_.resize(elements_);
  }

  void run() {
    for (uint64_t i = 0; i < control_.iterations; ++i) {
      const size_t b = turn_++ % control_.buffers;
      meet(control_.gate);
      control_.starts[rank_][i] = now();
      is_copy() ? copy(b) : allreduce(b);
      control_.ends[rank_][i] = now();
      meet(control_.gate);
      rewrite(b);
    }
    meet(control_.gate);
  }

  // The memory of the subject before this one.
  void give_back() { madvise(arena_, arena_bytes_, MADV_REMOVE); }

  void report(bool times) const {
    for (uint64_t i = 0; times && i < control_.iterations; ++i) {
      int64_t start = 0, end = 0;
      for (int r = 0; r < ranks_; ++r) {
        start = std::max(start, control_.starts[r][i]);
        end = std::max(end, control_.ends[r][i]);
      }
      std::printf("%lld ", static_cast<long long>(end - start));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  // All ranks wait for each other.
  void meet(Flag* flags) {
    const uint64_t turn = flags[rank_].value.load(std::memory_order_relaxed) + 1;
    flags[rank_].value.store(turn, std::memory_order_release);
    for (int r = 0; r < ranks_; ++r) {
      for (int looks = 0; flags[r].value.load(std::memory_order_acquire) < turn; ++looks) {
        if (crowded_ || looks > kSpins) sched_yield();
      }
    }
  }

 private:
  // A core of its own: who is woken begins where it was woken from.
  void stay_on(const cpu_set_t& cores) const {
    int skip = rank_;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &cores) || skip-- > 0) continue;
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(core, &own);
      sched_setaffinity(0, sizeof own, &own);
      return;
    }
  }

  bool is_copy() const { return std::strcmp(control_.kind, "memcpy") == 0; }
  bool is_own_pages() const { return std::strcmp(control_.kind, "own-pages") == 0; }
  float* buffer(int rank, size_t index) const {
    return arena_ + (static_cast<size_t>(rank) * control_.buffers + index) * elements_;
  }

  void copy(size_t b) {
    std::memcpy(own_.data() + (2 * b + 1) * elements_, own_.data() + 2 * b * elements_, control_.bytes);
  }

  void allreduce(size_t b) {
    meet(control_.ready);
    if (control_.bytes <=
        kSmall) {  // everyone all of it; a buffer is not rewritten before all have passed the next gate
      add(result_.data(), b, 0, elements_);
      return;
    }
    const auto r = static_cast<size_t>(rank_), n = static_cast<size_t>(ranks_);
    const size_t begin = elements_ * r / n, end = elements_ * (r + 1) / n;
    if (is_own_pages()) {
      if (ranks_ == 2) {
        float* __restrict const mine = buffer(rank_, b);
        const float* __restrict const other = buffer(1 - rank_, b);
        for (size_t i = begin; i < end; ++i) mine[i] += other[i];
      } else {
        float sum[kBlock];
        for (size_t i = begin; i < end; i += kBlock) {
          const size_t count = std::min(kBlock, end - i);
          add(sum, b, i, count);
          store(buffer(rank_, b) + i, sum, count);
        }
      }
      meet(control_.folded);
      for (size_t other = 0; other < n; ++other) {
        const size_t lo = elements_ * other / n, hi = elements_ * (other + 1) / n;
        if (other != r) store(buffer(rank_, b) + lo, buffer(static_cast<int>(other), b) + lo, hi - lo);
      }
    } else if (ranks_ == 2) {
      float* const x = buffer(0, b);
      float* const y = buffer(1, b);
      for (size_t i = begin; i < end; ++i) x[i] = y[i] = x[i] + y[i];
    } else {
      float sum[kBlock];
      for (size_t i = begin; i < end; i += kBlock) {
        const size_t count = std::min(kBlock, end - i);
        add(sum, b, i, count);
        for (int rank = 0; rank < ranks_; ++rank) store(buffer(rank, b) + i, sum, count);
      }
    }
    meet(control_.done);
  }

  void add(float* __restrict sum, size_t b, size_t from, size_t count) const {
    store(sum, buffer(0, b) + from, count);
    for (int rank = 1; rank < ranks_; ++rank) {
      const float* __restrict const other = buffer(rank, b) + from;
      for (size_t i = 0; i < count; ++i) sum[i] += other[i];
    }
  }

  void rewrite(size_t b) {
    if (is_copy()) {
      std::fill_n(own_.data() + 2 * b * elements_, elements_, 1.0F);
      return;
    }
    const float expected = static_cast<float>(ranks_);
    const float* const result = control_.bytes <= kSmall ? result_.data() : buffer(rank_, b);
    if (result[0] != expected || result[elements_ - 1] != expected) {
      std::fprintf(stderr, "limit: a sum is %g, expected %g\n", static_cast<double>(result[0]),
                   static_cast<double>(expected));
      std::exit(1);
    }
    if (control_.bytes > kSmall) std::fill_n(buffer(rank_, b), elements_, 1.0F);
  }

  Control& control_;
  float* const arena_;
  const size_t arena_bytes_;
  const int rank_, ranks_;
  bool crowded_ = false;
  size_t elements_ = 0, turn_ = 0;
  std::vector<float> own_, result_;
};

// Rank 0 alone reads commands; the others sleep until it has written one into the control block.
void serve(Control& control, Rank& rank, int number, int commands_in, const std::vector<int>& commands_out) {
  char line[128];
  while (true) {
    if (number == 0) {
      unsigned long long first = 0, second = 0;
      char kind[16] = {};
      if (std::fgets(line, sizeof line, stdin) == nullptr) return;
      const int fields = std::sscanf(line, "%15s %llu %llu", kind, &first, &second);
      if (fields == 3) {
        std::memcpy(control.kind, kind, sizeof kind);
        control.bytes = first;
        control.buffers = second;
        control.iterations = 0;
        rank.give_back();
      } else {
        control.iterations = std::min<uint64_t>(first, kMostIterations);
      }
      for (const int fd : commands_out) (void)!write(fd, "c", 1);
    } else {
      char byte = 0;
      if (read(commands_in, &byte, 1) != 1) return;
    }
    rank.meet(control.command);
    const bool is_run = control.iterations > 0;
    is_run ? rank.run() : rank.prepare();
    rank.meet(control.command);
    if (number == 0) rank.report(is_run);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc == 2 ? std::atoi(argv[1]) : 0;
  if (ranks < 1 || ranks > kMostRanks) {
    std::fprintf(stderr, "Usage: limit <ranks, at most %d>\n", kMostRanks);
    return 2;
  }
  auto& control = *new (shared_memory(sizeof(Control))) Control;
  const size_t arena_bytes = size_t{8} << 30;  // only what is touched is there
  auto* const arena = static_cast<float*>(shared_memory(arena_bytes));
  std::vector<int> commands;
  for (int r = 1; r < ranks; ++r) {
    int ends[2];
    if (pipe(ends) != 0) fail("limit: no pipe");
    const pid_t child = fork();
    if (child < 0) fail("limit: no process");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[1]);
      for (const int fd : commands) close(fd);
      Rank rank(control, arena, arena_bytes, r, ranks);
      serve(control, rank, r, ends[0], {});
      _exit(0);
    }
    close(ends[0]);
    commands.push_back(ends[1]);
  }
  Rank rank(control, arena, arena_bytes, 0, ranks);
  serve(control, rank, 0, -1, commands);
  for (const int fd : commands) close(fd);
  while (wait(nullptr) > 0) {
  }
}
