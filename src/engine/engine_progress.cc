// What the driver does in one pass: decide (coordinator), read the log, move batches, notice lost peers.
#include <algorithm>

#include "engine/engine.h"
#include "engine/logging.h"

namespace hvd {

bool Engine::progress() {
  if (broken_) return false;
  try {
    bool moved = coordinator_ && coordinator_->poll();
    moved |= flush_outbox();
    moved |= read_log();
    moved |= executor_.poll();
    if (!closing_sets_.empty()) close_sets();
    return moved;
  } catch (const std::exception& error) {
    // Only a damaged segment or no memory gets here. Nothing can be trusted any more.
    log(LogLevel::kError, std::string("the engine gives up: ") + error.what());
    fail(HVD_SYSTEM, std::string("Horovod has been shut down: ") + error.what());
    break_down(world_.local_rank);
    return true;
  }
}

bool Engine::flush_outbox() {
  if (!outbox_waits_) return false;
  const std::lock_guard lock(mutex_);
  bool moved = false;
  while (!outbox_.empty() && requests_.write(outbox_.front(), segment_->request_lines(world_.local_rank).read.load())) {
    outbox_.pop_front();
    moved = true;
  }
  outbox_waits_ = !outbox_.empty();
  if (moved) doorbells_.ring(world_.local_of(0), interest::kRequest | interest::kUrgent);
  return moved;
}

// ---- The log --------------------------------------------------------------------------------------------------------

bool Engine::read_log() {
  bool moved = false;
  while (log_.next([this](BytesView bytes) {
    counters_.log_entries.add();
    std::visit([this](const auto& entry) { apply(entry); }, decode_log_entry(bytes));
  })) {
    moved = true;
  }
  if (log_.broken()) throw BadMessage("in the log");
  return moved;
}

void Engine::apply(const Define& entry) {
  if (entry.id >= ids_.size()) throw BadMessage("the log defines id " + std::to_string(entry.id));
  const std::lock_guard lock(mutex_);
  names_[entry.key].id = static_cast<int>(entry.id);
  ids_[entry.id] = {true, entry.key, entry.meta};
}

void Engine::apply(const Run& entry) {
  Executor::Requests requests;
  int set = 0;
  bool complete_here = true;
  {
    const std::lock_guard lock(mutex_);
    const auto join = names_.find({0, kJoinName});
    const bool joined = join != names_.end() && join->second.pending;
    for (const uint32_t id : entry.ids) {
      if (id >= ids_.size() || !ids_[id].live) throw BadMessage("the log runs id " + std::to_string(id));
      set = ids_[id].key.set;
      const std::vector<int>& ranks = sets_[static_cast<size_t>(set)];
      if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) return;
      const auto found = names_.find(ids_[id].key);
      if (found == names_.end() || !found->second.pending) {
        if (joined) {
          requests.push_back(neutral_request(ids_[id].key, ids_[id].meta));
        } else {
          complete_here = false;
        }
        continue;
      }
      found->second.pending->logged = true;
      requests.push_back(found->second.pending);
    }
  }
  if (complete_here) {
    executor_.add(set, std::move(requests));
    return;
  }
  // We failed these requests because a peer was gone, before the coordinator knew of it.
  complete(requests, HVD_PEER_LOST, "Horovod has been shut down while the operation was being agreed on.");
  for (int r = 0; r < world_.local_size; ++r) {
    if (liveness_.gone(r)) return break_down(r);
  }
  throw BadMessage("the log runs a tensor that this rank has not submitted");
}

void Engine::apply(const Evict& entry) {
  if (entry.id >= ids_.size() || !ids_[entry.id].live)
    throw BadMessage("the log evicts id " + std::to_string(entry.id));
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(ids_[entry.id].key);
  ids_[entry.id] = {};
  if (found == names_.end()) return;
  found->second.id = -1;
  Request* const request = found->second.pending.get();
  if (request == nullptr) {
    names_.erase(found);
  } else if (request->by_bit && !request->logged) {
    request->by_bit = false;
    send(Submit{request->key, request->meta, request->wanted}, request->wanted);
  }
}

void Engine::apply(const Refuse& entry) {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(entry.key);
  if (found == names_.end() || !found->second.pending) return;
  const std::shared_ptr<Request> request = found->second.pending;
  complete_locked(request, HVD_MISMATCH, entry.text);
}

// What a rank that has joined contributes.
std::shared_ptr<Request> Engine::neutral_request(const Key& key, const Meta& meta) const {
  auto request = std::make_shared<Request>();
  request->key = key;
  request->meta = meta;
  request->logged = true;
  request->counts.assign(meta.op == HVD_ALLTOALL ? sets_[static_cast<size_t>(key.set)].size() : 1, 0);
  // Without input: the collective makes the neutral element. The result is dropped.
  if (const uint64_t bytes = meta.bytes(); bytes > 0) {
    request->data.reset(std::malloc(bytes));
    if (!request->data) throw std::bad_alloc();
    request->output = request->data.get();
  }
  return request;
}

