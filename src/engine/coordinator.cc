#include "engine/coordinator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/mismatch.h"

namespace hvd {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

bool same_class(const Meta& a, const Meta& b) {
  return a.op == b.op && a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

Coordinator::Coordinator(const World& world, const Settings& settings, std::shared_ptr<Segment> segment,
                         Doorbells& doorbells, Counters& counters, Hosts& hosts, std::function<bool(int)> set_busy)
    : world_(world),
      settings_(settings),
      segment_(std::move(segment)),
      counters_(counters),
      hosts_(hosts),
      set_busy_(std::move(set_busy)),
      desk_(world, segment_, doorbells, static_cast<size_t>(segment_->cache_capacity()) + kUncachedIds),
      sets_(world.process_sets) {
  for (const std::vector<int>& ranks : sets_) hosts_of_set_.push_back(world_.hosts_of(ranks));
  const auto capacity = static_cast<uint32_t>(segment_->cache_capacity());
  names_.resize(capacity + kUncachedIds);
  for (uint32_t i = capacity; i-- > 0;) free_cached_.push_back(i);
  for (uint32_t i = capacity + kUncachedIds; i-- > capacity;) free_uncached_.push_back(i);
}

bool Coordinator::poll() {
  bool moved = hosts_.alone() ? false : take_from_hosts();
  moved |= desk_.poll(*this);
  if (!joined_.empty()) {
    submit_for_joined();
    end_join();
  }
  if (live_sequences_ > 0) moved |= poll_sequences();
  while (!no_id_yet_.empty() && (!free_cached_.empty() || !free_uncached_.empty())) {
    auto [key, pending] = std::move(no_id_yet_.front());
    no_id_yet_.pop_front();
    define(key, std::move(pending));
    moved = true;
  }
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
  if (++polls_ % kPollsPerLook == 0 && (settings_.stall_warning > 0 || settings_.stall_shutdown > 0)) {
    const Nanoseconds now = settings_.now();
    if (now - last_stall_check_ >= kStallCheckInterval) {
      last_stall_check_ = now;
      if (live_sequences_ > 0) end_stuck_sequences();
      desk_.look_for_waiting(*this);
      check_stalls(settings_.now());
    }
  }
  return moved;
}

uint64_t Coordinator::prepare_sleep(Sleeper sleeper) {
  // While ready names tick towards their closing, only what can close a batch at once is worth a wake.
  uint64_t missing = 1;
  if (ready_count_ > 0) {
    missing = kNever;
    for (const Queue& queue : queues_) {
      if (!queue.ids.empty() && queue.expected > queue.seen) missing = std::min(missing, queue.expected - queue.seen);
    }
  }
  desk_.wake_after(missing);
  watching_ = live_sequences_ > 0 && prepare_sequences(sleeper);
  return interest::kUrgent | (ready_count_ > 0 ? 0 : interest::kRequest);
}

void Coordinator::stop(hvd_status status, const std::string& text) {
  if (stopped_) return;
  stopped_ = true;
  append(Stop{status, text});
}

// ---- What hosts tell ------------------------------------------------------------------------------------------------

bool Coordinator::take_from_hosts() {
  return hosts_.take([this](int host, BytesView bytes) {
    const FromHost message = decode_from_host(bytes);
    if (const auto* forward = std::get_if<Forward>(&message)) {
      const bool theirs = forward->rank >= 0 && forward->rank < world_.size &&
                          world_.host_of[static_cast<size_t>(forward->rank)] == host;
      if (!theirs)
        throw BadMessage("host " + world_.hosts[static_cast<size_t>(host)] + " speaks for another one's rank");
      request(forward->rank, decode_to_coordinator(forward->message), forward->message);
    } else if (const auto* ready = std::get_if<Ready>(&message)) {
      for (const Ready::Item& item : ready->items) arrived(host, item.id, item.wanted, item.with_joined);
    } else if (const auto* wanted = std::get_if<Wanted>(&message)) {
      this->wanted(wanted->id);
    } else if (const auto* released = std::get_if<Released>(&message)) {
      this->released(released->id);
    } else if (const auto* waiting = std::get_if<Waiting>(&message)) {
      note_missing(host, waiting->id, waiting->missing);
    } else if (const auto* gone = std::get_if<Gone>(&message)) {
      hosts_.told_gone(host, *gone);
    }
  });
}

void Coordinator::request(int rank, const ToCoordinator& message, BytesView) {
  std::visit([this, rank](const auto& m) { take(rank, m); }, message);
}
void Coordinator::ready(uint32_t id, bool wanted, bool with_joined) { arrived(world_.host, id, wanted, with_joined); }
void Coordinator::waiting(uint32_t id, const std::vector<int>& missing) { note_missing(world_.host, id, missing); }

Coordinator::Name& Coordinator::name_of_id(uint32_t id) {
  if (id >= names_.size()) throw BadMessage("id " + std::to_string(id));
  return names_[id];
}

void Coordinator::arrived(int host, uint32_t id, bool wanted, bool with_joined) {
  Name& name = name_of_id(id);
  if (name.state != IdState::kLive) return;  // withdrawn: its members send full requests instead
  const std::vector<int>& hosts = hosts_of_set_[static_cast<size_t>(name.key.set)];
  const bool known = std::find(hosts.begin(), hosts.end(), host) != hosts.end();
  const bool again = std::find(name.arrived.begin(), name.arrived.end(), host) != name.arrived.end();
  if (name.ready || again || !known) {
    throw BadMessage("tensor '" + name.key.name + "' is ready twice on host " +
                     world_.hosts[static_cast<size_t>(host)]);
  }
  name.wanted |= wanted;
  name.with_joined |= with_joined;
  name.arrived.push_back(host);
  if (name.arrived.size() == hosts.size()) {
    end_round(id);
  } else if (name.partial_since == 0) {
    name.partial_since = settings_.now();
  }
}

// Every host is there.
void Coordinator::end_round(uint32_t id) {
  Name& name = names_[id];
  const bool wanted = std::exchange(name.wanted, false), with_joined = std::exchange(name.with_joined, false);
  name.arrived.clear();
  if (name.partial_since != 0) {
    name.partial_since = name.last_warning = 0;
    name.waiting.clear();
  }
  if (with_joined && !works_with_join(name.meta.op)) {
    withdraw(id);  // its members send full requests, which are refused
  } else {
    add_ready(id, wanted);
  }
}

void Coordinator::wanted(uint32_t id) {
  Name& name = name_of_id(id);
  if (name.state != IdState::kLive) return;
  if (name.ready) {
    queues_[static_cast<size_t>(name.queue)].wanted = true;
  } else {
    name.wanted = !name.arrived.empty();  // else it comes late: the batch has been logged
  }
}

void Coordinator::released(uint32_t id) {
  const auto found = withdrawn_.find(id);
  if (found == withdrawn_.end()) throw BadMessage("id " + std::to_string(id) + " is released and was not withdrawn");
  if (--found->second > 0) return;
  withdrawn_.erase(found);
  names_[id].state = IdState::kFree;
  (cached(id) ? free_cached_ : free_uncached_).push_back(id);
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
    if (name.state == IdState::kLive && !name.ready && name.arrived.empty() && desk_.idle(id)) idle.push_back(id);
  }
  const size_t count = std::min<size_t>(idle.size(), std::max<uint32_t>(capacity / 8, 1));
  std::partial_sort(idle.begin(), idle.begin() + static_cast<ptrdiff_t>(count), idle.end(),
                    [this](uint32_t a, uint32_t b) { return last_use(a) < last_use(b); });
  for (size_t i = 0; i < count; ++i) {
    counters_.cache_evictions.add();
    withdraw(idle[i]);
  }
}

void Coordinator::withdraw(uint32_t id) {
  Name& name = names_[id];
  if (SequenceState* const sequence = find_sequence(name.sequence)) end_sequence(*sequence);
  name.state = IdState::kWithdrawn;
  ids_.erase(name.key);
  end_order(name);
  withdrawn_[id] = world_.n_hosts();
  append(Evict{id});
}

// ---- From ready to a batch ------------------------------------------------------------------------------------------

void Coordinator::add_ready(uint32_t id, bool wanted) {
  Name& name = names_[id];
  name.last_use = ++use_clock_;
  name.ready = true;
  name.queue = queue_for(name);
  Queue& queue = queues_[static_cast<size_t>(name.queue)];
  // A name whose id was withdrawn since begins the step as it did before.
  const bool begins_again = name.step == 0 && queue.seen > 0 && name.key == queue.first;
  if (name.step == queue.step || begins_again) {
    queue.expected = queue.seen;
    queue.seen = 0;
    ++queue.step;
    consider_sequence(queue);
  }
  if (queue.seen == 0) queue.first = name.key;
  name.step = queue.step;
  ++queue.seen;
  queue.ids.push_back(id);
  if (queue.step_ids.size() <= kMostIdsPerRun) queue.step_ids.push_back(id);  // more are no step that is repeated
  queue.bytes += name.bytes;
  queue.last_added = settings_.now();
  queue.wanted |= wanted;
  ++ready_count_;
}

bool Coordinator::is_queue_for(const Queue& queue, const Name& name) {
  return queue.set == name.key.set && same_class(queue.like, name.meta);
}

int Coordinator::queue_for(const Name& name) {
  size_t unused = queues_.size();
  for (size_t i = 0; i < queues_.size(); ++i) {
    if (is_queue_for(queues_[i], name)) return static_cast<int>(i);
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
  const bool alone_and_wanted = queue.ids.size() == 1 && queue.wanted;
  ++queue.closed;
  for (const uint32_t id : queue.ids) {
    Name& name = names_[id];
    consider_order(id, alone_and_wanted);
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

// ---- The log --------------------------------------------------------------------------------------------------------

void Coordinator::append(const LogEntry& entry) {
  Bytes bytes = encode(entry);
  counters_.log_bytes.add(bytes.size());
  if (!hosts_.alone()) hosts_.send_to_all(encode(ToHost{Logged{bytes}}));
  desk_.append(entry, std::move(bytes));
}

}  // namespace hvd
