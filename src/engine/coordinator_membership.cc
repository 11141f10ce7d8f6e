// Who takes part: ranks that have joined, process sets that come and go.
#include <algorithm>

#include "engine/coordinator.h"
#include "transport/channel.h"

namespace hvd {

bool Coordinator::works_with_join(hvd_op op) {
  return op == HVD_ALLREDUCE || op == HVD_ALLGATHER || op == HVD_ALLTOALL || op == HVD_BARRIER;
}

// ---- Joined ranks ---------------------------------------------------------------------------------------------------

void Coordinator::join(int rank) {
  joined_.push_back(rank);
  if (joined_.size() < sets_[0].size()) return;
  // What ranks have left pending ends first: after JoinEnd nobody contributes on their behalf any more.
  submit_for_joined();
  for (Queue& queue : queues_) {
    if (!queue.ids.empty()) close(queue);
  }
  append(JoinEnd{joined_.back()});
  joined_.clear();
}

// Submits, for those who have joined, what all others of a set have submitted.
void Coordinator::submit_for_joined() {
  const auto has_joined = [this](int rank) { return std::find(joined_.begin(), joined_.end(), rank) != joined_.end(); };
  std::vector<Key> complete_now;
  for (const auto& [key, pending] : pending_) {
    const auto& ranks = sets_[static_cast<size_t>(key.set)];
    const bool all = std::all_of(ranks.begin(), ranks.end(),
                                 [&](int rank) { return pending.by_rank.contains(rank) || has_joined(rank); });
    if (all) complete_now.push_back(key);
  }
  for (const Key& key : complete_now) {
    Pending pending = std::move(pending_[key]);
    pending_.erase(key);
    complete(key, std::move(pending));
  }
  for (uint32_t id = 0; id < static_cast<uint32_t>(segment_->cache_capacity()); ++id) {
    Name& name = names_[id];
    if (name.state != IdState::kLive) continue;
    Slot& slot = segment_->slot(static_cast<int>(id));
    const uint64_t count = slot.arrived.load();
    if (count % name.members == 0) continue;
    const std::vector<int> missing = missing_ranks(id);
    if (!std::all_of(missing.begin(), missing.end(), has_joined)) continue;
    if (!works_with_join(name.meta.op)) {
      withdraw(id);  // the others send full requests, which are refused
      continue;
    }
    // Who has toggled its bit adds its arrival too, if not now then in a moment: one of us sees the round complete.
    for (const int rank : missing) {
      const int local = world_.local_of(rank);
      slot.present[local / 64].fetch_xor(uint64_t{1} << (local % 64));
      if ((slot.arrived.fetch_add(1) + 1) % name.members != 0) continue;
      name.rounds = current_round(id);
      add_ready(id, slot.wanted.load() >= name.rounds);
    }
  }
}

// The members that have not arrived in the current round of a slot.
std::vector<int> Coordinator::missing_ranks(uint32_t id) const {
  const Slot& slot = segment_->slot(static_cast<int>(id));
  const bool arrived_bit = (slot.arrived.load() / names_[id].members + 1) % 2 != 0;
  std::vector<int> missing;
  for (const int rank : sets_[static_cast<size_t>(names_[id].key.set)]) {
    const int local = world_.local_of(rank);
    const bool bit = (slot.present[local / 64].load() >> (local % 64) & 1) != 0;
    if (bit != arrived_bit) missing.push_back(rank);
  }
  return missing;
}

// ---- Process sets ---------------------------------------------------------------------------------------------------

void Coordinator::change_sets(const Meta& meta) {
  if (meta.op == HVD_ADD_PROCESS_SET) {
    size_t set = 1;
    while (set < sets_.size() && (!sets_[set].empty() || closing_.contains(static_cast<int>(set)))) ++set;
    if (set == static_cast<size_t>(Segment::kMaxSets)) {
      Refuse refuse;
      refuse.key.name = kChangeSetsName;
      refuse.text = "There are already " + std::to_string(set - 1) + " process sets, the most that are possible.";
      append(refuse);
      return;
    }
    if (set == sets_.size()) sets_.emplace_back();
    sets_[set].assign(meta.shape.begin(), meta.shape.end());
    // Its channel may have belonged to an earlier set, with which everyone is done.
    for (int r = 0; r < segment_->local_size(); ++r) Channel::clear(*segment_, static_cast<int>(set), r);
    append(AddSet{static_cast<int32_t>(set), sets_[set]});
    return;
  }
  const int set = meta.root;
  for (uint32_t id = 0; id < names_.size(); ++id) {
    if (names_[id].state != IdState::kLive || names_[id].key.set != set) continue;
    if (names_[id].ready) close(queues_[static_cast<size_t>(names_[id].queue)]);
    if (names_[id].state == IdState::kLive) withdraw(id);
  }
  std::erase_if(pending_, [set](const auto& item) { return item.first.set == set; });
  std::erase_if(no_id_yet_, [set](const auto& item) { return item.first.set == set; });
  sets_[static_cast<size_t>(set)].clear();
  closing_[set] = world_.size;
  append(RemoveSet{set});
}

void Coordinator::take(int, const Closed& message) {
  const auto closing = closing_.find(message.set);
  if (closing == closing_.end() || --closing->second > 0) return;
  closing_.erase(closing);
  append(RemoveEnd{message.set});
}

}  // namespace hvd
