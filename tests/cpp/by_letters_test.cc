// Broadcast, reducescatter, allgather and alltoall by standing orders, among ranks that share a host.
#include <doctest/doctest.h>

#include <utility>

#include "engine/standing_orders.h"
#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

constexpr int kEnough = 20;  // rounds, until an order stands
constexpr hvd_op kOps[] = {HVD_BROADCAST, HVD_REDUCESCATTER, HVD_ALLGATHER, HVD_ALLTOALL};

float value_of(int rank, int round) { return static_cast<float>(rank * 100 + round % 64); }

// One blocking operation on rows of two floats; its result is checked. Rank r sends `rows` rows to each member, and of
// an allgather or alltoall r more.
void run_one(Engine& engine, hvd_op op, const std::string& name, int round, int64_t rows) {
  const int rank = engine.world().rank, size = engine.world().size;
  const auto rows_from = [rows, op](int r) { return rows + (moves_rows(op) ? r : 0); };
  const auto parts = static_cast<int64_t>(op == HVD_ALLTOALL || op == HVD_REDUCESCATTER ? size : 1);
  const std::vector<float> input(static_cast<size_t>(2 * parts * rows_from(rank)), value_of(rank, round));
  std::vector<float> output(input.size()), expected;
  auto request = rows_request(op, name, input, 2);
  request->output = output.data();
  if (!moves_rows(op)) request->meta.shape = {parts * rows, 2};
  if (op == HVD_BROADCAST) {
    request->meta.root = size - 1;
    expected.assign(output.size(), value_of(size - 1, round));
  } else if (op == HVD_REDUCESCATTER) {
    request->meta.prescale = 2;
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += 2 * value_of(r, round);
    output.resize(static_cast<size_t>(2 * rows));
    expected.assign(output.size(), sum);
  } else {
    for (int r = 0; r < size; ++r) {
      expected.insert(expected.end(), static_cast<size_t>(2 * rows_from(r)), value_of(r, round));
    }
  }
  REQUIRE_MESSAGE(engine.run(request, kPatience) == HVD_OK, request->error);
  REQUIRE((moves_rows(op) ? result_of(*request) : output) == expected);
}

void run_rounds(Engine& engine, hvd_op op, const std::string& name, int rounds, int64_t rows) {
  for (int round = 0; round < rounds; ++round) run_one(engine, op, name, round, rows);
}

// How many of this rank's requests came under a standing order while it did that.
template <typename Body>
uint64_t standing_during(const Engine& engine, Body body) {
  const uint64_t before = engine.counters().requests_standing.get();
  body();
  return engine.counters().requests_standing.get() - before;
}

// No round may end its order because the machine has other things to do.
Settings patient() {
  Settings settings;
  settings.stall_warning = settings.stall_shutdown = 0;
  return settings;
}

}  // namespace

TEST_CASE("a collective that is repeated alone on one host needs no log any more, whatever it is") {
  for (const auto& [size, cores] : {std::pair(2, 1), {2, 64}, {3, 64}, {4, 1}, {4, 64}}) {
    const RankGroup group(size, {}, 1024, cores);
    on_all_ranks(group, patient(), [](int, Engine& engine) {
      for (const hvd_op op : kOps) {
        for (const int64_t rows : {1, 3, 500, 2000}) {  // in the line of the flag, or not; in one part or several
          if (op != HVD_BROADCAST && rows > 500) continue;
          const std::string name = "x" + std::to_string(op) + "." + std::to_string(rows);
          run_rounds(engine, op, name, kEnough, rows);
          const uint64_t entries = engine.counters().log_entries.get();
          CHECK(standing_during(engine, [&] { run_rounds(engine, op, name, 100, rows); }) == 100);
          CHECK(engine.counters().log_entries.get() == entries);
        }
      }
    });
  }
}

TEST_CASE("rows come and go under one order, up to what a letter holds") {
  const RankGroup group(3);
  on_all_ranks(group, patient(), [](int rank, Engine& engine) {
    for (const hvd_op op : {HVD_ALLGATHER, HVD_ALLTOALL}) {
      const std::string name = "x" + std::to_string(op);
      run_rounds(engine, op, name, kEnough, 2);
      const auto some = [&](int i) { return int64_t{i * 37 % 211}; };
      CHECK(standing_during(engine, [&] {
              for (int i = 0; i < 200; ++i) run_one(engine, op, name, i, some(i));
            }) == 200);
      // Nobody sends anything; then one rank alone.
      for (const int sender : {-1, 1}) {
        const std::vector<float> input(rank == sender ? 6 : 0, 5.f);
        const auto request = rows_request(op, name, input, 2);
        REQUIRE(engine.run(request, kPatience) == HVD_OK);
        CHECK(request->received.size() == 3);
        const int64_t received = sender < 0 ? 0 : op == HVD_ALLGATHER ? 3 : 1;
        CHECK(request->result_shape == std::vector<int64_t>{received, 2});
      }
    }
  });
}

