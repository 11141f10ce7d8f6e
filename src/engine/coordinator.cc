#include "engine/coordinator.h"

#include <algorithm>
#include <limits>

#include "engine/mismatch.h"

namespace hvd {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
// Keeps one entry well below the size of the log.
constexpr size_t kMostIdsPerRun = 8192;

bool same_class(const Meta& a, const Meta& b) {
  return a.op == b.op && a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

Coordinator::Coordinator(const World& world, const Settings& settings, std::shared_ptr<Segment> segment,
                         Doorbells& doorbells, Counters& counters, std::function<bool(int)> set_busy)
    : world_(world),
      settings_(settings),
      segment_(std::move(segment)),
      doorbells_(doorbells),
      counters_(counters),
      set_busy_(std::move(set_busy)),
      log_(segment_->log_lines().written, segment_->log_bytes(), Segment::kLogBytes),
      sets_(world.process_sets) {
  for (int r = 0; r < segment_->local_size(); ++r) {
    ByteRingLines& lines = segment_->request_lines(r);
    requests_.emplace_back(lines.written, lines.read, segment_->request_bytes(r), Segment::kRequestRingBytes);
  }
  const auto capacity = static_cast<uint32_t>(segment_->cache_capacity());
  names_.resize(capacity + kUncachedIds);
  for (uint32_t i = capacity; i-- > 0;) free_cached_.push_back(i);
  for (uint32_t i = capacity + kUncachedIds; i-- > capacity;) free_uncached_.push_back(i);
  segment_->coordinator().wake_ticket.store(1);
}

bool Coordinator::poll() {
  bool moved = flush_outbox();
  recycle();
  for (int r = 0; r < segment_->local_size(); ++r) {
    while (requests_[static_cast<size_t>(r)].next([this, r](BytesView bytes) {
      std::visit([this, r](const auto& message) { take(world_.global_of(r), message); }, decode_to_coordinator(bytes));
    })) {
      moved = true;
    }
    if (requests_[static_cast<size_t>(r)].broken()) {
      throw BadMessage("in the requests of " + world_.describe(r));
    }
  }
  if (!joined_.empty()) submit_for_joined();
  while (!no_id_yet_.empty() && (!free_cached_.empty() || !free_uncached_.empty())) {
    auto [key, pending] = std::move(no_id_yet_.front());
    no_id_yet_.pop_front();
    define(key, std::move(pending));
    moved = true;
  }
  for (;;) {
    ReadyCell& cell = segment_->ready_cell(ready_head_);
    if (cell.sequence.load() != ready_head_ + 1) break;
    const auto id = static_cast<uint32_t>(cell.id);
    ++ready_head_;
    if (!cached(id)) throw BadMessage("ready id " + std::to_string(id));
    moved = true;
    // A withdrawn id's members send full requests instead. The cell may even be older than the name that has the id by
    // now; so what counts is not the cell but a complete round that has not been taken yet.
    Name& name = names_[id];
    if (name.state != IdState::kLive || current_round(id) == name.rounds) continue;
    name.rounds = current_round(id);
    add_ready(id, segment_->slot(static_cast<int>(id)).wanted.load() >= name.rounds);
  }
  if (segment_->coordinator().want_epoch.load() != want_epoch_) look_at_wants();
  if (ready_count_ > 0 && !stopped_) {
    const Nanoseconds now = settings_.now();
    for (Queue& queue : queues_) {
      if (!queue.ids.empty() && must_close(queue, now)) {
        close(queue);
        moved = true;
      }
    }
  }
  // Not every time: a look at the clock costs as much as all the rest when there is nothing to do.
  if (++polls_ % 64 == 0 && (settings_.stall_warning > 0 || settings_.stall_shutdown > 0)) {
    const Nanoseconds now = settings_.now();
    if (now - last_stall_check_ >= kStallCheckInterval) {
      last_stall_check_ = now;
      check_stalls(now);
    }
  }
  return moved;
}

bool Coordinator::has_news() const {
  if (segment_->ready_cell(ready_head_).sequence.load() == ready_head_ + 1) return true;
  if (segment_->coordinator().want_epoch.load() != want_epoch_) return true;
  return std::any_of(requests_.begin(), requests_.end(), [](const RingReader& ring) { return !ring.empty(); });
}

uint64_t Coordinator::prepare_sleep() {
  // While ready names tick towards their closing, only what can close a batch at once is worth a wake.
  uint64_t wake = ready_head_ + 1;
  if (ready_count_ > 0) {
    uint64_t missing = kNever - ready_head_;
    for (const Queue& queue : queues_) {
      if (!queue.ids.empty() && queue.expected > queue.seen) missing = std::min(missing, queue.expected - queue.seen);
    }
    wake = ready_head_ + missing;
  }
  segment_->coordinator().wake_ticket.store(wake);
  return interest::kUrgent | (ready_count_ > 0 ? 0 : interest::kRequest);
}

void Coordinator::stop(hvd_status status, const std::string& text) {
  if (stopped_) return;
  stopped_ = true;
  append(Stop{status, text});
}

// ---- Full requests --------------------------------------------------------------------------------------------------

void Coordinator::take(int rank, const Submit& message) {
  if (stopped_) return;
  if (message.meta.op == HVD_JOIN) return join(rank);
  // Of a set that has just been removed: the rank will read that in the log, and fail the request itself.
  if (!is_member(message.key.set, rank)) return;
  if (const auto cached_id = ids_.find(message.key); cached_id != ids_.end()) {
    // Another rank may have arrived by bit with the old metadata: the Evict makes it send a full request too.
    if (names_[cached_id->second].ready) close(queues_[static_cast<size_t>(names_[cached_id->second].queue)]);
    withdraw(cached_id->second);
  }
  Pending& pending = pending_[message.key];
  if (pending.by_rank.empty()) pending.since = settings_.now();
  pending.by_rank[rank] = message.meta;
  pending.wanted |= message.wanted;
  if (pending.by_rank.size() < sets_[static_cast<size_t>(message.key.set)].size()) return;
  Pending whole = std::move(pending);
  pending_.erase(message.key);
  complete(message.key, std::move(whole));
}

// All members have submitted the name, or have joined.
void Coordinator::complete(const Key& key, Pending pending) {
  const Meta& meta = pending.by_rank.begin()->second;
  const bool with_joined = pending.by_rank.size() < sets_[static_cast<size_t>(key.set)].size();
  std::string text = describe_mismatch(key, pending.by_rank);
  if (text.empty() && with_joined && !works_with_join(meta.op)) {
    text = std::string(name_of(meta.op)) + " is not supported with Join at this time: " + ranks_text(joined_) +
           " joined, and tensor '" + key.name + "' needs all ranks.";
  }
  if (!text.empty()) {
    constexpr size_t kLongest = 16 << 10;  // it must fit into the log, however many ranks it lists
    if (text.size() > kLongest) text = text.substr(0, kLongest) + " ...";
    append(Refuse{key, text});
  } else if (meta.op == HVD_ADD_PROCESS_SET || meta.op == HVD_REMOVE_PROCESS_SET) {
    change_sets(meta);
  } else {
    define(key, std::move(pending));
  }
}

bool Coordinator::is_member(int set, int rank) const {
  if (set < 0 || static_cast<size_t>(set) >= sets_.size()) return false;
  const std::vector<int>& ranks = sets_[static_cast<size_t>(set)];
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

void Coordinator::take(int, const Want& message) {
  if (const auto pending = pending_.find(message.key); pending != pending_.end()) {
    pending->second.wanted = true;
  } else if (const auto id = ids_.find(message.key); id != ids_.end() && names_[id->second].ready) {
    queues_[static_cast<size_t>(names_[id->second].queue)].wanted = true;
  } else {
    for (auto& [key, waiting] : no_id_yet_) {
      if (key == message.key) waiting.wanted = true;
    }
  }
}

void Coordinator::define(const Key& key, Pending pending) {
  const std::optional<uint32_t> id = free_id();
  if (!id) {
    no_id_yet_.emplace_back(key, std::move(pending));
    return;
  }
  Name& name = names_[*id];
  name = {};
  name.state = IdState::kLive;
  name.key = key;
  name.meta = pending.by_rank.begin()->second;
  name.members = sets_[static_cast<size_t>(key.set)].size();
  name.bytes = name.meta.bytes();
  ids_[key] = *id;
  append(Define{*id, key, name.meta});
  add_ready(*id, pending.wanted);
}

// ---- Ids ------------------------------------------------------------------------------------------------------------

std::optional<uint32_t> Coordinator::free_id() {
  if (free_cached_.empty()) make_room();
  for (std::vector<uint32_t>* ids : {&free_cached_, &free_uncached_}) {
    if (ids->empty()) continue;
    const uint32_t id = ids->back();
    ids->pop_back();
    return id;
  }
  return std::nullopt;
}

// Withdraws the ids that were not used for longest, some at a time: they take a while to become free.
void Coordinator::make_room() {
  const auto capacity = static_cast<uint32_t>(segment_->cache_capacity());
  if (capacity == 0 || !withdrawn_.empty()) return;
  std::vector<uint32_t> idle;
  for (uint32_t id = 0; id < capacity; ++id) {
    const Name& name = names_[id];
    if (name.state != IdState::kLive || name.ready) continue;
    if (segment_->slot(static_cast<int>(id)).arrived.load() == name.rounds * name.members) idle.push_back(id);
  }
  const size_t count = std::min<size_t>(idle.size(), std::max<uint32_t>(capacity / 8, 1));
  std::partial_sort(idle.begin(), idle.begin() + static_cast<ptrdiff_t>(count), idle.end(),
                    [this](uint32_t a, uint32_t b) { return names_[a].last_use < names_[b].last_use; });
  for (size_t i = 0; i < count; ++i) {
    counters_.cache_evictions.add();
    withdraw(idle[i]);
  }
}

void Coordinator::withdraw(uint32_t id) {
  Name& name = names_[id];
  name.state = IdState::kWithdrawn;
  ids_.erase(name.key);
  append(Evict{id});
  withdrawn_.push_back({id, appended_, std::nullopt});
  if (outbox_.empty()) withdrawn_.back().log_position = log_.position();
}

void Coordinator::recycle() {
  if (withdrawn_.empty()) return;
  const uint64_t read = slowest_reader();
  while (!withdrawn_.empty()) {
    Withdrawn& oldest = withdrawn_.front();
    // Entries go into the log in order, so the end of the log is past this one as soon as it is in there.
    if (!oldest.log_position && logged_ >= oldest.entry) oldest.log_position = log_.position();
    if (!oldest.log_position || read < *oldest.log_position) return;
    const uint32_t id = oldest.id;
    withdrawn_.pop_front();
    names_[id].state = IdState::kFree;
    if (cached(id)) {
      Slot& slot = segment_->slot(static_cast<int>(id));
      slot.arrived.store(0);
      slot.wanted.store(0);
      for (int w = 0; w < segment_->present_words(); ++w) slot.present[w].store(0);
      free_cached_.push_back(id);
    } else {
      free_uncached_.push_back(id);
    }
  }
}

uint64_t Coordinator::current_round(uint32_t id) const {
  return segment_->slot(static_cast<int>(id)).arrived.load() / names_[id].members;
}

// ---- From ready to a batch ------------------------------------------------------------------------------------------

void Coordinator::add_ready(uint32_t id, bool wanted) {
  Name& name = names_[id];
  name.last_use = ++use_clock_;
  name.ready = true;
  name.queue = queue_for(name);
  Queue& queue = queues_[static_cast<size_t>(name.queue)];
  if (name.step == queue.step) {
    queue.expected = queue.seen;
    queue.seen = 0;
    ++queue.step;
  }
  name.step = queue.step;
  ++queue.seen;
  queue.ids.push_back(id);
  queue.bytes += name.bytes;
  queue.last_added = settings_.now();
  queue.wanted |= wanted;
  ++ready_count_;
}

int Coordinator::queue_for(const Name& name) {
  size_t unused = queues_.size();
  for (size_t i = 0; i < queues_.size(); ++i) {
    if (queues_[i].set == name.key.set && same_class(queues_[i].like, name.meta)) return static_cast<int>(i);
    if (queues_[i].ids.empty()) unused = i;
  }
  // A job has a handful of classes; one whose factors change all the time must not grow this for ever.
  constexpr size_t kMostQueues = 64;
  if (queues_.size() < kMostQueues || unused == queues_.size()) {
    unused = queues_.size();
    queues_.emplace_back();
  } else {
    queues_[unused] = {};
  }
  queues_[unused].set = name.key.set;
  queues_[unused].like = name.meta;
  queues_[unused].like.shape.clear();
  return static_cast<int>(unused);
}

bool Coordinator::must_close(const Queue& queue, Nanoseconds now) const {
  if (queue.wanted || queue.bytes >= static_cast<uint64_t>(settings_.fusion_threshold)) return true;
  if (queue.expected > 0 && queue.seen >= queue.expected) return true;
  return now - queue.last_added >= kQuiet && !set_busy_(queue.set);
}

void Coordinator::close(Queue& queue) {
  const auto threshold = static_cast<uint64_t>(settings_.fusion_threshold);
  Run run;
  uint64_t bytes = 0;
  std::vector<uint32_t> uncached;
  for (const uint32_t id : queue.ids) {
    Name& name = names_[id];
    const bool alone = queue.like.op == HVD_ALLTOALL;  // its counts, one per member, have to fit into a chunk
    if (!run.ids.empty() && (alone || bytes + name.bytes > threshold || run.ids.size() == kMostIdsPerRun)) {
      append(run);
      run.ids.clear();
      bytes = 0;
    }
    run.ids.push_back(id);
    bytes += name.bytes;
    name.ready = false;
    if (!cached(id)) uncached.push_back(id);
  }
  if (!run.ids.empty()) append(run);
  ready_count_ -= queue.ids.size();
  queue.ids.clear();
  queue.bytes = 0;
  queue.wanted = false;
  for (const uint32_t id : uncached) withdraw(id);
}

void Coordinator::look_at_wants() {
  want_epoch_ = segment_->coordinator().want_epoch.load();
  for (Queue& queue : queues_) {
    for (const uint32_t id : queue.ids) {
      if (cached(id) && segment_->slot(static_cast<int>(id)).wanted.load() >= current_round(id)) queue.wanted = true;
    }
  }
}

// ---- The log --------------------------------------------------------------------------------------------------------

void Coordinator::append(const LogEntry& entry) {
  Bytes bytes = encode(entry);
  ++appended_;
  counters_.log_bytes.add(bytes.size());
  outbox_.push_back(std::move(bytes));
  flush_outbox();
}

bool Coordinator::flush_outbox() {
  bool moved = false;
  while (!outbox_.empty() && log_.write(outbox_.front(), slowest_reader())) {
    outbox_.pop_front();
    ++logged_;
    moved = true;
  }
  if (moved) doorbells_.ring_all(interest::kLog);
  return moved;
}

uint64_t Coordinator::slowest_reader() const {
  uint64_t least = kNever;
  for (int r = 0; r < segment_->local_size(); ++r) least = std::min(least, segment_->rank(r).log_read.load());
  return least;
}

}  // namespace hvd
