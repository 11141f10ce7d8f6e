#include "engine/world.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "transport/errors.h"

namespace hvd {

World World::make(int rank, std::vector<std::string> hosts, std::vector<int> host_of, std::vector<int32_t> pids) {
  World world;
  world.rank = rank;
  world.size = static_cast<int>(host_of.size());
  if (rank < 0 || rank >= world.size || pids.size() != host_of.size()) {
    throw InvalidError("rank " + std::to_string(rank) + " of " + std::to_string(world.size));
  }
  world.ranks_of_host.resize(hosts.size());
  for (int r = 0; r < world.size; ++r) {
    const int host = host_of[static_cast<size_t>(r)];
    if (host < 0 || static_cast<size_t>(host) >= hosts.size()) {
      throw InvalidError("rank " + std::to_string(r) + " is on host " + std::to_string(host) + " of " +
                         std::to_string(hosts.size()));
    }
    std::vector<int>& ranks = world.ranks_of_host[static_cast<size_t>(host)];
    world.local_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (world.ranks_of_host[h].empty()) throw InvalidError("host " + hosts[h] + " has no ranks");
  }
  world.host = host_of[static_cast<size_t>(rank)];
  world.local_rank = world.local_of[static_cast<size_t>(rank)];
  world.local_size = static_cast<int>(world.here().size());
  world.hosts = std::move(hosts);
  world.host_of = std::move(host_of);
  world.pids = std::move(pids);
  world.process_sets.emplace_back(static_cast<size_t>(world.size));
  std::iota(world.process_sets[0].begin(), world.process_sets[0].end(), 0);
  return world;
}

std::vector<int> World::hosts_of(const std::vector<int>& ranks) const {
  std::vector<int> found;
  for (const int r : ranks) found.push_back(host_of[static_cast<size_t>(r)]);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

size_t World::number_on_each_host(const std::vector<int>& ranks) const {
  std::vector<size_t> numbers(hosts.size());
  for (const int each : ranks) ++numbers[static_cast<size_t>(host_of[static_cast<size_t>(each)])];
  std::erase(numbers, size_t{0});
  const bool equal = std::adjacent_find(numbers.begin(), numbers.end(), std::not_equal_to<>()) == numbers.end();
  return equal && !numbers.empty() ? numbers.front() : 0;
}

std::string World::describe(int of_rank) const {
  const auto i = static_cast<size_t>(of_rank);
  return "rank " + std::to_string(of_rank) + " (pid " + std::to_string(pids[i]) + " on host " +
         hosts[static_cast<size_t>(host_of[i])] + ")";
}

}  // namespace hvd
