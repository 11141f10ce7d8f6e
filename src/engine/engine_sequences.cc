// Sequences, as the engine of a member follows them: see sequences.h.
#include <algorithm>
#include <utility>

#include "engine/engine.h"

namespace hvd {

// With mutex_ held: the request's id is in a sequence.
void Engine::submit_in_sequence(Request& request) {
  const IdEntry& id = ids_[static_cast<size_t>(request.id)];
  Sequence& sequence = sequences_[static_cast<size_t>(id.place)];
  request.in_sequence = true;
  if (!sequence.disorder && sequence.submitted % sequence.ids.size() != id.index) {
    sequence.disorder = true;
    send(Disorder{sequence.number}, true);
  }
  if (sequence.disorder) {  // it arrives by bit when the sequence has ended
    request.round = SequenceWord::kMostCount;
    return;
  }
  counters_.requests_in_sequence.add();
  request.round = sequence.submitted++;
  if (request.wanted) {
    sequence.wants.push_back(sequence.submitted);
    tell_wants(id.place);
  }
  segment_->sequence(id.place, world_.local_rank)
      .submitted.store(SequenceWord::make(sequence.number, sequence.submitted));
  if (!doorbells_.sleeps(0, interest::kUrgent)) return;
  const uint64_t wake = segment_->sequence_wake(id.place).load();
  if (all_have_submitted(id.place, wake)) doorbells_.ring(0, interest::kUrgent);
}

// Whether the words of all members have come that far.
bool Engine::all_have_submitted(int place, uint64_t word) const {
  const std::vector<int>& members = sequences_[static_cast<size_t>(place)].members;
  if (segment_->sequence(place, world_.local_rank).submitted.load() < word) return false;
  return std::all_of(members.begin(), members.end(),
                     [&](int member) { return segment_->sequence(place, member).submitted.load() >= word; });
}

// With mutex_ held: says what threads of this rank wait for, and wakes the coordinator if that is ready.
void Engine::tell_wants(int place) {
  const Sequence& sequence = sequences_[static_cast<size_t>(place)];
  const uint64_t first = *std::min_element(sequence.wants.begin(), sequence.wants.end());
  const uint64_t word = SequenceWord::make(sequence.number, first);
  SequenceWords& mine = segment_->sequence(place, world_.local_rank);
  if (mine.wanted.load() == word) return;
  mine.wanted.store(word);
  Flag& wake = segment_->sequence_wake(place);
  // The word of a later sequence is greater: ours has ended then.
  uint64_t known = wake.load();
  while (known > word && SequenceWord::count(known, sequence.number) != 0 && !wake.compare_exchange_weak(known, word)) {
  }
  if (all_have_submitted(place, word)) doorbells_.ring(0, interest::kUrgent);
}

// With mutex_ held.
void Engine::want_in_sequence(const Request& request) {
  const int place = ids_[static_cast<size_t>(request.id)].place;
  Sequence& sequence = sequences_[static_cast<size_t>(place)];
  if (request.round >= sequence.submitted) return;  // held back
  sequence.wants.push_back(request.round + 1);
  tell_wants(place);
}

void Engine::apply(const BeginSequence& entry) {
  const bool sane = entry.sequence != 0 && entry.sequence <= SequenceWord::kMostNumber &&
                    entry.place < static_cast<uint32_t>(Segment::kMaxSequences) && !entry.ids.empty();
  const std::string what = "the log begins sequence " + std::to_string(entry.sequence);
  if (!sane) throw BadMessage(what);
  const std::lock_guard lock(mutex_);
  for (const uint32_t id : entry.ids) {
    if (id >= ids_.size() || !ids_[id].live || ids_[id].place >= 0) {
      throw BadMessage(what + " with id " + std::to_string(id));
    }
  }
  const std::vector<int>& ranks = sets_[static_cast<size_t>(ids_[entry.ids.front()].key.set)];
  if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) return;
  Sequence& sequence = sequences_[entry.place];
  if (sequence.number != 0) throw BadMessage(what + " where another one is");
  sequence = {};
  sequence.number = entry.sequence;
  sequence.ids = entry.ids;
  for (const int rank : ranks) sequence.members.push_back(world_.local(rank));
  for (size_t i = 0; i < entry.ids.size(); ++i) {
    ids_[entry.ids[i]].place = static_cast<int>(entry.place);
    ids_[entry.ids[i]].index = i;
  }
}

// Null if we are not a member of it.
Sequence* Engine::find_sequence(uint64_t number) {
  const auto found = std::find_if(sequences_.begin(), sequences_.end(),
                                  [number](const Sequence& each) { return each.number == number && number != 0; });
  return found == sequences_.end() ? nullptr : &*found;
}

void Engine::apply(const RunSequence& entry) {
  Executor::Requests requests;
  int set = 0;
  bool complete_here = true;
  {
    const std::lock_guard lock(mutex_);
    Sequence* const sequence = find_sequence(entry.sequence);
    if (sequence == nullptr) return;
    if (entry.begin != sequence->run || entry.end <= entry.begin || entry.end > sequence->submitted) {
      throw BadMessage("the log runs " + std::to_string(entry.begin) + " to " + std::to_string(entry.end) +
                       " of sequence " + std::to_string(entry.sequence));
    }
    sequence->run = entry.end;
    set = ids_[sequence->ids.front()].key.set;
    requests.reserve(entry.end - entry.begin);
    size_t index = entry.begin % sequence->ids.size();
    for (uint64_t i = entry.begin; i < entry.end; ++i) {
      const std::shared_ptr<Request>& pending = ids_[sequence->ids[index]].name->pending;
      if (++index == sequence->ids.size()) index = 0;
      if (!pending) {
        complete_here = false;
        continue;
      }
      pending->logged = true;
      requests.push_back(pending);
    }
    if (!sequence->wants.empty()) {
      std::erase_if(sequence->wants, [&](uint64_t want) { return want <= entry.end; });
      if (!sequence->wants.empty()) tell_wants(static_cast<int>(sequence - sequences_.data()));
    }
  }
  start(set, std::move(requests), complete_here);
}

void Engine::apply(const EndSequence& entry) {
  const std::lock_guard lock(mutex_);
  Sequence* const found = find_sequence(entry.sequence);
  if (found == nullptr) return;
  const Sequence ended = std::exchange(*found, {});
  for (const uint32_t id : ended.ids) {
    ids_[id].place = -1;
    ids_[id].in_sequence = false;
    Request* const request = ids_[id].name->pending.get();
    if (request == nullptr || !request->in_sequence || request->logged) continue;
    request->in_sequence = false;
    arrive(*request);
  }
  send(Arrived{ended.number}, false);
}

}  // namespace hvd
