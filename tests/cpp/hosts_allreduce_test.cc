// Allreduce between hosts, bit for bit: what comes is what folding in the order of ranks on each host, and then in the
// order of hosts, gives on one. Ranks are threads; hosts with one member each, and mixtures.
#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "collectives/arithmetic.h"
#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

using Bytes = std::vector<std::byte>;

// What is reduced, the same on all ranks.
struct Subject {
  hvd_dtype dtype;
  hvd_reduce_op reduce_op;
  size_t count;
  double prescale = 1.0, postscale = 1.0;
  bool in_place = true;
  size_t bytes() const { return count * dtype_bytes(dtype); }
};

// The values of a rank: random, but finite and below 2 where they are floats.
Bytes input_of(const Subject& subject, int rank, int number) {
  std::mt19937_64 random(static_cast<uint64_t>(rank * 1000 + number));
  Bytes bytes((subject.bytes() + 7) / 8 * 8);
  uint64_t mask = ~uint64_t{0};
  switch (subject.dtype) {
    case HVD_FLOAT16:
    case HVD_BFLOAT16:
      mask = 0xBFFF'BFFF'BFFF'BFFF;
      break;
    case HVD_FLOAT32:
    case HVD_COMPLEX64:
      mask = 0xBFFF'FFFF'BFFF'FFFF;
      break;
    case HVD_FLOAT64:
    case HVD_COMPLEX128:
      mask = 0xBFFF'FFFF'FFFF'FFFF;
      break;
    case HVD_BOOL:
      mask = 0x0101'0101'0101'0101;
      break;
    default:
      break;
  }
  for (size_t i = 0; i < bytes.size(); i += 8) {
    const uint64_t word = random() & mask;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  bytes.resize(subject.bytes());
  return bytes;
}

Bytes expected_of(const Subject& subject, const RankGroup& group, int number) {
  Batch batch;
  batch.dtype = subject.dtype;
  batch.reduce_op = subject.reduce_op;
  batch.prescale = subject.prescale;
  batch.postscale = subject.postscale;
  const Arithmetic arithmetic(batch, group.size());
  std::vector<Bytes> of_hosts;
  const World world = group.make_world(0);
  for (int h = 0; h < world.n_hosts(); ++h) {
    std::vector<Bytes> members;
    std::vector<const void*> sources;
    for (int r = 0; r < group.size(); ++r) {
      if (world.host_of[static_cast<size_t>(r)] != h) continue;
      members.emplace_back(subject.bytes());
      arithmetic.copy_in(members.back().data(), input_of(subject, r, number).data(), subject.bytes());
    }
    for (const Bytes& member : members) sources.push_back(member.data());
    of_hosts.emplace_back(subject.bytes());
    arithmetic.fold_partly(of_hosts.back().data(), sources, subject.bytes());
  }
  std::vector<const void*> sources;
  for (const Bytes& host : of_hosts) sources.push_back(host.data());
  Bytes result(subject.bytes());
  arithmetic.fold(result.data(), sources, subject.bytes());
  return result;
}

struct Reduction {
  Bytes input, output;
  std::shared_ptr<Request> request = std::make_shared<Request>();

  Reduction(const Subject& subject, int rank, int number) : input(input_of(subject, rank, number)) {
    if (!subject.in_place) output.resize(input.size());
    request->key = {0, "x" + std::to_string(number)};
    request->meta.dtype = subject.dtype;
    request->meta.reduce_op = subject.reduce_op;
    request->meta.prescale = subject.prescale;
    request->meta.postscale = subject.postscale;
    request->meta.shape = {static_cast<int64_t>(subject.count)};
    request->input = input.data();
    request->output = subject.in_place ? input.data() : output.data();
  }
  const Bytes& result() const { return output.empty() ? input : output; }
};

// Each of them alone, or all at once, which fuses those that are alike.
void check_all(const std::vector<int>& hosts, const std::vector<Subject>& subjects, bool at_once) {
  const RankGroup group(hosts);
  std::vector<Bytes> expected;
  for (size_t i = 0; i < subjects.size(); ++i) expected.push_back(expected_of(subjects[i], group, static_cast<int>(i)));
  on_all_ranks(group, {}, [&](int rank, Engine& engine) {
    std::vector<Reduction> reductions;
    for (size_t i = 0; i < subjects.size(); ++i) reductions.emplace_back(subjects[i], rank, static_cast<int>(i));
    for (size_t i = 0; i < subjects.size(); ++i) {
      engine.submit(reductions[i].request);
      if (!at_once) REQUIRE(engine.wait(reductions[i].request, kPatience) == HVD_OK);
    }
    for (size_t i = 0; i < subjects.size(); ++i) {
      REQUIRE(engine.wait(reductions[i].request, kPatience) == HVD_OK);
      CAPTURE(subjects[i].dtype);
      CAPTURE(subjects[i].reduce_op);
      CAPTURE(subjects[i].count);
      CHECK(reductions[i].result() == expected[i]);
    }
    if (at_once) CHECK(engine.counters().batches.get() < subjects.size());
  });
}

const std::vector<std::vector<int>> kHosts = {{1, 1}, {1, 1, 1}, {1, 2}, {2, 2}, {1, 1, 1, 1, 1}};

}  // namespace

