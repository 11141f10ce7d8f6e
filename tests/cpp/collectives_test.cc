// The collectives besides allreduce, on one and on several hosts, joined ranks and process sets that come and go, with
// ranks as threads.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "rank_group.h"

using namespace hvd;
using namespace hvd::testing;

TEST_CASE("allgather: rows of all ranks in their order, also none, also many chunks") {
  for (const HostOf& hosts : kLayouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      for (const int64_t scale : {0, 1, 1000, 70000}) {
        const auto rows = [scale](int r) { return scale * r; };  // rank 0 sends nothing
        const std::vector<float> data(static_cast<size_t>(rows(rank) * 3), static_cast<float>(rank));
        const auto request = rows_request(HVD_ALLGATHER, "g", data, 3);
        REQUIRE(engine.run(request, kPatience) == HVD_OK);
        std::vector<float> expected;
        for (int r = 0; r < size; ++r)
          expected.insert(expected.end(), static_cast<size_t>(rows(r) * 3), static_cast<float>(r));
        CHECK(result_of(*request) == expected);
      }
    });
  }
}

TEST_CASE("allgathers that are started together, so many that their counts take more than a line") {
  for (const HostOf& hosts : kLayouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      constexpr int kTensors = 40;
      std::vector<std::vector<float>> data;
      std::vector<std::shared_ptr<Request>> requests;
      for (int step = 0; step < 2; ++step) {  // by messages, then by the cache
        data.clear();
        requests.clear();
        for (int t = 0; t < kTensors; ++t) {
          data.emplace_back(static_cast<size_t>((rank + t) % 3 * 1000), static_cast<float>(rank + t));
          requests.push_back(rows_request(HVD_ALLGATHER, "g" + std::to_string(t), data.back(), 1));
        }
        for (const auto& request : requests) engine.submit(request);
        for (int t = 0; t < kTensors; ++t) {
          const Request& request = *requests[static_cast<size_t>(t)];
          REQUIRE(engine.wait(requests[static_cast<size_t>(t)], kPatience) == HVD_OK);
          std::vector<float> expected;
          for (int r = 0; r < size; ++r) {
            expected.insert(expected.end(), static_cast<size_t>((r + t) % 3 * 1000), static_cast<float>(r + t));
          }
          CHECK(result_of(request) == expected);
        }
      }
    });
  }
}

TEST_CASE("alltoall: each part reaches its rank, equal and unequal parts") {
  for (const HostOf& hosts : kLayouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      for (const int64_t scale : {1, 20000}) {
        std::vector<int64_t> splits;
        std::vector<float> data;
        for (int to = 0; to < size; ++to) {
          splits.push_back(scale * ((rank + to) % 3));
          data.insert(data.end(), static_cast<size_t>(splits.back() * 2), static_cast<float>(100 * rank + to));
        }
        const auto request = rows_request(HVD_ALLTOALL, "a", data, 2, splits);
        REQUIRE(engine.run(request, kPatience) == HVD_OK);
        std::vector<float> expected;
        std::vector<int64_t> received;
        for (int from = 0; from < size; ++from) {
          received.push_back(scale * ((from + rank) % 3));
          expected.insert(expected.end(), static_cast<size_t>(received.back() * 2),
                          static_cast<float>(100 * from + rank));
        }
        CHECK(result_of(*request) == expected);
        CHECK(request->received == received);
      }
      const std::vector<float> even(static_cast<size_t>(4 * size), static_cast<float>(rank));
      const auto request = rows_request(HVD_ALLTOALL, "even", even, 2);
      REQUIRE(engine.run(request, kPatience) == HVD_OK);
      for (int r = 0; r < size; ++r) CHECK(result_of(*request)[static_cast<size_t>(4 * r)] == static_cast<float>(r));
      if (size > 1) {
        const std::vector<float> odd(2);
        CHECK_THROWS_AS(engine.run(rows_request(HVD_ALLTOALL, "odd", odd, 2), kPatience), InvalidError);
      }
    });
  }
}

TEST_CASE("broadcast: every root reaches all ranks, with tensors of all sizes, fused ones too") {
  for (const HostOf& hosts : kLayouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      for (int root = 0; root < size; ++root) {
        std::vector<std::vector<float>> tensors;
        std::vector<std::shared_ptr<Request>> requests;
        for (const size_t n : {0ul, 1ul, 29ul, 300001ul}) tensors.emplace_back(n, static_cast<float>(rank + 1));
        for (std::vector<float>& data : tensors) {
          requests.push_back(sum_request("b" + std::to_string(data.size()), data));
          requests.back()->meta.op = HVD_BROADCAST;
          requests.back()->meta.root = root;
          engine.submit(requests.back());
        }
        for (const auto& request : requests) REQUIRE(engine.wait(request, kPatience) == HVD_OK);
        for (const std::vector<float>& data : tensors) {
          CHECK(data == std::vector<float>(data.size(), static_cast<float>(root + 1)));
        }
      }
    });
  }
}

