// Sequences, as the coordinator begins, runs and ends them: see sequences.h.
#include <algorithm>
#include <utility>

#include "engine/coordinator.h"

namespace hvd {
namespace {

// Fewer names cost little one by one.
constexpr size_t kFewest = 8;
// A name that was run by itself so often in a row is not part of a step: it may get a standing order.
constexpr int kAlone = 3;
// So many steps in a row must have been equal before a sequence begins; twice as many after each one that had to end
// soon.
constexpr uint64_t kEqualSteps = 2, kMostEqualSteps = 64;
// For so long after its last submission a sequence is looked at every now and then, instead of its next step waking us
// when it begins: that costs less where steps are short.
constexpr Nanoseconds kInUse = 16'000'000;
// Who waits for a submission of a sequence sleeps until this many before it, if there are twice as many to come: they
// take the others about as long as a wake takes.
constexpr uint64_t kAhead = 16;
// While submissions follow each other so closely, it is not worth running a part of the step; but for no longer than
// that somebody waits for it.
constexpr Nanoseconds kJustNow = 20'000, kLongestWait = 1'000'000;
// So many steps in a row that were torn apart end a sequence.
constexpr int kTornSteps = 4;

// Whether a step was waited for name by name rather than as a whole.
bool torn(size_t batches, size_t names) { return batches > names / 2; }

}  // namespace

// The queue's step is over: its first name has become ready again.
void Coordinator::consider_sequence(Queue& queue) {
  std::vector<uint32_t> step = std::exchange(queue.step_ids, {});
  queue.equal_steps = step == queue.last_step ? queue.equal_steps + 1 : 0;
  queue.last_step = std::move(step);
  if (torn(std::exchange(queue.closed, 0), queue.last_step.size())) return;
  const uint64_t needed = std::max(queue.equal_steps_needed, kEqualSteps);
  if (queue.equal_steps < needed || !hosts_.alone() || !joined_.empty() || queue.like.op != HVD_ALLREDUCE) return;
  if (last_sequence_ == SequenceWord::kMostNumber || stopped_) return;
  const auto place =
      std::find_if(sequences_.begin(), sequences_.end(), [](const SequenceState& each) { return each.number == 0; });
  if (place == sequences_.end()) return;
  std::vector<uint32_t> ids;
  for (const uint32_t id : queue.last_step) {
    const Name& name = names_[id];
    // The id may be another name's by now.
    const bool same = name.state == IdState::kLive && name.step + 1 == queue.step &&
                      &queues_[static_cast<size_t>(name.queue)] == &queue;
    if (!same || !cached(id) || name.sequence != 0) return;
    if (is_in_steps(name)) ids.push_back(id);
  }
  if (ids.size() < kFewest || ids.size() > kMostIdsPerRun) return;
  // What is ready belongs to the step that is over. If it were run after the beginning, the next round of its names
  // would be the first one of the sequence, ahead of those that now come first.
  if (!queue.ids.empty()) close(queue);
  queue.closed = 0;
  std::erase_if(ids, [this](uint32_t id) { return !is_in_steps(names_[id]); });
  if (ids.size() < kFewest) return;

  queue.equal_steps_needed = std::min(2 * needed, kMostEqualSteps);
  queue.equal_steps = 0;
  SequenceState sequence;
  sequence.number = ++last_sequence_;
  sequence.place = static_cast<int>(place - sequences_.begin());
  sequence.set = queue.set;
  for (const int rank : sets_[static_cast<size_t>(queue.set)]) sequence.members.push_back(world_.local(rank));
  sequence.ids = ids;
  for (const uint32_t id : ids) names_[id].sequence = sequence.number;
  *place = std::move(sequence);
  ++live_sequences_;
  segment_->sequence_wake(place->place).store(SequenceWord::make(place->number, 1));
  append(BeginSequence{place->number, static_cast<uint32_t>(place->place), std::move(ids)});
}

// Rather than by itself.
bool Coordinator::is_in_steps(const Name& name) { return name.order == 0 && name.alone < kAlone; }

Coordinator::SequenceState* Coordinator::find_sequence(uint64_t number) {
  for (SequenceState& sequence : sequences_) {
    if (number != 0 && sequence.number == number) return &sequence;
  }
  return nullptr;
}

// How many submissions all members have made.
uint64_t Coordinator::ready_of(const SequenceState& sequence) const {
  uint64_t least = SequenceWord::kMostCount;
  for (const int member : sequence.members) {
    const uint64_t word = segment_->sequence(sequence.place, member).submitted.load();
    least = std::min(least, SequenceWord::count(word, sequence.number));
  }
  return least;
}

// The first submission that was not run and that somebody waits for, counted from 1.
uint64_t Coordinator::wanted_of(const SequenceState& sequence) const {
  uint64_t first = SequenceWord::kMostCount;
  for (const int member : sequence.members) {
    const uint64_t word = segment_->sequence(sequence.place, member).wanted.load();
    const uint64_t count = SequenceWord::count(word, sequence.number);
    if (count > sequence.run) first = std::min(first, count);
  }
  return first;
}

bool Coordinator::poll_sequences() {
  bool moved = false;
  for (SequenceState& sequence : sequences_) {
    if (sequence.number == 0 || stopped_) continue;
    if (const uint64_t ready = ready_of(sequence); ready != sequence.ready) {
      // That is nothing to stay awake for: who waits for more of it is woken.
      note_ready(sequence, ready);
      sequence.last_added = settings_.now();
    }
    if (sequence.ready == sequence.run) continue;
    const bool wanted = wanted_of(sequence) <= sequence.ready;
    if (wanted && sequence.wanted_since == 0) sequence.wanted_since = settings_.now();
    if (!must_close(sequence)) continue;
    sequence.parts += wanted || sequence.ready >= sequence.step_end() ? 0 : 1;
    close(sequence);
    moved = true;
  }
  return moved;
}

void Coordinator::note_ready(SequenceState& sequence, uint64_t ready) const {
  if (ready < sequence.ready || ready > sequence.run + sequence.ids.size()) {
    throw BadMessage(std::to_string(ready) + " submissions of sequence " + std::to_string(sequence.number) +
                     ", of which " + std::to_string(sequence.run) + " were run");
  }
  for (; sequence.ready < ready; ++sequence.ready) sequence.bytes += names_[sequence.id(sequence.ready)].bytes;
}

bool Coordinator::must_close(const SequenceState& sequence) const {
  // All of the step is there.
  if (sequence.ready >= sequence.step_end()) return true;
  if (wanted_of(sequence) <= sequence.ready && !more_is_coming(sequence)) return true;
  if (sequence.bytes >= static_cast<uint64_t>(settings_.fusion_threshold)) return true;
  return settings_.now() - sequence.last_added >= kQuiet && !set_busy_(sequence.set);
}

// Whether those who hold the others up are about to submit more: none of them waits, and the last one came just now.
// That is when we looked, which may be later than it came: so not for ever.
bool Coordinator::more_is_coming(const SequenceState& sequence) const {
  bool somebody_is_ahead = false;
  for (const int member : sequence.members) {
    const SequenceWords& words = segment_->sequence(sequence.place, member);
    if (SequenceWord::count(words.submitted.load(), sequence.number) > sequence.ready) {
      somebody_is_ahead = true;
    } else if (SequenceWord::count(words.wanted.load(), sequence.number) > sequence.run) {
      return false;
    }
  }
  const Nanoseconds now = settings_.now();
  const bool waits_long = sequence.wanted_since != 0 && now - sequence.wanted_since >= kLongestWait;
  return somebody_is_ahead && !waits_long && now - sequence.last_added < kJustNow;
}

// Logs what is ready, in batches that don't exceed the fusion threshold.
void Coordinator::run_ready(SequenceState& sequence) {
  if (sequence.ready == sequence.run) return;
  const auto threshold = static_cast<uint64_t>(settings_.fusion_threshold);
  uint64_t begin = sequence.run, bytes = 0;
  for (uint64_t i = begin; i < sequence.ready; ++i) {
    const uint64_t more = names_[sequence.id(i)].bytes;
    if (i > begin && bytes + more > threshold) {
      append(RunSequence{sequence.number, begin, i});
      begin = i;
      bytes = 0;
    }
    bytes += more;
  }
  append(RunSequence{sequence.number, begin, sequence.ready});
  sequence.run = sequence.ready;
  sequence.bytes = 0;
  sequence.wanted_since = 0;
  sequence.last_use = ++use_clock_;
}

void Coordinator::close(SequenceState& sequence) {
  const uint64_t step_end = sequence.step_end();
  run_ready(sequence);
  ++sequence.closed;
  if (sequence.run < step_end) return;
  sequence.torn_steps = torn(std::exchange(sequence.closed, 0), sequence.ids.size()) ? sequence.torn_steps + 1 : 0;
  sequence.in_parts = std::exchange(sequence.parts, 0) > 0;
  if (sequence.torn_steps >= kTornSteps || sequence.run > SequenceWord::kMostCount / 2) end_sequence(sequence);
}

void Coordinator::end_sequence(SequenceState& sequence) {
  if (stopped_) return;  // those who read that have failed all that was not run
  note_ready(sequence, ready_of(sequence));
  run_ready(sequence);  // as what is complete always is
  const SequenceState ended = std::exchange(sequence, {});
  --live_sequences_;
  for (const uint32_t id : ended.ids) {
    names_[id].sequence = 0;
    names_[id].last_use = std::max(names_[id].last_use, ended.last_use);
  }
  go_on_with_queue(ended);
  ending_sequences_[ended.number] = ended.members.size();
  desk_.joined_may_arrive(true);
  append(EndSequence{ended.number});
}

// The names of a sequence that has ended become ready one by one again: their queue goes on where it was in its step,
// else all steps to come would be seen as beginning there.
void Coordinator::go_on_with_queue(const SequenceState& ended) {
  const Name& first = names_[ended.ids.front()];
  Queue& queue = queues_[static_cast<size_t>(first.queue)];
  if (!is_queue_for(queue, first)) return;  // it has become another class's
  const size_t names = ended.ids.size(), run = ended.run % names;
  if (ended.run / names >= kMostEqualSteps) queue.equal_steps_needed = 0;
  if (run == 0) return;
  ++queue.step;
  queue.closed = 0;
  queue.seen = run;
  queue.expected = names;
  queue.first = first.key;
  queue.last_step = ended.ids;
  queue.step_ids.assign(ended.ids.begin(), ended.ids.begin() + static_cast<ptrdiff_t>(run));
  for (const uint32_t id : queue.step_ids) names_[id].step = queue.step;
}

void Coordinator::end_all_sequences() {
  for (SequenceState& sequence : sequences_) {
    if (sequence.number != 0) end_sequence(sequence);
  }
}

// Those of which nothing has moved since the last look, while some members have submitted more than others: a stall is
// found by what has arrived by bit.
void Coordinator::end_stuck_sequences() {
  for (SequenceState& sequence : sequences_) {
    if (sequence.number == 0) continue;
    uint64_t most = 0;
    for (const int member : sequence.members) {
      const uint64_t word = segment_->sequence(sequence.place, member).submitted.load();
      most = std::max(most, SequenceWord::count(word, sequence.number));
    }
    const uint64_t ready = ready_of(sequence);
    const bool stuck = most > ready && most == sequence.most_at_look && ready == sequence.ready_at_look;
    sequence.most_at_look = most;
    sequence.ready_at_look = ready;
    if (stuck) end_sequence(sequence);
  }
}

void Coordinator::take(int, const Disorder& message) {
  if (SequenceState* const sequence = find_sequence(message.sequence)) end_sequence(*sequence);
}

void Coordinator::take(int rank, const Arrived& message) {
  const auto found = ending_sequences_.find(message.sequence);
  if (found == ending_sequences_.end()) {
    throw BadMessage(world_.describe(rank) + " has read the end of sequence " + std::to_string(message.sequence));
  }
  if (--found->second > 0) return;
  ending_sequences_.erase(found);
  if (!ending_sequences_.empty()) return;
  desk_.joined_may_arrive(false);
  if (joined_.empty()) return;
  desk_.submit_for_joined(*this);
  end_join();
}

// ---- Sleeping -------------------------------------------------------------------------------------------------------

bool Coordinator::sequences_gather() const {
  return live_sequences_ > 0 && !stopped_ &&
         std::any_of(sequences_.begin(), sequences_.end(),
                     [](const SequenceState& each) { return each.number != 0 && each.ready > each.run; });
}

// Says from how many submissions on of each sequence we are to be woken: if somebody looks after it anyway, because it
// gathers or was used a moment ago, when the step is complete. Returns whether there is one of the latter.
bool Coordinator::prepare_sequences(Sleeper sleeper) {
  const Nanoseconds now = settings_.now();
  bool any_in_use = false;
  for (SequenceState& sequence : sequences_) {
    if (sequence.number == 0) continue;
    const bool in_use = !sequence.in_parts && now - sequence.last_added < kInUse;
    const bool gathers = sequence.run < sequence.ready;
    any_in_use |= in_use;
    sequence.wake = in_use || gathers ? sequence.step_end() : sequence.run + 1;
    if (const uint64_t wanted = wanted_of(sequence); wanted > sequence.ready) {
      sequence.wake = std::min(sequence.wake, wanted);
    }
    // Who is awake a little earlier need not be waited for.
    if (sleeper == Sleeper::kWaiter && sequence.wake > sequence.ready + 2 * kAhead) sequence.wake -= kAhead;
    segment_->sequence_wake(sequence.place).store(SequenceWord::make(sequence.number, sequence.wake));
  }
  return any_in_use;
}

bool Coordinator::far_off() const {
  return live_sequences_ > 0 && ready_count_ == 0 &&
         std::any_of(sequences_.begin(), sequences_.end(), [this](const SequenceState& each) {
           const uint64_t wanted = each.number == 0 ? SequenceWord::kMostCount : wanted_of(each);
           return wanted != SequenceWord::kMostCount && wanted > each.ready + 2 * kAhead;
         });
}

bool Coordinator::sequences_have_news() const {
  return live_sequences_ > 0 && !stopped_ &&
         std::any_of(sequences_.begin(), sequences_.end(), [this](const SequenceState& each) {
           if (each.number == 0) return false;
           // Who began to wait before we stored `wake` may have lowered it in vain.
           const uint64_t wanted = wanted_of(each);
           return ready_of(each) >= each.wake || (wanted > each.ready && wanted < each.wake) ||
                  (each.ready > each.run && must_close(each));
         });
}

}  // namespace hvd
