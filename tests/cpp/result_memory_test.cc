// Memory of results: how it is aligned, what is kept of it and for whom.
#include "engine/result_memory.h"

#include <doctest/doctest.h>

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

TEST_CASE("no more is kept than was promised, and what is too large not at all") {
  release_kept_results();
  // How many of so many blocks are found again after they were freed: new memory is zero.
  const auto found_again = [](int count, size_t bytes) {
    std::vector<ResultMemory> blocks;
    for (int i = 0; i < count; ++i) {
      blocks.emplace_back(allocate_result(bytes));
      *static_cast<uint8_t*>(blocks.back().get()) = 7;
    }
    blocks.clear();
    int again = 0;
    for (int i = 0; i < count; ++i) {
      blocks.emplace_back(allocate_result(bytes));
      again += *static_cast<uint8_t*>(blocks.back().get()) == 7;
    }
    blocks.clear();
    release_kept_results();
    return again;
  };
  CHECK(found_again(8, size_t{10} << 20) == 4);  // of 12 MiB each: whole huge pages
  CHECK(found_again(1, kMostKeptBytes) == 0);
  CHECK(found_again(100, 100'000) == 64);
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
