#include "engine/host_desk.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "transport/channel.h"

namespace hvd {

HostDesk::HostDesk(const World& world, std::shared_ptr<Segment> segment, Doorbells& doorbells, size_t ids)
    : world_(world),
      segment_(std::move(segment)),
      doorbells_(doorbells),
      log_(segment_->log_lines().written, segment_->log_bytes(), Segment::kLogBytes),
      ids_(ids),
      sets_(world.process_sets) {
  for (int r = 0; r < segment_->local_size(); ++r) {
    ByteRingLines& lines = segment_->request_lines(r);
    requests_.emplace_back(lines.written, lines.read, segment_->request_bytes(r), Segment::kRequestRingBytes);
  }
  segment_->coordinator().wake_ticket.store(1);
}

bool HostDesk::poll(Listener& listener) {
  bool moved = flush_outbox();
  // Before anything is taken in: what those readers had submitted is then seen below.
  const uint64_t read = withdrawn_.empty() ? 0 : slowest_reader();
  moved |= take_requests(listener);
  if (!joined_.empty() && !joined_may_arrive_) arrive_for_joined(listener);
  moved |= take_ready(listener);
  if (segment_->coordinator().want_epoch.load() != want_epoch_) look_at_wants(listener);
  if (!withdrawn_.empty()) release(read, listener);
  return moved;
}

bool HostDesk::has_news() const {
  if (segment_->ready_cell(ready_head_).sequence.load() == ready_head_ + 1) return true;
  if (segment_->coordinator().want_epoch.load() != want_epoch_) return true;
  return std::any_of(requests_.begin(), requests_.end(), [](const RingReader& ring) { return !ring.empty(); });
}

void HostDesk::wake_after(uint64_t names) {
  const uint64_t most = std::numeric_limits<uint64_t>::max() - ready_head_;
  segment_->coordinator().wake_ticket.store(ready_head_ + std::min(names, most));
}

// ---- What ranks submit ----------------------------------------------------------------------------------------------

bool HostDesk::take_requests(Listener& listener) {
  bool moved = false;
  for (int r = 0; r < segment_->local_size(); ++r) {
    RingReader& ring = requests_[static_cast<size_t>(r)];
    const int rank = world_.global(r);
    while (ring.next([&](BytesView bytes) {
      const ToCoordinator message = decode_to_coordinator(bytes);
      const Submit* const submit = std::get_if<Submit>(&message);
      if (submit != nullptr && submit->meta.op == HVD_JOIN) {
        joined_.push_back(rank);
        submit_for_joined(listener);
      }
      listener.request(rank, message, bytes);
    })) {
      moved = true;
    }
    if (ring.broken()) throw BadMessage("in the requests of " + world_.describe(rank));
  }
  return moved;
}

bool HostDesk::take_ready(Listener& listener) {
  bool moved = false;
  for (;;) {
    ReadyCell& cell = segment_->ready_cell(ready_head_);
    if (cell.sequence.load() != ready_head_ + 1) return moved;
    const auto id = static_cast<uint32_t>(cell.id);
    ++ready_head_;
    moved = true;
    if (!cached(id)) throw BadMessage("ready id " + std::to_string(id));
    // A withdrawn id's members send full requests instead. The cell may even be older than the name that has the id by
    // now; so what counts is not the cell but a complete round that has not been told yet.
    if (ids_[id].live && ids_[id].members > 0 && current_round(id) != ids_[id].rounds) tell(id, listener);
  }
}

void HostDesk::tell(uint32_t id, Listener& listener) {
  Id& state = ids_[id];
  state.rounds = current_round(id);
  state.told = true;
  state.told_wanted = slot(id).wanted.load() >= state.rounds;
  told_.push_back(id);
  listener.ready(id, state.told_wanted, std::exchange(state.with_joined, false));
}

void HostDesk::look_at_wants(Listener& listener) {
  want_epoch_ = segment_->coordinator().want_epoch.load();
  std::erase_if(told_, [this](uint32_t id) { return !ids_[id].live || !ids_[id].told; });
  for (const uint32_t id : told_) {
    Id& state = ids_[id];
    if (state.told_wanted || slot(id).wanted.load() < state.rounds) continue;
    state.told_wanted = true;
    listener.wanted(id);
  }
}

// What a rank that has joined had left pending is told first: after the last join nobody contributes for others any
// more.
void HostDesk::submit_for_joined(Listener& listener) {
  if (joined_may_arrive_) return;
  take_ready(listener);
  arrive_for_joined(listener);
}

void HostDesk::arrive_for_joined(Listener& listener) {
  for (uint32_t id = 0; id < static_cast<uint32_t>(segment_->cache_capacity()); ++id) {
    Id& state = ids_[id];
    if (!state.live || state.members == 0 || slot(id).arrived.load() % state.members == 0) continue;
    const std::vector<int> missing = missing_ranks(id);
    const bool all_joined = std::all_of(missing.begin(), missing.end(), [this](int rank) {
      return std::find(joined_.begin(), joined_.end(), rank) != joined_.end();
    });
    if (!all_joined) continue;
    // Who has toggled its bit adds its arrival too, if not now then in a moment: one of us sees the round complete.
    for (const int rank : missing) {
      const int local = world_.local(rank);
      state.with_joined = true;
      slot(id).present[local / 64].fetch_xor(uint64_t{1} << (local % 64));
      if ((slot(id).arrived.fetch_add(1) + 1) % state.members == 0) tell(id, listener);
    }
  }
}

// The members on this host that have not arrived in the current round of a slot.
std::vector<int> HostDesk::missing_ranks(uint32_t id) const {
  const bool arrived_bit = (current_round(id) + 1) % 2 != 0;
  std::vector<int> missing;
  for (const int rank : sets_[static_cast<size_t>(ids_[id].set)]) {
    if (!world_.is_local(rank)) continue;
    const int local = world_.local(rank);
    const bool bit = (slot(id).present[local / 64].load() >> (local % 64) & 1) != 0;
    if (bit != arrived_bit) missing.push_back(rank);
  }
  return missing;
}

void HostDesk::look_for_waiting(Listener& listener) {
  for (uint32_t id = 0; id < static_cast<uint32_t>(segment_->cache_capacity()); ++id) {
    const Id& state = ids_[id];
    if (!state.live || state.members == 0 || slot(id).arrived.load() % state.members == 0) continue;
    const std::vector<int> missing = missing_ranks(id);
    if (!missing.empty()) listener.waiting(id, missing);
  }
}

bool HostDesk::idle(uint32_t id) const {
  const Id& state = ids_[id];
  return !state.live || state.members == 0 || slot(id).arrived.load() == state.rounds * state.members;
}

// ---- The log --------------------------------------------------------------------------------------------------------

void HostDesk::append(const LogEntry& entry, Bytes bytes) {
  ++appended_;
  note(entry);
  outbox_.push_back(std::move(bytes));
  flush_outbox();
}

// What the desk itself has to know of an entry, before any rank reads it.
void HostDesk::note(const LogEntry& entry) {
  if (const auto* define = std::get_if<Define>(&entry)) {
    const auto set = static_cast<size_t>(define->key.set);
    if (define->id >= ids_.size() || set >= sets_.size())
      throw BadMessage("the log defines id " + std::to_string(define->id));
    ids_[define->id] = {};
    ids_[define->id].live = true;
    ids_[define->id].set = define->key.set;
    ids_[define->id].members = members_here(sets_[set]);
  } else if (const auto* run = std::get_if<Run>(&entry)) {
    for (const uint32_t id : run->ids) {
      if (id >= ids_.size()) throw BadMessage("the log runs id " + std::to_string(id));
      ids_[id].told = false;
    }
  } else if (const auto* evict = std::get_if<Evict>(&entry)) {
    if (evict->id >= ids_.size()) throw BadMessage("the log evicts id " + std::to_string(evict->id));
    ids_[evict->id].live = false;
    withdrawn_.push_back({evict->id, appended_});
  } else if (const auto* add = std::get_if<AddSet>(&entry)) {
    if (add->set <= 0 || add->set >= Segment::kMaxSets) throw BadMessage("process set " + std::to_string(add->set));
    if (static_cast<size_t>(add->set) >= sets_.size()) sets_.resize(static_cast<size_t>(add->set) + 1);
    sets_[static_cast<size_t>(add->set)] = add->ranks;
    // Its channel may have belonged to an earlier set, with which everyone is done.
    for (int r = 0; r < segment_->local_size(); ++r) Channel::clear(*segment_, add->set, r);
  } else if (std::holds_alternative<JoinEnd>(entry)) {
    joined_.clear();
  }
}

uint64_t HostDesk::members_here(const std::vector<int>& ranks) const {
  return static_cast<uint64_t>(
      std::count_if(ranks.begin(), ranks.end(), [this](int rank) { return world_.is_local(rank); }));
}

bool HostDesk::flush_outbox() {
  bool moved = false;
  while (!outbox_.empty() && log_.write(outbox_.front(), slowest_reader())) {
    outbox_.pop_front();
    ++logged_;
    moved = true;
  }
  if (moved) doorbells_.ring_all(interest::kLog);
  return moved;
}

uint64_t HostDesk::slowest_reader() const {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (int r = 0; r < segment_->local_size(); ++r) least = std::min(least, segment_->rank(r).log_read.load());
  return least;
}

// Ids whose Evict everybody on the host had read at that position.
void HostDesk::release(uint64_t read, Listener& listener) {
  while (!withdrawn_.empty()) {
    Withdrawn& oldest = withdrawn_.front();
    // Entries go into the log in order, so the end of the log is past this one as soon as it is in there.
    if (oldest.log_position == 0 && logged_ >= oldest.entry) oldest.log_position = log_.position();
    if (oldest.log_position == 0 || read < oldest.log_position) return;
    const uint32_t id = oldest.id;
    withdrawn_.pop_front();
    if (cached(id)) {
      slot(id).arrived.store(0);
      slot(id).wanted.store(0);
      for (int w = 0; w < segment_->present_words(); ++w) slot(id).present[w].store(0);
    }
    listener.released(id);
  }
}

}  // namespace hvd
