#include "engine/hosts.h"

#include <algorithm>

#include "transport/durations.h"

namespace hvd {

Hosts::Hosts(const World& world, const Settings& settings, std::shared_ptr<Segment> segment, Doorbells& doorbells,
             const Liveness& liveness, Network& network)
    : world_(world),
      segment_(std::move(segment)),
      doorbells_(doorbells),
      liveness_(liveness),
      now_(settings.now),
      timeout_(nanoseconds_of(settings.heartbeat_timeout)),
      interval_(static_cast<Nanoseconds>(liveness.beat_interval_ms()) * 1'000'000),
      known_gone_(static_cast<size_t>(world.size)) {
  for (int host = 0; host < world.n_hosts(); ++host) {
    if (Records* const records = network.control(host)) peers_.push_back({host, world.leader_of(host), records});
  }
}

bool Hosts::take(const std::function<void(int host, BytesView record)>& f) {
  bool any = false;
  for (Peer& peer : peers_) {
    BytesView record;
    while (peer.records->next(record)) {
      peer.heard = any = true;
      f(peer.host, record);
    }
  }
  return any;
}

void Hosts::send_to_all(BytesView record) {
  for (Peer& peer : peers_) peer.records->send(record);
}

bool Hosts::look_after() {
  bool found = false;
  for (Peer& peer : peers_) {
    if (peer.over || !peer.records->lost()) continue;
    peer.over = found = true;
    spread({peer.rank, kEnded, -1}, peer.host);
  }
  for (const int rank : world_.here()) {
    if (rank == world_.rank || known_gone_[static_cast<size_t>(rank)] || !liveness_.gone(rank)) continue;
    found = true;
    spread({rank, liveness_.state(rank), liveness_.cause(rank)}, -1);
  }
  const Nanoseconds now = now_();
  if (last_beat_ != 0 && now - last_beat_ < interval_) return found;
  // Time in which this process did not run, stopped or starved, says nothing about the others.
  const Nanoseconds elapsed = last_beat_ == 0 ? 0 : std::min(now - last_beat_, 2 * interval_);
  last_beat_ = now;
  const Bytes beat = world_.is_coordinator() ? encode(ToHost{Beat{}}) : encode(FromHost{Beat{}});
  for (Peer& peer : peers_) {
    if (peer.over) continue;
    peer.records->send(beat);
    peer.silent_for = peer.heard ? 0 : peer.silent_for + elapsed;
    peer.heard = false;
    if (peer.silent_for < timeout_) continue;
    peer.over = found = true;
    // Nobody else speaks for the ranks of that host.
    for (const int rank : world_.ranks_of_host[static_cast<size_t>(peer.host)]) {
      spread({rank, kSilent, -1}, peer.host);
    }
  }
  return found;
}

void Hosts::told_gone(int from_host, const Gone& gone) {
  if (gone.rank < 0 || gone.rank >= world_.size || world_.is_local(gone.rank)) {
    throw BadMessage("host " + world_.hosts[static_cast<size_t>(from_host)] + " says that rank " +
                     std::to_string(gone.rank) + " is gone");
  }
  spread(gone, from_host);
}

// Writes it down for the ranks of this host, and passes it on to the others.
void Hosts::spread(const Gone& gone, int except_host) {
  const auto i = static_cast<size_t>(gone.rank);
  if (known_gone_[i]) return;
  known_gone_[i] = true;
  if (!world_.is_local(gone.rank)) {
    Departure& departure = segment_->departure(gone.rank);
    departure.cause.store(static_cast<uint64_t>(static_cast<int64_t>(gone.cause)));
    departure.state.store(gone.state);
    segment_->coordinator().departures.fetch_add(1);
    doorbells_.ring_all(interest::kAll);
  }
  const Bytes bytes = world_.is_coordinator() ? encode(ToHost{gone}) : encode(FromHost{gone});
  for (Peer& peer : peers_) {
    // A host knows about its own ranks. A delegate has the coordinator alone, which passes on what it has said itself.
    const bool theirs = world_.host_of[i] == peer.host;
    if (peer.host != except_host && !theirs && !peer.over) peer.records->send(bytes);
  }
}

void Hosts::say_farewell(RankState state, int cause) {
  spread({world_.rank, state, cause}, -1);
  for (Peer& peer : peers_) peer.records->end_writing();
}

}  // namespace hvd
