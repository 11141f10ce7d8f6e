// Standing orders, as the coordinator gives and ends them: see standing_orders.h.
#include <algorithm>

#include "engine/coordinator.h"
#include "transport/letter_boxes.h"

namespace hvd {
namespace {

// So many times in a row a name must have been run alone, with somebody waiting for it.
constexpr int kRounds = 8;
// Everybody sends to everybody: that is quick while hosts are few and payloads small.
constexpr size_t kMostHosts = 8;
// So many orders stand at a time; names beyond that are agreed on as ever.
constexpr size_t kMostOrders = 256;

}  // namespace

// Called for every batch that is about to be logged.
void Coordinator::consider_order(uint32_t id, bool alone_and_wanted) {
  Name& name = names_[id];
  name.alone = alone_and_wanted ? name.alone + 1 : 0;
  if (name.alone < kRounds || !may_stand(id)) return;
  name.order = ++last_order_;
  orders_[name.order] = id;
  append(Stand{name.order, id});
}

bool Coordinator::may_stand(uint32_t id) const {
  const Name& name = names_[id];
  const size_t hosts = hosts_of_set_[static_cast<size_t>(name.key.set)].size();
  const bool each_alone = sets_[static_cast<size_t>(name.key.set)].size() == hosts;
  const bool few =
      hosts >= 2 && hosts <= kMostHosts && name.bytes > 0 && name.bytes * (hosts - 1) <= LetterBoxes::kMostBytes;
  const bool sums = name.meta.op == HVD_ALLREDUCE && name.meta.reduce_op != HVD_ADASUM && !settings_.allreduce_ring;
  return cached(id) && each_alone && few && sums && joined_.empty() && orders_.size() < kMostOrders && name.order == 0;
}

// The id is being withdrawn, and the order with it.
void Coordinator::end_order(Name& name) {
  if (name.order == 0) return;
  orders_.erase(name.order);
  ending_orders_[name.order] = {name.key, name.meta, {}};
  name.order = 0;
}

void Coordinator::end_all_orders() {
  std::vector<uint32_t> ids;
  for (const auto& [order, id] : orders_) ids.push_back(id);
  for (const uint32_t id : ids) withdraw(id);
}

void Coordinator::take(int, const Revoke& message) {
  if (const auto found = orders_.find(message.order); found != orders_.end()) withdraw(found->second);
}

void Coordinator::take(int rank, const Ended& message) {
  const auto found = ending_orders_.find(message.order);
  if (found == ending_orders_.end() || !found->second.members.insert({rank, message.rounds}).second) {
    throw BadMessage(world_.describe(rank) + " has ended standing order " + std::to_string(message.order));
  }
  // A removed set is not among sets_ any more: one answer comes from each host that had a member.
  EndingOrder& ending = found->second;
  if (ending.members.size() < hosts_of_set_[static_cast<size_t>(ending.key.set)].size()) return;
  const EndingOrder whole = std::move(ending);
  ending_orders_.erase(found);
  uint64_t least = message.rounds;
  for (const auto& [member, rounds] : whole.members) least = std::min(least, rounds);
  append(Settle{message.order, least});
  for (const auto& [member, rounds] : whole.members) {
    if (rounds > least + 1) throw BadMessage(world_.describe(member) + " was two rounds ahead of the others");
    if (rounds > least) take(member, Submit{whole.key, whole.meta, true});
  }
  if (!joined_.empty()) end_join();
}

}  // namespace hvd