TEST_CASE("reducescatter: every rank its rows, the first ones one more") {
  for (const HostOf& hosts : kLayouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      for (const int64_t rows : {0, 1, 2, 7, 100003}) {
        std::vector<float> data(static_cast<size_t>(rows * 3));
        for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(rank + static_cast<int>(i % 1000));
        int64_t first = 0, count = 0;
        for (int r = 0; r <= rank; ++r) {
          first += count;
          count = rows / size + (r < rows % size ? 1 : 0);
        }
        std::vector<float> output(static_cast<size_t>(count * 3));
        const auto request = request_of(HVD_REDUCESCATTER, "s");
        request->meta.dtype = HVD_FLOAT32;
        request->meta.shape = {rows, 3};
        request->input = data.data();
        request->output = output.data();
        REQUIRE(engine.run(request, kPatience) == HVD_OK);
        bool right = true;
        for (size_t i = 0; i < output.size(); ++i) {
          const auto at = static_cast<size_t>(first * 3) + i;
          right &= output[i] == static_cast<float>(size * (size - 1) / 2 + size * static_cast<int>(at % 1000));
        }
        CHECK(right);
      }
    });
  }
}

TEST_CASE("adasum: orthogonal vectors add, parallel ones average, for any number of ranks") {
  std::vector<HostOf> layouts = kLayouts;
  for (const int ranks : {4, 6, 7}) layouts.push_back(hosts_with({ranks}));
  for (const HostOf& hosts : layouts) {
    const RankGroup group(hosts);
    const int size = group.size();
    on_all_ranks(group, {}, [size](int rank, Engine& engine) {
      std::vector<float> orthogonal(100000), parallel(100000, 3);
      for (size_t i = 0; i < orthogonal.size(); ++i) {
        orthogonal[i] = static_cast<int>(i) % size == rank ? static_cast<float>(i % 17 + 1) : 0;
      }
      auto request = sum_request("o", orthogonal);
      request->meta.reduce_op = HVD_ADASUM;
      REQUIRE(engine.run(request, kPatience) == HVD_OK);
      request = sum_request("p", parallel);
      request->meta.reduce_op = HVD_ADASUM;
      REQUIRE(engine.run(request, kPatience) == HVD_OK);
      bool right = true;
      for (size_t i = 0; i < orthogonal.size(); ++i) {
        right &= orthogonal[i] == static_cast<float>(i % 17 + 1);
        right &= std::abs(parallel[i] - 3) < 1e-5f;
      }
      CHECK(right);
    });
  }
}

TEST_CASE("joined ranks give the neutral element, and the job goes on") {
  for (const HostOf& hosts : std::vector<HostOf>{hosts_with({3}), hosts_with({2, 1}), hosts_with({1, 2}),
                                                 hosts_with({1, 1, 1}), HostOf{{0, 1, 0}}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        // Rank r has r + 1 batches of data; names are new in the first round and cached later.
        for (int step = 0; step <= rank; ++step) {
          std::vector<float> data(5, 1), least(1, 7), tall(2, static_cast<float>(rank));
          REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);
          CHECK(data[0] == static_cast<float>(3 - step));
          auto request = sum_request("min", least);
          request->meta.reduce_op = HVD_MIN;
          REQUIRE(engine.run(request, kPatience) == HVD_OK);
          CHECK(least[0] == 7);
          request = rows_request(HVD_ALLGATHER, "g", tall, 1);
          REQUIRE(engine.run(request, kPatience) == HVD_OK);
          CHECK(request->result_shape[0] == 2 * (3 - step));
          CHECK(result_of(*request)[0] == static_cast<float>(step));
          if (step == 0) continue;
          request = sum_request("b", data);
          request->meta.op = HVD_BROADCAST;
          request->meta.root = 2;
          REQUIRE(engine.run(request, kPatience) == HVD_MISMATCH);
          CHECK(request->error.find("BROADCAST is not supported with Join at this time") == 0);
        }
        const auto join = request_of(HVD_JOIN, kJoinName);
        REQUIRE(engine.run(join, kPatience) == HVD_OK);
        CHECK(join->value == 2);
      }
    });
  }
}

