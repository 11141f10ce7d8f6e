// Allreduce over several hosts. Each chunk goes through four stages, kApart chunks behind each other, so that several
// chunks are under way:
//
//   publish    every member puts of its chunk what others fold into its host's shared memory
//   begin      each *owner*, a member that has a slice of the chunk, folds its slice over the members of its host and
//              starts to exchange it with the owners of the same slice on the other hosts
//   reduce     it folds what the hosts have sent, in the order of hosts
//   spread     it publishes the result, and every member copies all slices out
//
// In each round of the pipeline what lies there is spread before new bytes are waited for.
//
// All hosts cut a chunk into as many slices as the host with the fewest members has members; place p owns slice p.
//
// How owners exchange a slice over H hosts:
//
//   gather     each sends its slice to all others, and folds all of them. One trip. For two hosts, and where a trip
//              costs more than the bytes. A member that is alone on its host does the same without shared memory
//              (hosts_allreduce_alone.cc).
//   scatter    the slice has H parts; each owner gets its own part from all others, folds it, and sends the result back
//              to them. Two trips; 2 (H - 1) / H of the bytes leave a host, the least that is possible.
//   ring       HOROVOD_ALLREDUCE=ring: H - 1 times, each owner sends a part to the next host, which folds its own
//              values into it; then H - 1 times the results go round. As many bytes, 2 (H - 1) trips, each host talks
//              to two.
//
// Where all members are alone on their hosts they do what scatter does without shared memory and without chunks
// (hosts_allreduce_by_parts.cc).
//
// gather and scatter fold in the same order and give the same bits; ring begins each part's fold at another host.
//
// The streams between two owners carry, in each round of the pipeline, first what `begin` sends and then what `reduce`
// sends: both ends go through the rounds alike, so both know what comes next.
//
// A round of a standing order (engine/standing_orders.h) begins without agreement. So its first chunk is published in
// the order's tray, and what `begin` sends of it goes in letters, from every member to its counterparts. When these
// have come everybody takes part in the round; the rest goes by the order's own channel and streams.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"
#include "collectives/parts.h"

namespace hvd {
namespace {

// Up to here a second trip would cost more than sending all to all.
constexpr size_t kGatherBytes = 32 << 10;
// Up to here one member of each host does it for all, in one chunk: every further wait would cost more.
constexpr size_t kOneOwnerBytes = 64 << 10;
// The same as kGatherBytes between two members that are alone on their hosts: as many bytes leave them either way.
constexpr size_t kGatherBytesOfTwo = 512 << 10;
// How many chunks lie between two stages: so many a rank can do at a stretch, before it has to wait for others.
constexpr size_t kApart = 2;
static_assert(3 * kApart < Channel::kSlots);
// The first and the last chunk; of much, where a few chunks more make no difference.
constexpr size_t kMuch = 1 << 20, kLeastChunk = 32 << 10, kLeastChunkOfMuch = 16 << 10;
// The first chunk of a standing order's round: it is under way while all hear that everybody has begun. What one letter
// on a host holds is not cut: every further wait would cost more.
constexpr size_t kFirstOfOrder = 64 << 10;
static_assert(kFirstOfOrder <= Trays::kMostBytes && Trays::kMostBytes <= Channel::kChunkBytes);

// Where chunks begin, and the end of the last. They grow and shrink again: so the first bytes leave early, and little
// is left to do when the last ones have come. first: that one's bytes, if they are given.
std::vector<size_t> cut_into_chunks(size_t bytes, size_t first = 0) {
  std::vector<size_t> ends{0};
  if (first > 0) ends.push_back(first);
  const size_t least = bytes <= kOneOwnerBytes ? kOneOwnerBytes : bytes < kMuch ? kLeastChunk : kLeastChunkOfMuch;
  size_t most = least;
  for (size_t left = bytes - first; left > 0; most = std::min(2 * most, Channel::kChunkBytes)) {
    size_t chunk = std::min(left, std::clamp(left / 2 / kLine * kLine, least, most));
    if (left - chunk < least) chunk = left;  // a tiny one more would cost as much as any
    ends.push_back(ends.back() + chunk);
    left -= chunk;
  }
  return ends;
}

enum class Way { kGather, kScatter, kRing };

class Exchange {
 public:
  Exchange(const Group& group, const Batch& batch, bool ring, const OrderRound& round)
      : group_(group),
        round_(round),
        channel_(by_order() ? group.channel_of_order(round.tray) : group.channel()),
        batch_(batch),
        arithmetic_(batch, group.size()),
        ends_(cut_into_chunks(batch.bytes(), by_order() ? first_chunk_of_order(batch.bytes()) : 0)),
        letters_(static_cast<size_t>(group.hosts())),
        posted_(static_cast<size_t>(group.hosts())) {
    const bool small = batch.bytes() <= kGatherBytes;
    way_ = ring ? Way::kRing : small || group.hosts() == 2 ? Way::kGather : Way::kScatter;
    owners_ = batch.bytes() <= kOneOwnerBytes && !by_order() ? 1 : group.size();
    for (int h = 0; h < group.hosts(); ++h) owners_ = std::min(owners_, static_cast<int>(group.members(h).size()));
    if (!owns()) return;
    const size_t slice = longest_part(std::min(Channel::kChunkBytes, batch.bytes()), owners_);
    room_ = way_ == Way::kGather ? slice : longest_part(slice, group.hosts());
    rounds_.resize(std::min<size_t>(chunks(), Channel::kSlots));
    const size_t room_of_round = room_ * static_cast<size_t>(group.hosts());
    const size_t bytes = rounds_.size() * room_of_round;
    std::byte* incoming = by_order() ? group.scratch_of_order(round.tray, bytes) : group.scratch(bytes);
    for (Round& each : rounds_) {
      each.ends.resize(static_cast<size_t>(group.hosts()));
      each.incoming = std::exchange(incoming, incoming + room_of_round);
    }
  }

