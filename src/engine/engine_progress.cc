// What the driver does in one pass: move bytes, decide (coordinator), read the log, move batches.
#include <algorithm>

#include "engine/engine.h"
#include "engine/logging.h"

namespace hvd {
namespace {

// One pass in so many looks at everything, however quickly letters come.
constexpr uint64_t kLetterLooks = 16;

}  // namespace

bool Engine::progress() {
  if (broken_) return drain();
  try {
    // First of all: nobody has to agree on these.
    bool moved = start_rounds();
    if (moved) {
      (void)executor_.poll();
      (void)network_.flush();
      if (broken_) return true;
    }
    const bool closing = !closing_sets_.empty() || ending_join_;
    if (letter_is_near_ && !closing && ++letter_looks_ % kLetterLooks != 0) {
      if (const Wait* const letter = executor_.only_wait(); letter != nullptr && look_for_letter(*letter, moved)) {
        return moved;
      }
    }
    moved |= network_.poll();
    if (coordinator_ && coordinator_->poll()) {
      moved = true;
      (void)network_.flush();  // the other hosts wait for it; what it means for us may take a while
    }
    if (delegate_) moved |= delegate_->poll();
    // After what the hosts have said: a connection's end says less than the last word before it.
    if (!hosts_.alone()) moved |= hosts_.look_after();
    moved |= flush_outbox();
    moved |= read_log();
    const bool batches_moved = executor_.poll();
    moved |= batches_moved;
    if (batches_moved) stuck_since_ = 0;
    moved |= network_.flush();  // what was just queued
    if (!closing_sets_.empty()) close_sets();
    if (ending_join_) end_join();
    look_after_orders();
    return moved;
  } catch (const std::exception& error) {
    // Only a damaged segment or no memory gets here. Nothing can be trusted any more.
    log(LogLevel::kError, std::string("the engine gives up: ") + error.what());
    fail(HVD_SYSTEM, std::string("Horovod has been shut down: ") + error.what());
    break_down(world_.rank);
    return true;
  }
}

// A pass for a round of a standing order that runs alone: looks at nothing but the connection, or the tray, by which
// its next letter comes. The rest has time until one of the next passes, or until the driver sleeps: all of it can wake
// it, and from then on every pass looks at everything. False: nothing comes from there any more. Then all that was said
// elsewhere is to be heard before the round is given up.
bool Engine::look_for_letter(const Wait& letter, bool& moved) {
  const bool by_network = letter.peer >= 0 && network_.link(letter.peer) != nullptr;
  if (by_network && network_.poll(letter.peer)) moved = true;
  if (nothing_comes_from(letter.peer)) return letter_is_near_ = false;
  if (executor_.poll()) {
    moved = true;
    stuck_since_ = 0;
  }
  return true;
}

// Nothing that comes now is of interest. But unread it would wake us for ever, and our own last words may still have to
// be sent.
bool Engine::drain() {
  try {
    const bool moved = network_.poll();
    hosts_.take([](int, BytesView) {});
    return moved;
  } catch (const std::exception&) {
    return false;
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
  if (moved) doorbells_.ring(0, interest::kRequest | interest::kUrgent);
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
  NameEntry& name = names_[entry.key];
  name.id = static_cast<int>(entry.id);
  ids_[entry.id] = {true, entry.key, entry.meta, &name};
}

void Engine::apply(const Run& entry) {
  Executor::Requests requests;
  int set = 0;
  bool complete_here = true;
  {
    const std::lock_guard lock(mutex_);
    const auto join = names_.find({0, kJoinName});
    const bool joined = join != names_.end() && join->second.pending && !join->second.pending->logged;
    for (const uint32_t id : entry.ids) {
      if (id >= ids_.size() || !ids_[id].live) throw BadMessage("the log runs id " + std::to_string(id));
      if (requests.empty() && complete_here) {  // the same for all of them
        set = ids_[id].key.set;
        const std::vector<int>& ranks = sets_[static_cast<size_t>(set)];
        if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) return;
        requests.reserve(entry.ids.size());
      }
      const std::shared_ptr<Request>& pending = ids_[id].name->pending;
      if (!pending) {
        if (joined) {
          requests.push_back(neutral_request(ids_[id].key, ids_[id].meta));
        } else {
          complete_here = false;
        }
        continue;
      }
      pending->logged = true;
      requests.push_back(pending);
      ids_[id].in_sequence = ids_[id].place >= 0;
    }
  }
  start(set, std::move(requests), complete_here);
}

// What the log wants to be run, as far as it is pending here.
void Engine::start(int set, Executor::Requests requests, bool complete_here) {
  if (complete_here) {
    executor_.add(set, std::move(requests));
    return;
  }
  // We failed these requests because a peer was gone, before the coordinator knew of it.
  complete(requests, HVD_PEER_LOST, "Horovod has been shut down while the operation was being agreed on.");
  for (int r = 0; r < world_.size; ++r) {
    if (liveness_.gone(r)) return break_down(r);
  }
  throw BadMessage("the log runs a tensor that this rank has not submitted");
}

void Engine::apply(const Evict& entry) {
  if (entry.id >= ids_.size() || !ids_[entry.id].live || ids_[entry.id].place >= 0)
    throw BadMessage("the log evicts id " + std::to_string(entry.id));
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(ids_[entry.id].key);
  const uint64_t order = std::exchange(ids_[entry.id], {}).order;
  if (order != 0) end_order(order);
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
  request->bytes = meta.bytes();
  request->logged = true;
  request->counts.assign(meta.op == HVD_ALLTOALL ? sets_[static_cast<size_t>(key.set)].size() : 1, 0);
  // Without input: the collective makes the neutral element. The result is dropped.
  if (const uint64_t bytes = meta.bytes(); bytes > 0) {
    request->data.reset(allocate_result(bytes));
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
  request->logged = true;
  ending_join_ = request;
  before_join_end_ = executor_.all_so_far();
}

// Who has joined may leave right after it. So join ends when we have done our part in all that was logged before:
// others may need it for what they had left pending.
void Engine::end_join() {
  if (!before_join_end_.expired()) return;
  const std::shared_ptr<Request> join = std::exchange(ending_join_, nullptr);
  const std::lock_guard lock(mutex_);
  if (join->status.load() == HVD_PENDING) complete_locked(join, HVD_OK, "");
}

void Engine::apply(const AddSet& entry) {
  if (entry.set <= 0 || entry.set >= Segment::kMaxSets) throw BadMessage("process set " + std::to_string(entry.set));
  executor_.add_set(entry.set, entry.ranks);
  const std::lock_guard lock(mutex_);
  if (static_cast<size_t>(entry.set) >= sets_.size()) sets_.resize(static_cast<size_t>(entry.set) + 1);
  sets_[static_cast<size_t>(entry.set)] = entry.ranks;
  count_members_here();
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
  for (const auto& request : orphans) orphan(request);
}

// With mutex_ held.
void Engine::orphan(const std::shared_ptr<Request>& request) {
  complete_locked(request, HVD_INVALID, "Process set " + std::to_string(request->key.set) + " was removed.");
}

void Engine::apply(const RemoveEnd& entry) {
  const std::lock_guard lock(mutex_);
  end_set_change(entry.set);
}

void Engine::count_members_here() {
  members_here_.assign(sets_.size(), 0);
  for (size_t set = 0; set < sets_.size(); ++set) {
    for (const int rank : sets_[set]) members_here_[set] += world_.is_local(rank) ? 1 : 0;
  }
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
  take_back_all();
  fail(entry.status, entry.text);
}

// ---- Endings --------------------------------------------------------------------------------------------------------

void Engine::batch_ended(Executor::Requests requests, const std::exception_ptr& error) {
  if (!error) {
    const uint64_t order = requests.front()->order;
    complete(requests, HVD_OK, "");
    if (order != 0) round_ended(order, requests.front()->wanted);
    return;
  }
  try {
    std::rethrow_exception(error);
  } catch (const PeerGone& gone) {
    look_at_connections();
    const Failure failure = describe_gone(gone.peer);
    complete(requests, failure.status, failure.text);
    break_down(gone.peer);
  } catch (const std::exception& other) {
    complete(requests, HVD_SYSTEM, other.what());
    fail(HVD_SYSTEM, std::string("Horovod has been shut down: ") + other.what());
    break_down(world_.rank);
  }
}

void Engine::complete(const Executor::Requests& requests, hvd_status status, const std::string& text) {
  const std::lock_guard lock(mutex_);
  for (const auto& request : requests) complete_held(request, status, text);
}

void Engine::forget_pending(const std::shared_ptr<Request>& request) {
  if (request->id >= 0) {  // which may be another name's by now
    NameEntry* const name = ids_[static_cast<size_t>(request->id)].name;
    if (name != nullptr && name->pending == request) {
      name->pending.reset();
      --pending_;
      return;
    }
  }
  const auto found = names_.find(request->key);
  if (found == names_.end() || found->second.pending != request) return;
  found->second.pending.reset();
  --pending_;
  if (found->second.id < 0) names_.erase(found);
}

void Engine::complete_locked(const std::shared_ptr<Request>& request, hvd_status status, const std::string& text) {
  const std::shared_ptr<Request> keep = request;  // the table may hold the last reference
  complete_held(keep, status, text);
}

// The caller holds a reference of its own.
void Engine::complete_held(const std::shared_ptr<Request>& request, hvd_status status, const std::string& text) {
  forget_pending(request);
  if (status != HVD_OK && status != HVD_MISMATCH) {
    request->error = text + " Tensor '" + request->key.name + "' was pending.";
  } else if (!text.empty()) {
    request->error = text;
  }
  request->status.store(status);
  for (Waiter* waiter : waiters_) {
    if (waiter->request == request.get()) waiter->wake.notify_one();
  }
  if (request->callback != nullptr) {
    completion_pool_.run([request, status] { request->callback(request->context, status, request->error.c_str()); });
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

}  // namespace hvd
