// Tensors that some ranks have submitted and others have not, for too long.
#include <algorithm>

#include "engine/coordinator.h"
#include "engine/logging.h"
#include "engine/mismatch.h"

namespace hvd {

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
    if (name.state != IdState::kLive) continue;
    const uint64_t count = segment_->slot(static_cast<int>(id)).arrived.load();
    const uint64_t round = count / name.members + 1;
    if (count % name.members == 0) {
      name.partial_since = 0;
      continue;
    }
    if (name.partial_since == 0 || name.partial_round != round) {
      name.partial_round = round;
      name.partial_since = now;
      name.last_warning = 0;
      continue;
    }
    const std::vector<int> missing = missing_ranks(id);
    std::vector<int> arrived = sets_[static_cast<size_t>(name.key.set)];
    std::erase_if(arrived, [&](int rank) { return std::find(missing.begin(), missing.end(), rank) != missing.end(); });
    report_stall(name.key, name.meta, arrived, without_joined(missing), now - name.partial_since, name.last_warning,
                 now);
  }
}

void Coordinator::report_stall(const Key& key, const Meta& meta, const std::vector<int>& arrived,
                               const std::vector<int>& missing, Nanoseconds age, Nanoseconds& last_warning,
                               Nanoseconds now) {
  if (missing.empty()) return;  // it became complete while we looked
  const auto seconds = static_cast<double>(age) * 1e-9;
  const std::string what = std::string(name_of(meta.op)) + " of tensor '" + key.name + "'" +
                           (key.set == 0 ? "" : " in process set " + std::to_string(key.set)) + " waits for " +
                           ranks_text(missing) + " for " + std::to_string(static_cast<int64_t>(seconds)) +
                           " s; submitted by " + ranks_text(arrived) + ".";
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