  bool by_order() const { return round_.order != 0; }
  Channel& channel() const { return channel_; }
  Way way() const { return way_; }
  int owners() const { return owners_; }
  bool owns() const { return channel_.me() < owners_; }
  size_t chunks() const { return ends_.size() - 1; }
  size_t lo(size_t c) const { return ends_[c]; }
  size_t bytes(size_t c) const { return ends_[c + 1] - ends_[c]; }
  // The number of a chunk in the channel.
  uint64_t& number(size_t c) { return numbers_[c % numbers_.size()]; }

  // What others fold. An owner's own slice is folded from the input.
  void copy_in(size_t c) {
    const Range mine = owns() ? slice_of(c) : Range{0, 0};
    copy_in(c, {0, mine.begin});
    copy_in(c, {mine.end, bytes(c)});
  }

  void copy_out(size_t c, int place) {
    const Range slice = part_of(bytes(c), place, owners_);
    const std::byte* const from = channel_.payload(place, number(c), bytes(c)) + slice.begin;
    batch_.for_pieces(
        lo(c) + slice.begin, lo(c) + slice.end,
        [from](const std::byte*, std::byte* output, size_t offset, size_t n) { copy_bytes(output, from + offset, n); });
  }

  // ---- For a round of an order: its first chunk ----

  bool by_letter(size_t c) const { return by_order() && c == 0; }
  void publish_first() { group_.trays().publish(round_.tray, round_.letter, bytes(0)); }
  Until first_of(int m) { return group_.trays().published(m, round_.tray, round_.letter); }
  Until letter_from(int h) { return {{&link(h).boxes().arrived(round_.order), round_.number, link(h).rank(), 0}}; }
  // What begin() has posted is about to be overwritten.
  Until letter_sent_to(int h) {
    return {{&link(h).letters_sent(), posted_[static_cast<size_t>(h)], link(h).rank(), 0}};
  }
  // With that of all others.
  void take_letters() {
    const Range in = way_ == Way::kGather ? whole(0) : own_part(0);
    for (int h = 0; h < group_.hosts(); ++h) {
      if (talks_to(h)) letters_[static_cast<size_t>(h)] = take_letter(link(h), round_.order, in.bytes());
    }
  }

  // ---- For owners: one slice ----

  void begin(size_t c) {
    const Range mine = slice_of(c);
    const auto me = static_cast<size_t>(channel_.me());
    std::vector<const void*> sources(static_cast<size_t>(channel_.size()));
    const auto fold = [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
      std::byte* const to = slice(c) + offset;
      for (int m = 0; m < channel_.size(); ++m) {
        sources[static_cast<size_t>(m)] = published(m, c) + mine.begin + offset;
      }
      sources[me] = input;
      if (input == nullptr || batch_.prescale != 1.0) {
        arithmetic_.copy_in(to, input, n);
        sources[me] = to;
      }
      arithmetic_.fold_partly(to, sources, n);
    };
    batch_.for_pieces(lo(c) + mine.begin, lo(c) + mine.end, fold);
    if (way_ == Way::kRing) return send_along(c, 0);
    for (int h = 0; h < group_.hosts(); ++h) {
      if (!talks_to(h)) continue;
      const Range out = way_ == Way::kGather ? whole(c) : part(c, h),
                  in = way_ == Way::kGather ? whole(c) : own_part(c);
      if (by_letter(c)) {
        posted_[static_cast<size_t>(h)] = link(h).post(round_.order, slice(c) + out.begin, out.bytes());
        continue;
      }
      Stream stream = peer(h);
      end(c, h).sent = stream.send(slice(c) + out.begin, out.bytes());
      end(c, h).received = stream.receive(incoming(c, h), in.bytes());
    }
  }