TEST_CASE("more rows than a letter holds, on all ranks or on one, end the order, and the name stands no more") {
  const int64_t too_many = static_cast<int64_t>(longest_letter_on_host(HVD_ALLGATHER, true)) / 8;  // of 8 bytes
  for (const hvd_op op : {HVD_ALLGATHER, HVD_ALLTOALL}) {
    for (const bool on_all : {true, false}) {
      CAPTURE(on_all);
      const RankGroup group(3);
      on_all_ranks(group, patient(), [&](int rank, Engine& engine) {
        run_rounds(engine, op, "x", kEnough, 1);
        for (int round = 0; round < 2; ++round) {
          const bool many = on_all || rank == 1;
          const std::vector<float> input(static_cast<size_t>(many ? 6 * too_many : 6), value_of(rank, round));
          const auto request = rows_request(op, "x", input, 2);
          REQUIRE(engine.run(request, kPatience) == HVD_OK);
          const int64_t from_one = op == HVD_ALLGATHER ? 3 : 1;
          const int64_t expected = on_all ? 3 * from_one * too_many : from_one * (too_many + 2);
          REQUIRE(request->result_shape == std::vector<int64_t>{expected, 2});
          CHECK(result_of(*request).back() == value_of(2, round));
        }
        CHECK(standing_during(engine, [&] { run_rounds(engine, op, "x", 2 * kEnough, 1); }) == 0);
        CHECK(standing_during(engine, [&] { run_rounds(engine, op, "y", 2 * kEnough, 1); }) >= kEnough);
      });
    }
  }
}

TEST_CASE("another shape of a broadcast, or another root, which is an error if it is not the same everywhere") {
  const RankGroup group(2);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    run_rounds(engine, HVD_BROADCAST, "x", kEnough, 4);
    run_rounds(engine, HVD_BROADCAST, "x", kEnough, 5);
    std::vector<float> data(2, static_cast<float>(rank));
    const auto from_first = rows_request(HVD_BROADCAST, "x", data, 2);
    from_first->output = data.data();
    from_first->meta.shape = {1, 2};
    from_first->meta.root = 0;
    REQUIRE(engine.run(from_first, kPatience) == HVD_OK);
    CHECK(data == std::vector<float>{0, 0});
    const auto request = rows_request(HVD_BROADCAST, "x", data, 2);
    request->output = data.data();
    request->meta.shape = {1, 2};
    request->meta.root = rank;
    CHECK(engine.run(request, kPatience) == HVD_MISMATCH);
    run_rounds(engine, HVD_BROADCAST, "x", kEnough, 5);
    const auto other = rows_request(HVD_ALLGATHER, "x", data, 2);
    REQUIRE(engine.run(other, kPatience) == HVD_OK);
    CHECK(other->result_shape == std::vector<int64_t>{2, 2});
  });
}

TEST_CASE("reducescatter by letters of rows that can't be shared out evenly, also of fewer rows than members") {
  const RankGroup group(3);
  on_all_ranks(group, patient(), [](int rank, Engine& engine) {
    for (const int64_t rows : {1, 2, 5, 7}) {
      const auto own = static_cast<size_t>(rows_of(rank, 3, rows));
      int64_t before = 0;
      for (int r = 0; r < rank; ++r) before += rows_of(r, 3, rows);
      std::vector<float> input;
      for (int64_t row = 0; row < rows; ++row) input.insert(input.end(), 2, static_cast<float>(10 * row + rank));
      CHECK(standing_during(engine, [&] {
              for (int round = 0; round < 2 * kEnough; ++round) {
                std::vector<float> output(2 * own, -1), expected;
                for (size_t i = 0; i < 2 * own; ++i) {
                  expected.push_back(static_cast<float>(30 * (before + static_cast<int64_t>(i / 2)) + 3));
                }
                const auto request = rows_request(HVD_REDUCESCATTER, "x" + std::to_string(rows), input, 2);
                request->meta.shape = {rows, 2};
                request->output = output.data();
                REQUIRE_MESSAGE(engine.run(request, kPatience) == HVD_OK, request->error);
                REQUIRE(output == expected);
              }
            }) >= kEnough);
    }
  });
}

TEST_CASE("who waits under an order of another collective for a rank that has left hears of it") {
  for (const hvd_op op : kOps) {
    const RankGroup group(3);
    on_all_ranks(group, {}, [op](int rank, Engine& engine) {
      run_rounds(engine, op, "x", kEnough, 2);
      if (rank == 1) return;
      const std::vector<float> input(12, 1.f);
      std::vector<float> output(12);
      const auto request = rows_request(op, "x", input, 2);
      request->output = output.data();
      if (!moves_rows(op)) request->meta.shape = {op == HVD_BROADCAST ? 2 : 6, 2};
      if (op == HVD_BROADCAST) request->meta.root = 2;
      if (op == HVD_REDUCESCATTER) request->meta.prescale = 2;
      REQUIRE(try_to_run(engine, request) != HVD_OK);
      CHECK(request->error.find("rank 1") != std::string::npos);
    });
  }
}

TEST_CASE("join ends orders of rows") {
  const RankGroup group(3);
  on_all_ranks(group, {}, [](int rank, Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      run_rounds(engine, HVD_ALLGATHER, "x", kEnough, 2);
      if (rank != 1) {
        const std::vector<float> input(4, 1.f);
        const auto request = rows_request(HVD_ALLGATHER, "x", input, 2);
        REQUIRE_MESSAGE(engine.run(request, kPatience) == HVD_OK, request->error);
        CHECK(request->received == std::vector<int64_t>{2, 0, 2});
      }
      REQUIRE(engine.run(request_of(HVD_JOIN, kJoinName), kPatience) == HVD_OK);
    }
  });
}
