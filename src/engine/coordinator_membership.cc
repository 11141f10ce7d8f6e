// Who takes part: ranks that have joined, process sets that come and go.
#include <algorithm>

#include "engine/coordinator.h"

namespace hvd {

bool Coordinator::works_with_join(hvd_op op) {
  return op == HVD_ALLREDUCE || op == HVD_ALLGATHER || op == HVD_ALLTOALL || op == HVD_BARRIER;
}

// ---- Joined ranks ---------------------------------------------------------------------------------------------------

void Coordinator::join(int rank) {
  joined_.push_back(rank);
  end_all_orders();
  end_all_sequences();
  end_join();
}

// If everybody has joined, and nothing that was submitted before is still unheard of.
void Coordinator::end_join() {
  if (joined_.size() < sets_[0].size() || !ending_orders_.empty() || !ending_sequences_.empty()) return;
  if (!withdrawn_.empty()) return;
  // What ranks have left pending ends first: after JoinEnd nobody contributes on their behalf any more.
  submit_for_joined();
  for (Queue& queue : queues_) {
    if (!queue.ids.empty()) close(queue);
  }
  append(JoinEnd{joined_.back()});
  joined_.clear();
}

bool Coordinator::has_joined(int rank) const {
  return std::find(joined_.begin(), joined_.end(), rank) != joined_.end();
}

// Whether a rank, also one that has joined, may still have to say in full what it had submitted by this name: not all
// have read that its id was withdrawn.
bool Coordinator::is_withdrawn(const Key& key) const {
  return std::any_of(withdrawn_.begin(), withdrawn_.end(),
                     [&](const auto& withdrawn) { return names_[withdrawn.first].key == key; });
}

// Completes what all others of a set have submitted. The desks have seen to hosts on which others are left.
void Coordinator::submit_for_joined() {
  std::vector<Key> complete_now;
  for (const auto& [key, pending] : pending_) {
    const auto& ranks = sets_[static_cast<size_t>(key.set)];
    const bool all = std::all_of(ranks.begin(), ranks.end(),
                                 [&](int rank) { return pending.by_rank.contains(rank) || has_joined(rank); });
    if (all && !is_withdrawn(key)) complete_now.push_back(key);
  }
  for (const Key& key : complete_now) {
    Pending pending = std::move(pending_[key]);
    pending_.erase(key);
    complete(key, std::move(pending));
  }
  if (hosts_.alone()) return;
  for (uint32_t id = 0; id < static_cast<uint32_t>(segment_->cache_capacity()); ++id) {
    Name& name = names_[id];
    if (name.state != IdState::kLive || name.arrived.empty()) continue;
    const auto& ranks = sets_[static_cast<size_t>(name.key.set)];
    const bool all = std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      const int host = world_.host_of[static_cast<size_t>(rank)];
      return has_joined(rank) || std::find(name.arrived.begin(), name.arrived.end(), host) != name.arrived.end();
    });
    if (!all) continue;
    name.with_joined = true;
    end_round(id);
  }
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
    if (set == sets_.size()) {
      sets_.emplace_back();
      hosts_of_set_.emplace_back();
    }
    sets_[set].assign(meta.shape.begin(), meta.shape.end());
    hosts_of_set_[set] = world_.hosts_of(sets_[set]);
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
  std::erase_if(unfit_, [set](const Key& key) { return key.set == set; });
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
