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
  int host = 0;                                 // ours
  std::vector<std::string> hosts;               // names
  std::vector<std::vector<int>> ranks_of_host;  // ascending: the index is the local rank
  std::vector<int> host_of, local_of;           // by rank
  std::vector<int32_t> pids;                    // by rank
  std::vector<std::vector<int>> process_sets;   // by id, ranks ascending; set 0 has all

  // Process sets besides the one with all ranks may be added afterwards. Throws InvalidError.
  static World make(int rank, std::vector<std::string> hosts, std::vector<int> host_of, std::vector<int32_t> pids);

  int n_hosts() const { return static_cast<int>(hosts.size()); }
  bool is_coordinator() const { return rank == 0; }
  // Whether this rank speaks for its host.
  bool is_leader() const { return local_rank == 0; }
  bool is_local(int other) const { return host_of[static_cast<size_t>(other)] == host; }
  int leader_of(int of_host) const { return ranks_of_host[static_cast<size_t>(of_host)][0]; }
  int local(int of_rank) const { return local_of[static_cast<size_t>(of_rank)]; }
  int global(int local_rank_here) const { return here()[static_cast<size_t>(local_rank_here)]; }
  // The ranks of our host.
  const std::vector<int>& here() const { return ranks_of_host[static_cast<size_t>(host)]; }
  // The hosts of some ranks, ascending.
  std::vector<int> hosts_of(const std::vector<int>& ranks) const;
  // How many of them are on each of these, if as many on all; else 0.
  size_t number_on_each_host(const std::vector<int>& ranks) const;
  // "rank 3 (pid 4711 on host a)"
  std::string describe(int of_rank) const;
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
  bool allreduce_ring = false;
  Nanoseconds (*now)() = monotonic_now;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_WORLD_H_
