// Standing orders, as the coordinator gives and ends them: see standing_orders.h.
#include <algorithm>

#include "engine/coordinator.h"
#include "engine/standing_orders.h"

namespace hvd {
namespace {

// So many times in a row a name must have been run alone, with somebody waiting for it.
constexpr int kRounds = 4;
// Everybody sends to everybody, and folds what all have sent: that is quick while members are few.
constexpr size_t kMostMembers = 8;
// So many orders stand at a time; names beyond that are agreed on as ever.
constexpr size_t kMostOrders = 256;
// So many names are remembered that are not to stand again.
constexpr size_t kMostUnfit = 1024;

}  // namespace

// Called for every batch that is about to be logged.
void Coordinator::consider_order(uint32_t id, bool alone_and_wanted) {
  Name& name = names_[id];
  name.alone = alone_and_wanted ? name.alone + 1 : 0;
  if (name.alone < kRounds || !may_stand(id)) return;
  name.order = ++last_order_;
  orders_[name.order] = id;
  Stand stand{name.order, id};
  if (needs_tray(name)) {
    stand.tray = free_tray();
    Tray& tray = trays_[static_cast<size_t>(stand.tray)];
    tray.order = name.order;
    tray.members = sets_[static_cast<size_t>(name.key.set)].size();
    stand.letters = tray.letters;
  }
  append(stand);
}

bool Coordinator::may_stand(uint32_t id) const {
  const Name& name = names_[id];
  const size_t members = sets_[static_cast<size_t>(name.key.set)].size();
  if (members < 2 || members > kMostMembers || orders_.size() >= kMostOrders) return false;
  // How many rows there are, and whether there is memory, only the members know: whoever has too many, or too little,
  // says so.
  const bool small = moves_rows(name.meta.op) || (name.bytes > 0 && name.bytes <= most_bytes(name));
  const bool one_host = hosts_of_set_[static_cast<size_t>(name.key.set)].size() == 1;
  const hvd_op op = name.meta.op;
  const bool sums = op == HVD_ALLREDUCE && name.meta.reduce_op != HVD_ADASUM && (one_host || !settings_.allreduce_ring);
  const bool others = one_host && (op == HVD_BROADCAST || op == HVD_REDUCESCATTER || moves_rows(op));
  return cached(id) && name.order == 0 && name.sequence == 0 && (sums || others) && small &&
         !unfit_.contains(name.key) && joined_.empty() && (!needs_tray(name) || free_tray() >= 0);
}

bool Coordinator::shares_hosts(int set) const {
  return sets_[static_cast<size_t>(set)].size() > hosts_of_set_[static_cast<size_t>(set)].size();
}

bool Coordinator::needs_tray(const Name& name) const {
  return shares_hosts(name.key.set) || goes_by_lane(world_, sets_[static_cast<size_t>(name.key.set)], name.bytes);
}

// Of an operation that is worth an order.
uint64_t Coordinator::most_bytes(const Name& name) const {
  const auto set = static_cast<size_t>(name.key.set);
  if (hosts_of_set_[set].size() == 1) return longest_letter_on_host(name.meta.op, segment_->crowded());
  return world_.number_on_each_host(sets_[set]) == 0 ? kLongestLetterOfMixed : kLongestSumByLane;
}

int Coordinator::free_tray() const {
  const auto found = std::find_if(trays_.begin(), trays_.end(), [](const Tray& tray) { return tray.order == 0; });
  return found == trays_.end() ? -1 : static_cast<int>(found - trays_.begin());
}

// The id is being withdrawn, and the order with it.
void Coordinator::end_order(Name& name) {
  if (name.order == 0) return;
  orders_.erase(name.order);
  ending_orders_[name.order] = {name.key, name.meta, sets_[static_cast<size_t>(name.key.set)].size(), {}};
  name.order = 0;
}

void Coordinator::end_all_orders() {
  std::vector<uint32_t> ids;
  for (const auto& [order, id] : orders_) ids.push_back(id);
  for (const uint32_t id : ids) withdraw(id);
}

void Coordinator::take(int, const Revoke& message) {
  const auto found = orders_.find(message.order);
  if (found == orders_.end()) return;
  if (message.unfit) {
    if (unfit_.size() >= kMostUnfit) unfit_.clear();  // they may try again
    unfit_.insert(names_[found->second].key);
  }
  withdraw(found->second);
}

void Coordinator::take(int rank, const Ended& message) {
  const auto found = ending_orders_.find(message.order);
  if (found == ending_orders_.end() || !found->second.members.insert({rank, message.rounds}).second) {
    throw BadMessage(world_.describe(rank) + " has ended standing order " + std::to_string(message.order));
  }
  EndingOrder& ending = found->second;
  if (ending.members.size() < ending.expected) return;
  const EndingOrder whole = std::move(ending);
  ending_orders_.erase(found);
  uint64_t least = message.rounds;
  for (const auto& [member, rounds] : whole.members) least = std::min(least, rounds);
  append(Settle{message.order, least});
  for (Tray& tray : trays_) {
    if (tray.order == message.order) tray.letters += least + 1;  // one of them perhaps in vain
  }
  for (const auto& [member, rounds] : whole.members) {
    if (rounds > least + 1) throw BadMessage(world_.describe(member) + " was two rounds ahead of the others");
    if (rounds > least) take(member, Submit{whole.key, whole.meta, true});
  }
  if (!joined_.empty()) end_join();
}

void Coordinator::take(int rank, const Vacated& message) {
  const auto tray = std::find_if(trays_.begin(), trays_.end(),
                                 [&](const Tray& each) { return each.order == message.order && each.order != 0; });
  if (tray == trays_.end() || orders_.contains(message.order) || ending_orders_.contains(message.order)) {
    throw BadMessage(world_.describe(rank) + " vacates the tray of standing order " + std::to_string(message.order));
  }
  if (--tray->members == 0) tray->order = 0;
}

}  // namespace hvd
