// Tensors that some ranks have submitted and others have not, for too long.
#include <algorithm>

#include "engine/coordinator.h"
#include "engine/logging.h"
#include "engine/mismatch.h"
#include "transport/durations.h"

namespace hvd {
namespace {

// A host looks once a second; what it saw longer ago than this has changed since.
constexpr Nanoseconds kFresh = 3 * Coordinator::kStallCheckInterval;

}  // namespace

void Coordinator::check_stalls(Nanoseconds now) {
  // Those who have joined are not waited for.
  const auto without_joined = [this](std::vector<int> ranks) {
    std::erase_if(ranks, [this](int rank) { return std::find(joined_.begin(), joined_.end(), rank) != joined_.end(); });
    return ranks;
  };
  for (auto& [key, pending] : pending_) {
    std::vector<int> arrived, missing;
    for (const int rank : sets_[static_cast<size_t>(key.set)]) {
      (pending.by_rank.contains(rank) ? arrived : missing).push_back(rank);
    }
    report_stall(key, pending.by_rank.begin()->second, arrived, without_joined(missing), now - pending.since,
                 pending.last_warning, now);
  }
  for (uint32_t id = 0; id < static_cast<uint32_t>(segment_->cache_capacity()); ++id) {
    Name& name = names_[id];
    if (name.state != IdState::kLive || name.partial_since == 0) continue;
    std::erase_if(name.waiting, [now](const auto& item) { return now - item.second.when > kFresh; });
    if (name.arrived.empty() && name.waiting.empty()) {
      name.partial_since = name.last_warning = 0;
      continue;
    }
    std::vector<int> arrived, missing;
    for (const int rank : sets_[static_cast<size_t>(name.key.set)]) {
      const int host = world_.host_of[static_cast<size_t>(rank)];
      bool is_there = std::find(name.arrived.begin(), name.arrived.end(), host) != name.arrived.end();
      if (const auto seen = name.waiting.find(host); !is_there && seen != name.waiting.end()) {
        const std::vector<int>& ranks = seen->second.ranks;
        is_there = std::find(ranks.begin(), ranks.end(), rank) == ranks.end();
      }
      (is_there ? arrived : missing).push_back(rank);
    }
    report_stall(name.key, name.meta, arrived, without_joined(missing), now - name.partial_since, name.last_warning,
                 now);
  }
}

void Coordinator::note_missing(int host, uint32_t id, const std::vector<int>& missing) {
  Name& name = name_of_id(id);
  if (name.state != IdState::kLive || name.ready) return;
  const Nanoseconds now = settings_.now();
  name.waiting[host] = {missing, now};
  if (name.partial_since == 0) name.partial_since = now;
}

void Coordinator::report_stall(const Key& key, const Meta& meta, const std::vector<int>& arrived,
                               const std::vector<int>& missing, Nanoseconds age, Nanoseconds& last_warning,
                               Nanoseconds now) {
  if (missing.empty()) return;  // it became complete while we looked
  const auto seconds = static_cast<double>(age) * 1e-9;
  const std::string what = std::string(name_of(meta.op)) + " of tensor '" + key.name + "'" +
                           (key.set == 0 ? "" : " in process set " + std::to_string(key.set)) + " waits for " +
                           ranks_text(missing) + " for " + measured_seconds_text(seconds) + "; submitted by " +
                           ranks_text(arrived) + ".";
  if (settings_.stall_shutdown > 0 && seconds >= settings_.stall_shutdown) {
    stop(HVD_STALLED, "Horovod has been shut down because of a stall: " + what +
                          " (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS was reached.)");
    return;
  }
  if (settings_.stall_warning <= 0 || seconds < settings_.stall_warning) return;
  if (last_warning != 0 && static_cast<double>(now - last_warning) * 1e-9 < settings_.stall_warning) return;
  last_warning = now;
  counters_.stall_warnings.add();
  log(LogLevel::kWarning,
      "Stalled: " + what + " Do all ranks submit the same tensors, or did one leave its loop early or hang?");
}

}  // namespace hvd
