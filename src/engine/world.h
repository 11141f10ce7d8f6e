// Who is in the job, and the settings of the engine: everything that is fixed from init to shutdown.
#ifndef HOROVOD_ENGINE_WORLD_H_
#define HOROVOD_ENGINE_WORLD_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hvd {

struct World {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::string host = "localhost";
  std::vector<int32_t> pids = {0};             // by local rank
  std::vector<std::vector<int>> process_sets;  // by id, global ranks ascending; set 0 has all

  bool is_coordinator() const { return rank == 0; }
  // This version runs on one host, where the local rank is the global one. The two maps are where that will change.
  int local_of(int global_rank) const { return global_rank; }
  int global_of(int local) const { return local; }
  // "rank 3 (pid 4711 on host a)"
  std::string describe(int local) const {
    return "rank " + std::to_string(global_of(local)) + " (pid " + std::to_string(pids[static_cast<size_t>(local)]) +
           " on host " + host + ")";
  }
};

using Nanoseconds = uint64_t;

inline Nanoseconds monotonic_now() {
  return static_cast<Nanoseconds>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

struct Settings {
  int64_t fusion_threshold = 128 << 20;
  double heartbeat_timeout = 30;
  double stall_warning = 60;
  double stall_shutdown = 0;
  Nanoseconds (*now)() = monotonic_now;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_WORLD_H_