  // With everything received that begin() asked for.
  void reduce(size_t c) {
    const Range own = way_ == Way::kGather ? whole(c) : own_part(c);
    std::vector<const void*> sources;
    for (int h = 0; h < group_.hosts(); ++h) {
      sources.push_back(talks_to(h) ? received(c, h) : slice(c) + own.begin);
    }
    arithmetic_.fold(slice(c) + own.begin, sources, own.bytes());
    for (int h = 0; h < group_.hosts() && by_letter(c); ++h) {
      if (talks_to(h)) link(h).boxes().reuse(std::move(letters_[static_cast<size_t>(h)]));
    }
    if (way_ == Way::kGather) return;
    for (int h = 0; h < group_.hosts(); ++h) {
      if (!talks_to(h)) continue;
      // The others' parts of our slice have been sent: their owners could not have answered otherwise.
      Stream stream = peer(h);
      end(c, h).sent = stream.send(slice(c) + own.begin, own.bytes());
      end(c, h).received = stream.receive(slice(c) + part(c, h).begin, part(c, h).bytes());
    }
  }

  // Ring: the number of trips, and what to do when the bytes of trip k have come.
  int trips() const { return 2 * (group_.hosts() - 1); }
  void pass_on(size_t c, int k) {
    const int hosts = group_.hosts();
    const Range got = ring_part(c, k + 1);
    if (k < hosts - 1) {
      const bool last = k == hosts - 2;  // all hosts are in it
      const std::vector<const void*> sources = {incoming(c, 0), slice(c) + got.begin};
      if (last) {
        arithmetic_.fold(slice(c) + got.begin, sources, got.bytes());
      } else {
        arithmetic_.fold_partly(slice(c) + got.begin, sources, got.bytes());
      }
    }
    if (k + 1 < trips()) send_along(c, k + 1);
  }

  Until received_from(size_t c, int h) { return peer(h).received(end(c, h).received); }
  Until sent_to(size_t c, int h) { return peer(h).sent(end(c, h).sent); }
  bool talks_to(int h) const { return h != group_.host(); }
  int before() const { return (group_.host() + group_.hosts() - 1) % group_.hosts(); }
  int after() const { return (group_.host() + 1) % group_.hosts(); }

 private:
  struct End {
    uint64_t sent = 0, received = 0;
  };
  struct Round {
    std::vector<End> ends;          // by host
    std::byte* incoming = nullptr;  // room_ bytes per host
  };

  // In trip k a host sends part (host - k); so it gets the part that the host before has in that trip.
  Range ring_part(size_t c, int k) const {
    const int hosts = group_.hosts();
    return part(c, ((group_.host() - k) % hosts + hosts) % hosts);
  }
  void send_along(size_t c, int k) {
    const Range out = ring_part(c, k), in = ring_part(c, k + 1);
    const bool reducing = k < group_.hosts() - 1;
    end(c, after()).sent = peer(after()).send(slice(c) + out.begin, out.bytes());
    std::byte* const into = reducing ? incoming(c, 0) : slice(c) + in.begin;
    end(c, before()).received = peer(before()).receive(into, in.bytes());
  }

  void copy_in(size_t c, Range range) {
    std::byte* const to = published(channel_.me(), c) + range.begin;
    batch_.for_pieces(lo(c) + range.begin, lo(c) + range.end,
                      [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
                        arithmetic_.copy_in(to + offset, input, n);
                      });
  }

  // Where a member's values of a chunk lie for the others of its host.
  std::byte* published(int m, size_t c) {
    return by_letter(c) ? group_.trays().payload(m, round_.tray, round_.letter, bytes(c))
                        : channel_.payload(m, number(c), bytes(c));
  }
  Range slice_of(size_t c) const { return part_of(bytes(c), channel_.me(), owners_); }
  Range whole(size_t c) const { return {0, slice_of(c).bytes()}; }
  Range part(size_t c, int h) const { return part_of(whole(c).bytes(), h, group_.hosts()); }
  Range own_part(size_t c) const { return part(c, group_.host()); }
  // Our slice of our own chunk: nobody else reads it there until it is published as reduced.
  std::byte* slice(size_t c) { return channel_.payload(channel_.me(), number(c), bytes(c)) + slice_of(c).begin; }
  Round& round(size_t c) { return rounds_[c % rounds_.size()]; }
  End& end(size_t c, int h) { return round(c).ends[static_cast<size_t>(h)]; }
  std::byte* incoming(size_t c, int h) { return round(c).incoming + room_ * static_cast<size_t>(h); }
  // What a host has sent of our slice, when it is there.
  const std::byte* received(size_t c, int h) {
    return by_letter(c) ? letters_[static_cast<size_t>(h)].data.get() : incoming(c, h);
  }
  Stream peer(int h) const {
    return by_order() ? group_.stream_of_order(h, channel_.me(), round_.tray) : group_.stream(h, channel_.me());
  }
  Link& link(int h) const { return *group_.link(group_.members(h)[static_cast<size_t>(channel_.me())]); }

