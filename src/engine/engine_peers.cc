// Peers that are gone: noticing it, telling it, and saying why.
#include <algorithm>

#include "engine/engine.h"
#include "engine/logging.h"
#include "transport/durations.h"

namespace hvd {
namespace {

// When a rank on another host is gone its last bytes are still on their way; and when its connection is lost, the word
// of why. Neither takes longer than this, counted from what has come last, unless the network itself has failed. Of a
// rank that has left in good order all bytes come, if they may have to be sent again and again: it waits for that as
// long as the heartbeat's timeout (Network::take_leave()), and so do we.
constexpr Nanoseconds kLastWords = 1'000'000'000;

}  // namespace

// Gives up all batches, and says so to the peers, who may be waiting for our part in them.
void Engine::break_down(int cause) {
  if (broken_) return;
  broken_ = true;
  network_.abandon();
  say_farewell(kBroken, origin_of(cause));
  Failure failure{HVD_SYSTEM, ""};
  if (cause == world_.rank) {
    const std::lock_guard lock(mutex_);
    failure = failure_.value_or(Failure{HVD_SYSTEM, "Horovod has been shut down after an internal error."});
  } else {
    failure = describe_gone(cause);
  }
  complete(executor_.abandon(), failure.status, failure.text);
  fail(failure.status, failure.text, cause == world_.rank ? -1 : cause, true);
}

// Tells everyone that this rank takes part no longer.
void Engine::say_farewell(RankState state, int cause) {
  RankLine& mine = segment_->rank(world_.local_rank);
  mine.cause.store(static_cast<uint64_t>(static_cast<int64_t>(cause)));
  mine.state.store(state);
  doorbells_.ring_all(interest::kAll);
  if (network_.empty()) return;
  if (!hosts_.alone()) hosts_.say_farewell(state, cause);
  for (int r = 0; r < world_.size; ++r) {
    if (Link* const link = network_.link(r)) link->say_bye(state, cause);
  }
}

bool Engine::somebody_new_is_gone() const {
  if (segment_->coordinator().departures.load() != seen_departures_) return true;
  const auto& here = world_.here();
  return std::any_of(here.begin(), here.end(),
                     [this](int rank) { return !known_gone_[static_cast<size_t>(rank)] && liveness_.gone(rank); });
}

// Takes note of connections that have ended, and of ranks that are gone although theirs has not.
void Engine::look_at_connections() {
  seen_ended_ = network_.ended();
  half_gone_ = 0;
  for (int r = 0; r < world_.size; ++r) {
    const Link* const link = network_.link(r);
    if (link == nullptr) continue;
    const bool lost = link->end() == Link::End::kLost;
    if (lost) liveness_.connection_ended(r, kEnded, -1);
    if (link->end() == Link::End::kBye) liveness_.connection_ended(r, link->bye_state(), link->bye_cause());
    // One of the two ways by which we hear of a rank's end, but not the other.
    if (liveness_.gone(r) == lost || link->end() == Link::End::kBye) continue;
    HalfGone& half = halves_[static_cast<size_t>(r)];
    if (half.over) continue;
    const Nanoseconds now = settings_.now();
    if (half.since == 0 || half.bytes_in != link->bytes_in()) half = {now, link->bytes_in()};
    const bool in_order = !lost && liveness_.state(r) == kDeparted;
    half.over = now - half.since >= (in_order ? nanoseconds_of(settings_.heartbeat_timeout) : kLastWords);
    if (!half.over) ++half_gone_;
  }
}

// Whether a task that waits for something from this rank waits in vain.
bool Engine::nothing_comes_from(int rank) const {
  if (rank < 0) return false;
  const Link* const link = network_.link(rank);
  if (link == nullptr) return liveness_.gone(rank);
  if (link->end() == Link::End::kBye) return true;
  const bool gone = liveness_.gone(rank), lost = link->end() == Link::End::kLost;
  if (gone && (lost || liveness_.state(rank) == kSilent)) return true;
  return halves_[static_cast<size_t>(rank)].over;
}

// Whether, in a job that has failed, nothing has moved for so long that nothing will.
bool Engine::batches_are_stuck() {
  const Nanoseconds now = settings_.now();
  if (stuck_since_ == 0 || network_.link_moves() != stuck_at_) {
    stuck_since_ = now;
    stuck_at_ = network_.link_moves();
  }
  // A round of a standing order may wait for somebody who was never going to submit it.
  if (executor_.only_waits_for_letters() && now - stuck_since_ >= kLastWords) return true;
  return static_cast<double>(now - stuck_since_) * 1e-9 >= settings_.heartbeat_timeout;
}

// True if a peer was newly found gone.
bool Engine::look_after_peers() {
  if (half_gone_ > 0 || network_.ended() != seen_ended_) look_at_connections();
  if (!somebody_new_is_gone()) {
    // Requests that we failed may be waited for by others, even by the one that we gave up: tell them.
    if (failure_cause_ >= 0 && !broken_ && (executor_.idle() || batches_are_stuck())) break_down(failure_cause_);
    return false;
  }
  // Several may be gone at once, one because of the other: hear of all before blaming one. Who died comes first.
  (void)liveness_.sleep(Sleeper::kWaiter, 0);
  seen_departures_ = segment_->coordinator().departures.load();
  look_at_connections();
  int blamed = -1;
  bool blamed_said_nothing = false;
  for (int r = 0; r < world_.size; ++r) {
    if (known_gone_[static_cast<size_t>(r)] || !liveness_.gone(r)) continue;
    known_gone_[static_cast<size_t>(r)] = true;
    const RankState state = liveness_.state(r);
    // Of a host that has fallen silent the first: it is local rank 0 that is not heard any more.
    const bool said_nothing = state != kDeparted && state != kBroken;
    if (blamed >= 0 && (blamed_said_nothing || !said_nothing)) continue;
    blamed = r;
    blamed_said_nothing = said_nothing;
  }
  if (blamed < 0) return false;
  // What it put into the log and the channels before it went still counts: every pass looks at everything.
  do {
    letter_is_near_ = false;
  } while (progress());
  const Failure failure = describe_gone(blamed);
  log(LogLevel::kDebug, failure.text);
  fail(failure.status, failure.text, blamed);
  return true;
}

// Because of which rank this one gave up; itself if it did not, or on its own account, or if that is us.
int Engine::gave_up_on(int rank) const {
  if (rank == world_.rank || liveness_.state(rank) != kBroken) return rank;
  const int cause = liveness_.cause(rank);
  return cause < 0 ? rank : cause;
}

// Ranks give up because of each other. Follows that chain to the one with whom it began, or to ourselves. Where it goes
// round, as between two who don't hear each other any more: to the first of those.
int Engine::origin_of(int rank) const {
  for (int steps = 0; steps < world_.size; ++steps) rank = gave_up_on(rank);
  int first = rank;
  for (int steps = 0; steps < world_.size; ++steps) {
    rank = gave_up_on(rank);
    first = std::min(first, rank);
  }
  return first;
}

Engine::Failure Engine::describe_gone(int rank) const {
  const RankState state = liveness_.state(rank);
  const std::string who = world_.describe(rank);
  if (state == kDeparted) {
    const bool cut_off = halves_[static_cast<size_t>(rank)].over;
    return {HVD_SHUT_DOWN, "Horovod has been shut down. " + who + " has called shutdown() or exited" +
                               (cut_off ? ", and not all that it had sent before has come: is the network to its host "
                                          "broken?"
                                        : ".")};
  }
  if (state == kBroken) {
    const int origin = origin_of(rank);
    if (origin == world_.rank) {
      return {HVD_PEER_LOST,
              "Horovod has been shut down because " + who +
                  " gave up on this rank, from which it heard nothing more. Was this process stopped, or "
                  "is the network between the two broken?"};
    }
    if (const int other = gave_up_on(origin); other != origin) {
      const std::string both = world_.describe(origin) + " and " + world_.describe(other);
      return {HVD_PEER_LOST, "Horovod has been shut down because " + both +
                                 " have given up on each other: was one of them stopped, or is the network between the "
                                 "two broken?"};
    }
    if (origin != rank && liveness_.gone(origin)) return describe_gone(origin);
    if (origin != rank) {
      return {HVD_PEER_LOST, "Horovod has been shut down because " + world_.describe(origin) +
                                 " has exited, died, shown no heartbeat or could not be reached, as " + who +
                                 " found."};
    }
    return {HVD_PEER_LOST, "Horovod has been shut down because " + who + " gave up after an error."};
  }
  if (state == kSilent) {
    return {HVD_PEER_LOST, "Horovod has been shut down because " + who + " has shown no heartbeat for " +
                               seconds_text(settings_.heartbeat_timeout) +
                               ": it is stopped, swapped out, or hangs in the kernel" +
                               (world_.is_local(rank) ? "." : ", or the network to its host is down.")};
  }
  if (const Link* const link = network_.link(rank); link != nullptr && !liveness_.gone(rank)) {
    return {HVD_PEER_LOST, "Horovod has been shut down because the connection with " + who + " was lost (" +
                               link->lost_because() +
                               "): it died, or the network between the hosts failed. Its own output may say why."};
  }
  return {HVD_PEER_LOST, "Horovod has been shut down because " + who + " died: its process ended without shutdown()" +
                             (world_.is_local(rank) ? ". Its own output says why."
                                                    : ", or its host or the network to it failed. Its own output may "
                                                      "say why.")};
}

}  // namespace hvd