TEST_CASE("an allreduce between hosts has the bits of one host, for sizes around every threshold") {
  std::vector<Subject> subjects;
  for (const size_t bytes : {4ul << 10, 32ul << 10, 128ul << 10, 512ul << 10, 1ul << 20, 2ul << 20, 3ul << 20}) {
    for (const size_t more : {0ul, 1ul, 33ul}) subjects.push_back({HVD_FLOAT32, HVD_SUM, bytes / 4 + more});
    subjects.push_back({HVD_FLOAT32, HVD_SUM, bytes / 4 - 1});
  }
  for (const std::vector<int>& hosts : kHosts) check_all(hosts, subjects, false);
}

TEST_CASE("an allreduce between hosts has the bits of one host, for all types, factors and places") {
  std::vector<Subject> subjects;
  for (int dtype = HVD_UINT8; dtype <= HVD_COMPLEX128; ++dtype) {
    for (const hvd_reduce_op op : {HVD_SUM, HVD_AVERAGE, HVD_MIN, HVD_MAX, HVD_PRODUCT}) {
      if (kernels().fold[dtype][op] == nullptr) continue;
      const bool scales = dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16 || dtype == HVD_FLOAT32 || dtype == HVD_FLOAT64;
      const size_t count = (600 << 10) / dtype_bytes(static_cast<hvd_dtype>(dtype)) + 7;
      subjects.push_back({static_cast<hvd_dtype>(dtype), op, count, scales ? 0.75 : 1.0, scales ? 3.0 : 1.0,
                          subjects.size() % 2 == 0});
    }
  }
  for (const std::vector<int>& hosts : kHosts) check_all(hosts, subjects, false);
}

TEST_CASE("tensors of one allreduce between hosts, fused across the bounds of parts and pieces") {
  for (const double prescale : {1.0, 0.5}) {
    std::vector<Subject> subjects;
    for (const size_t count : {5ul, 70'000ul, 1ul, 1ul, 33ul, 300'001ul, 3ul, 16'384ul, 128ul}) {
      subjects.push_back({HVD_BFLOAT16, HVD_AVERAGE, count, prescale, 1.0, subjects.size() % 2 == 0});
    }
    for (size_t i = 0; i < 200; ++i) subjects.push_back({HVD_BFLOAT16, HVD_AVERAGE, 100 + i % 7, prescale});
    for (const std::vector<int>& hosts : kHosts) check_all(hosts, subjects, true);
  }
}

TEST_CASE("a host that has joined contributes nothing to a large allreduce") {
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [&](int rank, Engine& engine) {
      std::vector<float> data(700'001, static_cast<float>(rank + 1));
      if (rank > 0) {
        const float expected = group.size() == 2 ? 2 : 5;
        REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
        CHECK(data == std::vector<float>(data.size(), expected));
      }
      const auto join = std::make_shared<Request>();
      join->key.name = kJoinName;
      join->meta.op = HVD_JOIN;
      REQUIRE(engine.run(join, kPatience) == HVD_OK);
    });
  }
}
