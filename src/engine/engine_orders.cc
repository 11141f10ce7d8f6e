// Standing orders, as the engine of a member follows them: see standing_orders.h.
#include <algorithm>

#include "engine/engine.h"

namespace hvd {

// With mutex_ held. Only the driver may send. Where there is none, who submits is about to take the role.
void Engine::submit_to_order(const std::shared_ptr<Request>& request, uint64_t order) {
  counters_.requests_standing.add();
  request->order = order;
  for_orders_.push_back(request);
  for_orders_wait_ = true;
  if (role_taken_) doorbells_.ring(world_.local_rank, interest::kSubmitted);
}

// With mutex_ held, after something was submitted under an order by who does not wait for it: if nobody drives, sends
// it from here. To wake the background thread for it would cost more.
void Engine::send_letters(std::unique_lock<std::mutex>& lock) {
  if (role_taken_ || stopping_) return;
  role_taken_ = true;
  lock.unlock();
  doorbells_.disarm();
  submitter_drives_ = true;
  progress();
  submitter_drives_ = false;
  lock.lock();
  release_role(Sleeper::kWaiter);
}

bool Engine::start_rounds() {
  if (!for_orders_wait_) return false;
  const std::lock_guard lock(mutex_);
  begin_rounds();
  return true;
}

// With mutex_ held.
void Engine::begin_rounds() {
  for_orders_wait_ = false;
  std::erase_if(for_orders_, [this](const std::shared_ptr<Request>& request) {
    if (request->status.load() != HVD_PENDING) return true;  // failed before we came to it
    StandingOrder& order = orders_.at(request->order);
    if (moves_rows(request->meta.op) && letter_bytes(request->counts, request->meta.row_bytes()) > order.longest) {
      revoke(request->order, order, true);
      return false;
    }
    if (order.no_memory) return false;  // its Evict is on its way
    order.last_round = settings_.now();
    request->logged = true;
    ++order.rounds;
    letter_is_near_ = !network_.empty() && !order.by_lane;
    executor_.add_to_order({request->order, order.rounds, order.tray, order.letters + order.rounds, order.by_lane},
                           request);
    return true;
  });
}

void Engine::apply(const Stand& entry) {
  if (entry.id >= ids_.size() || !ids_[entry.id].live || ids_[entry.id].order != 0 || orders_.contains(entry.order) ||
      entry.tray >= Trays::kTrays)
    throw BadMessage("the log lets id " + std::to_string(entry.id) + " stand");
  const std::lock_guard lock(mutex_);
  const std::vector<int>& ranks = sets_[static_cast<size_t>(ids_[entry.id].key.set)];
  if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) return;
  const bool shares_host = members_here(ids_[entry.id].key.set) > 1;
  const Meta& meta = ids_[entry.id].meta;
  const bool by_lane = goes_by_lane(world_, ranks, meta.bytes());
  if ((shares_host || by_lane) && entry.tray < 0) throw BadMessage("a standing order without a tray");
  if (meta.bytes() > (by_lane ? kLongestSumByLane : Trays::kMostBytes)) throw BadMessage("a standing order for much");
  ids_[entry.id].order = entry.order;
  StandingOrder& order = orders_[entry.order];
  order.last_round = settings_.now();
  order.tray = entry.tray;
  order.by_lane = by_lane;
  order.letters = entry.letters;
  order.looks_for_idle = ranks.front() == world_.rank;
  for (const int rank : ranks) {
    if (Link* const link = network_.link(rank)) link->boxes().open(entry.order);
  }
  order.longest = moves_rows(meta.op) ? longest_letter_on_host(meta.op, segment_->crowded())
                  : by_lane           ? first_chunk_of_order(meta.bytes())
                                      : meta.bytes();
  order.no_memory = shares_host && !(segment_->reserve_tray(entry.tray, world_.local_rank, order.longest) &&
                                     (!by_lane || executor_.open_lane(ids_[entry.id].key.set, entry.tray)));
  if (order.no_memory) revoke(entry.order, order, true);
}