  const Group& group_;
  const OrderRound round_;
  Channel& channel_;
  const Batch& batch_;
  const Arithmetic arithmetic_;
  const std::vector<size_t> ends_;  // of chunks
  Way way_ = Way::kGather;
  int owners_ = 1;
  size_t room_ = 0;
  std::array<uint64_t, Channel::kSlots> numbers_{};
  std::vector<Round> rounds_;  // as many as can be under way
  // By host: of an order's first chunk.
  std::vector<Letter> letters_;
  std::vector<uint64_t> posted_;
};

}  // namespace

size_t first_chunk_of_order(size_t bytes) { return bytes <= Trays::kMostBytes ? bytes : kFirstOfOrder; }

Task allreduce_by_chunks(const Group& group, const Batch& batch, bool ring, OrderRound round) {
  Exchange exchange(group, batch, ring, round);
  Channel& channel = exchange.channel();
  const size_t chunks = exchange.chunks();
  const bool owns = exchange.owns();
  const size_t first = exchange.by_order() ? 1 : 0;  // that is not under way
  if (exchange.by_order()) {
    exchange.number(0) = channel.next_chunk();
    exchange.copy_in(0);
    exchange.publish_first();
    for (int m = 0; m < channel.size(); ++m) {
      if (m != channel.me()) co_await exchange.first_of(m);
    }
    // Who has begun a round is done with all chunks of the last one: our slot is free.
    exchange.begin(0);
    for (int h = 0; h < group.hosts(); ++h) {
      if (!exchange.talks_to(h)) continue;
      co_await exchange.letter_from(h);
      co_await exchange.letter_sent_to(h);
    }
    exchange.take_letters();
    *round.begun_by_all = true;
  }
  for (size_t t = first; chunks > 0 && t < chunks + 3 * kApart; ++t) {
    if (t < chunks) {
      const uint64_t s = exchange.number(t) = channel.next_chunk();
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
      exchange.copy_in(t);
      channel.publish(s, exchange.bytes(t));
    }
    if (t >= first + kApart && t - kApart < chunks && owns) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, exchange.number(t - kApart));
      exchange.begin(t - kApart);
      // Small ones, as the first are, leave at once.
      if (exchange.bytes(t - kApart) < Channel::kChunkBytes) co_await LetOthers{};
    }
    if (t >= 3 * kApart && t - 3 * kApart < chunks) {
      const size_t c = t - 3 * kApart;
      if (owns) {
        for (int h = 0; h < group.hosts() && exchange.way() == Way::kScatter; ++h) {
          if (exchange.talks_to(h)) co_await exchange.received_from(c, h);
        }
        channel.publish_reduced(exchange.number(c));
      }
      for (int place = 0; place < exchange.owners(); ++place) {
        co_await channel.reduced(place, exchange.number(c));
        exchange.copy_out(c, place);
      }
      // The slot is used again when all are done with it; what we have sent from it must be out by then.
      for (int h = 0; h < group.hosts() && owns; ++h) {
        if (exchange.talks_to(h)) co_await exchange.sent_to(c, h);
      }
      channel.finish(exchange.number(c));
      if (c + 1 < chunks) co_await LetOthers{};
    }
    if (t >= 2 * kApart && t - 2 * kApart < chunks && owns) {
      const size_t c = t - 2 * kApart;
      if (exchange.way() == Way::kRing) {
        for (int k = 0; k < exchange.trips(); ++k) {
          co_await exchange.received_from(c, exchange.before());
          exchange.pass_on(c, k);
        }
      } else {
        for (int h = 0; h < group.hosts() && !exchange.by_letter(c); ++h) {
          if (!exchange.talks_to(h)) continue;
          co_await exchange.received_from(c, h);
          // Of a gather the whole slice is about to be overwritten.
          if (exchange.way() == Way::kGather) co_await exchange.sent_to(c, h);
        }
        exchange.reduce(c);
      }
    }
  }
}

// From what all members know: they must choose alike.
Task allreduce_between_hosts(const Group& group, const Batch& batch, bool ring) {
  if (ring) return allreduce_by_chunks(group, batch, ring);
  const bool two = group.hosts() == 2;
  const bool parts = batch.bytes() > (two ? kGatherBytesOfTwo : kGatherBytes);
  if (group.all_alone() && parts) return allreduce_by_parts(group, batch);
  const bool gathers = two || batch.bytes() <= kGatherBytes;
  if (group.members_here().size() == 1 && gathers) return allreduce_alone_on_host(group, batch);
  return allreduce_by_chunks(group, batch, ring);
}

}  // namespace hvd