void Engine::apply(const JoinEnd& entry) {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find({0, kJoinName});
  if (found == names_.end() || !found->second.pending) return;
  const std::shared_ptr<Request> request = found->second.pending;
  request->value = entry.last;
  complete_locked(request, HVD_OK, "");
}

void Engine::apply(const AddSet& entry) {
  if (entry.set <= 0 || entry.set >= Segment::kMaxSets) throw BadMessage("process set " + std::to_string(entry.set));
  executor_.add_set(entry.set, entry.ranks);
  const std::lock_guard lock(mutex_);
  if (static_cast<size_t>(entry.set) >= sets_.size()) sets_.resize(static_cast<size_t>(entry.set) + 1);
  sets_[static_cast<size_t>(entry.set)] = entry.ranks;
  end_set_change(entry.set);
}

void Engine::apply(const RemoveSet& entry) {
  closing_sets_.push_back(entry.set);
  const std::lock_guard lock(mutex_);
  sets_[static_cast<size_t>(entry.set)].clear();
  Executor::Requests orphans;
  for (const auto& [key, name] : names_) {
    if (key.set == entry.set && name.pending && !name.pending->logged) orphans.push_back(name.pending);
  }
  for (const auto& request : orphans) {
    complete_locked(request, HVD_INVALID, "Process set " + std::to_string(entry.set) + " was removed.");
  }
}

void Engine::apply(const RemoveEnd& entry) {
  const std::lock_guard lock(mutex_);
  end_set_change(entry.set);
}

// With mutex_ held: the set that this rank asked to add or to remove is there, or gone.
void Engine::end_set_change(int32_t set) {
  const auto found = names_.find({0, kChangeSetsName});
  if (found == names_.end() || !found->second.pending) return;
  const std::shared_ptr<Request> request = found->second.pending;
  request->value = set;
  complete_locked(request, HVD_OK, "");
}

// Tells the coordinator of removed sets whose last batch has ended here.
void Engine::close_sets() {
  std::erase_if(closing_sets_, [this](int set) {
    if (executor_.busy(set)) return false;
    executor_.remove_set(set);
    const std::lock_guard lock(mutex_);
    send(Closed{set}, false);
    return true;
  });
}

void Engine::apply(const Stop& entry) {
  log(LogLevel::kError, entry.text);
  fail(entry.status, entry.text);
}

// ---- Endings --------------------------------------------------------------------------------------------------------

void Engine::batch_ended(Executor::Requests requests, const std::exception_ptr& error) {
  if (!error) return complete(requests, HVD_OK, "");
  try {
    std::rethrow_exception(error);
  } catch (const PeerGone& gone) {
    const Failure failure = describe_gone(gone.peer);
    complete(requests, failure.status, failure.text);
    break_down(gone.peer);
  } catch (const std::exception& other) {
    complete(requests, HVD_SYSTEM, other.what());
    fail(HVD_SYSTEM, std::string("Horovod has been shut down: ") + other.what());
    break_down(world_.local_rank);
  }
}

void Engine::complete(const Executor::Requests& requests, hvd_status status, const std::string& text) {
  const std::lock_guard lock(mutex_);
  for (const auto& request : requests) complete_locked(request, status, text);
}

void Engine::complete_locked(const std::shared_ptr<Request>& request, hvd_status status, const std::string& text) {
  const std::shared_ptr<Request> keep = request;  // the table may hold the last reference
  if (const auto found = names_.find(keep->key); found != names_.end() && found->second.pending == keep) {
    found->second.pending.reset();
    if (found->second.id < 0) names_.erase(found);
  }
  if (status != HVD_OK && status != HVD_MISMATCH) {
    keep->error = text + " Tensor '" + keep->key.name + "' was pending.";
  } else {
    keep->error = text;
  }
  keep->status.store(status);
  for (Waiter* waiter : waiters_) {
    if (waiter->request == keep.get()) waiter->wake.notify_one();
  }
  if (keep->callback != nullptr) {
    completion_pool_.run([keep, status] { keep->callback(keep->context, status, keep->error.c_str()); });
  }
}