// With mutex_ held: its Evict has been read.
void Engine::end_order(uint64_t number) {
  // What was submitted before that is a round like those that were begun: if all members have it, it ends. Else who has
  // submitted it before he asked for his set to be removed might find it gone.
  begin_rounds();
  StandingOrder& order = orders_.at(number);
  order.ended = true;
  std::erase_if(for_orders_, [&](const std::shared_ptr<Request>& request) {
    if (request->order != number) return false;
    request->order = 0;
    send(Submit{request->key, request->meta, request->wanted}, request->wanted);
    return true;
  });
  send(Ended{number, order.rounds}, true);
}

void Engine::apply(const Settle& entry) {
  const auto found = orders_.find(entry.order);
  if (found == orders_.end()) return;  // of others
  StandingOrder& order = found->second;
  if (!order.ended || order.rounds < entry.rounds || order.rounds > entry.rounds + 1)
    throw BadMessage("the log settles standing order " + std::to_string(entry.order));
  if (order.rounds > entry.rounds) take_back(entry.order);
  order.settled = true;
  close_order(entry.order);
}

// The round that was begun under an order is not going to end. It counts as submitted to the coordinator, or if its set
// is gone, not at all.
void Engine::take_back(uint64_t number) {
  const StandingOrder& order = orders_.at(number);
  for (int r = 0; r < world_.size; ++r) {
    Link* const link = network_.link(r);
    if (link == nullptr) continue;
    link->keep_letters(number);
    // Nothing is there, unless the job fails.
    if (order.by_lane) link->let_go(Group::lane_of_tray(order.tray));
  }
  const std::shared_ptr<Request> request = executor_.withdraw(number);
  if (!request) return;
  const std::lock_guard lock(mutex_);
  request->logged = false;
  request->order = 0;
  if (sets_[static_cast<size_t>(request->key.set)].empty()) orphan(request);
}

// Forgets an order that is settled and has no round any more.
void Engine::close_order(uint64_t number) {
  const auto found = orders_.find(number);
  if (found == orders_.end() || !found->second.settled || executor_.has_round(number)) return;
  for (int r = 0; r < world_.size; ++r) {
    if (Link* const link = network_.link(r)) link->boxes().close(number);
  }
  const bool has_tray = found->second.tray >= 0;
  orders_.erase(found);
  if (!has_tray) return;
  const std::lock_guard lock(mutex_);
  send(Vacated{number}, false);
}

// A round has ended well.
void Engine::round_ended(uint64_t number, bool wanted) {
  const auto found = orders_.find(number);
  if (found == orders_.end()) return;
  StandingOrder& order = found->second;
  // One that ends while it is submitted leaves no time for anybody to wait for it.
  if (wanted) {
    order.unwanted = 0;
  } else if (!submitter_drives_) {
    ++order.unwanted;
  }
  if (order.unwanted >= StandingOrder::kUnwanted) {
    const std::lock_guard lock(mutex_);
    revoke(number, order);
  }
  close_order(number);
}

// With mutex_ held.
void Engine::revoke(uint64_t number, StandingOrder& order, bool unfit) {
  if (order.revoking || order.ended) return;
  order.revoking = true;
  send(Revoke{number, unfit}, true);
}

// After a sleep the next pass also looks for what takes too long, for which most passes don't spare the time: there may
// be few of them, one a second.
void Engine::look_closely_next() {
  order_looks_ = kPassesPerLook - 1;
  if (coordinator_) coordinator_->look_closely_next();
  if (delegate_) delegate_->look_closely_next();
}

// Rounds that wait for too long, and orders that nobody uses.
void Engine::look_after_orders() {
  if (orders_.empty() || ++order_looks_ % kPassesPerLook != 0) return;
  const Nanoseconds now = settings_.now(), patience = patience_of_orders(settings_);
  for (auto& [number, order] : orders_) {
    const Nanoseconds age = now - order.last_round;
    const bool waits = patience > 0 && age >= patience && executor_.waits_for_letters(number);
    const bool idle = order.looks_for_idle && age >= StandingOrder::kIdle && !executor_.has_round(number);
    if (!waits && !idle) continue;
    const std::lock_guard lock(mutex_);
    revoke(number, order);
  }
}

// The job has failed, and nobody will send what is missing.
void Engine::take_back_all() {
  for (const auto& [number, order] : orders_) take_back(number);
}

}  // namespace hvd
