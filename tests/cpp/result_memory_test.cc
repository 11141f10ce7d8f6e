// Memory of results: how it is aligned, what is kept of it and for whom.
#include "engine/result_memory.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using namespace hvd;

TEST_CASE("results of all sizes are aligned, and all of their bytes may be used") {
  for (const size_t bytes :
       {0u, 1u, 63u, 64u, 65'000u, 65'472u, 65'536u, 1'000'000u, 4'194'240u, 4'194'304u, 9'000'001u}) {
    const ResultMemory memory(allocate_result(bytes));
    REQUIRE(memory);
    CHECK(reinterpret_cast<uintptr_t>(memory.get()) % 64 == 0);
    std::memset(memory.get(), 1, bytes);
  }
  CHECK(allocate_result(SIZE_MAX) == nullptr);
  CHECK(allocate_result(SIZE_MAX / 4) == nullptr);
  release_kept_results();
}

TEST_CASE("memory that was freed serves the next result of about that size, and no much smaller one") {
  release_kept_results();
  ResultMemory memory(allocate_result(8 << 20));
  void* const first = memory.get();
  memory.reset();
  ResultMemory small(allocate_result(1 << 20));
  CHECK(small.get() != first);
  memory.reset(allocate_result(7 << 20));
  CHECK(memory.get() == first);
  memory.reset();
  small.reset();
  release_kept_results();
}

TEST_CASE("small results are kept too") {
  release_kept_results();
  ResultMemory memory(allocate_result(1000));
  void* const first = memory.get();
  memory.reset();
  memory.reset(allocate_result(1500));
#ifdef __SANITIZE_ADDRESS__
  constexpr bool kKept = false;  // so that use after free is found
#else
  constexpr bool kKept = true;
#endif
  CHECK((memory.get() == first || !kKept));
  memory.reset();
  release_kept_results();
}

TEST_CASE("no more is kept and no more is lent than was promised, and what is too large not at all") {
  // What is left of so many blocks when they were freed.
  const auto kept_of = [](size_t count, size_t bytes) {
    release_kept_results();
    std::vector<ResultMemory> blocks;
    for (size_t i = 0; i < count; ++i) blocks.emplace_back(allocate_result(bytes));
    blocks.clear();
    return kept_results();
  };
  constexpr size_t kMiB = size_t{1} << 20;
  const auto check = [&](size_t count, size_t bytes, size_t own, size_t lent) {
    const KeptBytes kept = kept_of(count, bytes);
    CHECK(kept.own == own);
    CHECK(kept.lent == lent);
  };
  check(3, 10 * kMiB, 36 * kMiB, 0);  // of 12 MiB each: whole huge pages
  check(8, 10 * kMiB, 48 * kMiB, 48 * kMiB);
  check(40, 10 * kMiB, 48 * kMiB, 252 * kMiB);
  check(1, kMostKeptBytes, 0, kMostKeptBytes + 2 * kMiB);
  check(1, kMostLentBytes, 0, 0);
  check(100, 100'000, 64 * 102'400, 0);
  release_kept_results();
  CHECK(kept_results().own + kept_results().lent == 0);
}

TEST_CASE("memory that was lent serves again, whether the kernel has taken it or not") {
  release_kept_results();
  constexpr size_t kBytes = kMostKeptBytes + 1;
  ResultMemory memory(allocate_result(kBytes));
  void* const first = memory.get();
  std::memset(first, 7, kBytes);
  memory.reset();
  CHECK(kept_results().lent > kBytes);
  SUBCASE("it has not") {}
  SUBCASE("it has") {  // as under pressure
    const auto page = reinterpret_cast<uintptr_t>(first) & ~uintptr_t{4095};
    REQUIRE(madvise(reinterpret_cast<void*>(page), kBytes, MADV_DONTNEED) == 0);
  }
  memory.reset(allocate_result(kBytes));
  CHECK(memory.get() == first);
  CHECK(kept_results().lent == 0);
  std::memset(memory.get(), 8, kBytes);
  memory.reset();
  CHECK(kept_results().lent > kBytes);
  release_kept_results();
}

TEST_CASE("threads may allocate and free at the same time") {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (size_t i = 0; i < 200; ++i) {
        const size_t bytes = (70'000 + 300'000 * static_cast<size_t>(t)) * (i % 3 + 1);
        const ResultMemory memory(allocate_result(bytes));
        std::memset(memory.get(), t + 1, bytes);
        const auto* const values = static_cast<const uint8_t*>(memory.get());
        if (values[0] != t + 1 || values[bytes - 1] != t + 1) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  release_kept_results();
}