TEST_CASE("who leaves right after join has done its part in what others had left pending") {
  for (const HostOf& hosts : std::vector<HostOf>{hosts_with({3}), hosts_with({2, 1}), hosts_with({1, 1, 1})}) {
    for (int late = 0; late < 3; ++late) {
      const RankGroup group(hosts);
      on_all_ranks(group, {}, [late](int rank, Engine& engine) {
        std::vector<float> data(1 << 20, 2), rows(1 << 18, 3);
        const auto sum = sum_request("sum", data);
        const auto gather = rows_request(HVD_ALLGATHER, "rows", rows, 1);
        if (rank == late) {
          engine.submit(sum);
          engine.submit(gather);
        }
        REQUIRE(engine.run(request_of(HVD_JOIN, kJoinName), kPatience) == HVD_OK);
        if (rank != late) return;
        CHECK(engine.wait(sum, kPatience) == HVD_OK);
        CHECK(data == std::vector<float>(1 << 20, 2));
        CHECK(engine.wait(gather, kPatience) == HVD_OK);
        CHECK(gather->result_shape[0] == 1 << 18);
      });
    }
  }
}

TEST_CASE("a joined rank's own tensor counts, also if another rank gives the name another shape") {
  for (const HostOf& hosts :
       std::vector<HostOf>{hosts_with({2}), hosts_with({3}), hosts_with({1, 1}), HostOf{{0, 1, 0}}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [&group](int rank, Engine& engine) {
      const int last = group.size() - 1;
      for (int round = 0; round < 20; ++round) {
        std::vector<float> data(3, 1), longer(5, 1), alone(1, 1);
        for (int i = 0; i < 2; ++i) REQUIRE(engine.run(sum_request("x", data), kPatience) == HVD_OK);  // it has an id
        const auto left = sum_request("x", data);
        if (rank == last) engine.submit(left);
        if (rank == 0) {
          REQUIRE(engine.run(sum_request("alone", alone), kPatience) == HVD_OK);  // when all others have joined
          const auto changed = sum_request("x", longer);
          CHECK(engine.run(changed, kPatience) == HVD_MISMATCH);
          CHECK(changed->error.find("Mismatched ALLREDUCE tensor shapes") == 0);
        }
        REQUIRE(engine.run(request_of(HVD_JOIN, kJoinName), kPatience) == HVD_OK);
        if (rank == last) CHECK(engine.wait(left, kPatience) == HVD_MISMATCH);
      }
    });
  }
}

TEST_CASE("process sets come and go, ids are used again, and a difference is an error on all ranks") {
  for (const HostOf& hosts :
       std::vector<HostOf>{hosts_with({4}), hosts_with({2, 2}), hosts_with({1, 1, 2}), HostOf{{0, 1, 0, 1}}}) {
    const RankGroup group(hosts);
    on_all_ranks(group, {}, [](int rank, Engine& engine) {
      const auto add = [&engine](std::vector<int64_t> ranks) {
        const auto request = request_of(HVD_ADD_PROCESS_SET, kChangeSetsName);
        request->meta.shape = std::move(ranks);
        const hvd_status status = engine.run(request, kPatience);
        return std::pair(status, status == HVD_OK ? std::to_string(request->value) : request->error);
      };
      const auto remove = [&engine](int set) {
        const auto request = request_of(HVD_REMOVE_PROCESS_SET, kChangeSetsName);
        request->meta.root = set;
        return engine.run(request, kPatience);
      };
      for (int round = 0; round < 20; ++round) {
        REQUIRE(add({0, 2}) == std::pair(HVD_OK, std::string("1")));
        REQUIRE(add({1, 2, 3}) == std::pair(HVD_OK, std::string("2")));
        std::vector<float> data(300000, 1);
        if (rank % 2 == 0) REQUIRE(engine.run(sum_request("x", data, 1), kPatience) == HVD_OK);
        if (rank >= 1) REQUIRE(engine.run(sum_request("x", data, 2), kPatience) == HVD_OK);
        CHECK(data[0] == (rank == 0 ? 2 : 4));
        REQUIRE(remove(1) == HVD_OK);
        CHECK_THROWS_AS(engine.run(sum_request("x", data, 1), kPatience), InvalidError);
        REQUIRE(remove(2) == HVD_OK);
        if (round % 5 == 0) {
          const auto [status, text] = add(rank == 3 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0, 3});
          CHECK(status == HVD_MISMATCH);
          CHECK(text.find("Attempted to register process set with mismatching size/values on different ranks") == 0);
        }
      }
    });
  }
}