// From now on new requests are refused; those that are not in the log yet fail. Batches go on as far as they can;
// logged_too: they have been abandoned, so that nothing is left to end what belonged to them.
void Engine::fail(hvd_status status, const std::string& text, int cause, bool logged_too) {
  const std::lock_guard lock(mutex_);
  if (!failure_) {
    failure_ = {status, text};
    failure_cause_ = cause;
  }
  Executor::Requests waiting;
  for (const auto& [key, entry] : names_) {
    if (entry.pending && (logged_too || !entry.pending->logged)) waiting.push_back(entry.pending);
  }
  for (const auto& request : waiting) complete_locked(request, status, text);
}

// Gives up all batches, and says so to the peers, who may be waiting for our part in them.
void Engine::break_down(int cause) {
  if (broken_) return;
  broken_ = true;
  RankLine& mine = segment_->rank(world_.local_rank);
  mine.cause.store(static_cast<uint64_t>(origin_of(cause)));
  mine.state.store(kBroken);
  doorbells_.ring_all(interest::kAll);
  Failure failure{HVD_SYSTEM, ""};
  if (cause == world_.local_rank) {
    const std::lock_guard lock(mutex_);
    failure = failure_.value_or(Failure{HVD_SYSTEM, "Horovod has been shut down after an internal error."});
  } else {
    failure = describe_gone(cause);
  }
  complete(executor_.abandon(), failure.status, failure.text);
  fail(failure.status, failure.text, cause == world_.local_rank ? -1 : cause, true);
}

// ---- Peers ----------------------------------------------------------------------------------------------------------

// True if a peer was newly found gone.
bool Engine::look_after_peers() {
  int newly = -1;
  for (int r = 0; r < world_.local_size; ++r) {
    if (known_gone_[static_cast<size_t>(r)] || !liveness_.gone(r)) continue;
    newly = r;
    break;
  }
  if (newly < 0) {
    // Requests that we failed may be waited for by others, even by the one that we gave up: tell them.
    if (failure_cause_ >= 0 && !broken_ && executor_.idle()) break_down(failure_cause_);
    return false;
  }
  // Several may be gone at once, one because of the other: hear of all before blaming one. Who died comes first.
  (void)liveness_.sleep(Sleeper::kWaiter, 0);
  int blamed = newly;
  for (int r = 0; r < world_.local_size; ++r) {
    if (!liveness_.gone(r)) continue;
    known_gone_[static_cast<size_t>(r)] = true;
    const bool orderly = segment_->rank(r).state.load() == kDeparted || segment_->rank(r).state.load() == kBroken;
    if (!orderly) blamed = r;
  }
  // What it put into the log and the channels before it went still counts.
  while (progress()) {
  }
  const Failure failure = describe_gone(blamed);
  log(LogLevel::kDebug, failure.text);
  fail(failure.status, failure.text, blamed);
  return true;
}

// Ranks give up because of each other. Follows that chain to the one with whom it began, or to ourselves.
int Engine::origin_of(int local_rank) const {
  for (int steps = 0; steps < world_.local_size && local_rank != world_.local_rank; ++steps) {
    const RankLine& line = segment_->rank(local_rank);
    if (line.state.load() != kBroken) break;
    const uint64_t cause = line.cause.load();
    if (cause >= static_cast<uint64_t>(world_.local_size) || cause == static_cast<uint64_t>(local_rank)) break;
    local_rank = static_cast<int>(cause);
  }
  return local_rank;
}

Engine::Failure Engine::describe_gone(int local_rank) const {
  const uint64_t state = segment_->rank(local_rank).state.load();
  const std::string who = world_.describe(local_rank);
  if (state == kDeparted) {
    return {HVD_SHUT_DOWN, "Horovod has been shut down. " + who + " has called shutdown() or exited."};
  }
  if (state == kBroken) {
    const int origin = origin_of(local_rank);
    if (origin == world_.local_rank) {
      return {HVD_PEER_LOST, "Horovod has been shut down because " + who +
                                 " gave up on this rank: it had seen no heartbeat from it. Was this process stopped?"};
    }
    if (origin != local_rank && liveness_.gone(origin)) return describe_gone(origin);
    if (origin != local_rank) {
      return {HVD_PEER_LOST, "Horovod has been shut down because " + world_.describe(origin) +
                                 " died or has shown no heartbeat, as " + who + " found."};
    }
    return {HVD_PEER_LOST, "Horovod has been shut down because " + who + " gave up after an error."};
  }
  if (liveness_.reason(local_rank) == Liveness::kSilent) {
    return {HVD_PEER_LOST, "Horovod has been shut down because " + who + " has shown no heartbeat for " +
                               std::to_string(static_cast<int64_t>(settings_.heartbeat_timeout)) +
                               " s: it is stopped, swapped out, or hangs in the kernel."};
  }
  return {HVD_PEER_LOST, "Horovod has been shut down because " + who +
                             " died: its process ended without shutdown(). Its own output says why."};
}

}  // namespace hvd
