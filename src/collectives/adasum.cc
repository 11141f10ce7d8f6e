// Adasum: pairs of vectors are combined so that orthogonal ones add and parallel ones average. For a and b
//
//   (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
//
// with the products of each tensor on its own, in double. Pairs are formed like this, for any number of members n with
// p the largest power of two in it:
//
//   fold in     member p + i gives its vector to member i, for all i < n - p
//   butterfly   members below p exchange with their partner m ^ 1, then m ^ 2, ... and both compute the same pair,
//               the lower member's vector first
//   hand out    member i gives the result back to member p + i
//
// Between members of one host vectors move through the channel as a broadcast does, and every member takes part in
// every chunk's count; between hosts by streams.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "collectives/collectives.h"
#include "kernels/kernels.h"

namespace hvd {
namespace {

class Combiner {
 public:
  explicit Combiner(const Batch& batch) : batch_(batch), element_(dtype_bytes(batch.dtype)), partner_(batch.bytes()) {}

  // The vector begins as the input and ends as the result.
  void begin() const { scale(batch_.prescale, true); }
  void end() const { scale(batch_.postscale, false); }

  void copy_in(size_t lo, size_t hi, std::byte* chunk) const {
    batch_.for_pieces(lo, hi, [chunk](const std::byte*, std::byte* output, size_t offset, size_t bytes) {
      copy_bytes(chunk + offset, output, bytes);
    });
  }
  void take_partner(size_t lo, size_t hi, const std::byte* chunk) { copy_bytes(partner_.data() + lo, chunk, hi - lo); }
  void take_result(size_t lo, size_t hi, const std::byte* chunk) const {
    batch_.for_pieces(lo, hi, [chunk](const std::byte*, std::byte* output, size_t offset, size_t bytes) {
      copy_bytes(output, chunk + offset, bytes);
    });
  }

  // The whole vector to or from a member on another host.
  uint64_t send(Stream& stream) const {
    uint64_t end = 0;
    for (size_t t = 0; t < batch_.tensors(); ++t) end = stream.send(batch_.output(t), batch_.bytes(t));
    return end;
  }
  uint64_t receive(Stream& stream, bool is_result) {
    if (!is_result) return stream.receive(partner_.data(), partner_.size());
    uint64_t end = 0;
    for (size_t t = 0; t < batch_.tensors(); ++t) end = stream.receive(batch_.output(t), batch_.bytes(t));
    return end;
  }

  // Replaces our vector by the pair of it and the partner's.
  void combine(bool partner_is_lower) const {
    const Kernels& k = kernels();
    for (size_t t = 0; t < batch_.tensors(); ++t) {
      std::byte* const mine = batch_.output(t);
      const std::byte* const theirs = partner_.data() + batch_.start(t);
      const std::byte* const a = partner_is_lower ? theirs : mine;
      const std::byte* const b = partner_is_lower ? mine : theirs;
      const size_t count = batch_.bytes(t) / element_;
      double sums[3] = {0, 0, 0};  // a.b, |a|^2, |b|^2
      k.adasum_sums[batch_.dtype](a, b, count, sums);
      const double least = std::sqrt(DBL_MIN);
      const double ca = sums[1] < least ? 1.0 : 1.0 - sums[0] / (2.0 * sums[1]);
      const double cb = sums[2] < least ? 1.0 : 1.0 - sums[0] / (2.0 * sums[2]);
      k.adasum_combine[batch_.dtype](mine, a, b, count, ca, cb);
    }
  }

 private:
  void scale(double factor, bool from_input) const {
    for (size_t t = 0; t < batch_.tensors(); ++t) {
      const std::byte* from = from_input ? batch_.input(t) : batch_.output(t);
      std::byte* const to = batch_.output(t);
      if (from == nullptr) {
        std::memset(to, 0, batch_.bytes(t));
      } else if (factor != 1.0) {
        kernels().scale_copy[batch_.dtype](to, from, batch_.bytes(t) / element_, factor);
      } else if (from != to && batch_.bytes(t) > 0) {
        copy_bytes(to, from, batch_.bytes(t));
      }
    }
  }

  const Batch& batch_;
  const size_t element_;
  std::vector<std::byte> partner_;
};

// Who exchanges with whom in one round: a member sends, or takes what its partner sends, or both, or neither.
struct Round {
  int partner = -1;
  bool sends = false, takes = false;
  bool last = false;  // what is taken is the result
};

std::vector<Round> rounds_of(int me, int members) {
  const int p = static_cast<int>(std::bit_floor(static_cast<unsigned>(members)));
  const bool extra = me >= p, has_extra = me + p < members;
  std::vector<Round> rounds;
  if (p < members) rounds.push_back({extra ? me - p : me + p, extra, has_extra, false});
  for (int distance = 1; distance < p; distance *= 2) rounds.push_back({me ^ distance, !extra, !extra, false});
  if (p < members) rounds.push_back({extra ? me - p : me + p, has_extra, extra, true});
  return rounds;
}

}  // namespace

Task adasum(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  const std::vector<int>& here = group.members_here();
  Combiner combiner(batch);
  combiner.begin();
  for (const Round& round : rounds_of(group.me(), group.size())) {
    const auto partner = std::find(here.begin(), here.end(), round.partner);
    const bool is_here = partner != here.end();
    const int place = static_cast<int>(partner - here.begin());
    if (!is_here && (round.sends || round.takes)) {
      Stream stream = group.stream(round.partner);
      uint64_t sent = 0, received = 0;
      if (round.sends) sent = combiner.send(stream);
      if (round.takes) received = combiner.receive(stream, round.last);
      if (round.takes) co_await stream.received(received);
      if (round.sends) co_await stream.sent(sent);
    }
    for (size_t lo = 0; lo < batch.bytes(); lo += Channel::kChunkBytes) {
      const size_t hi = std::min(lo + Channel::kChunkBytes, batch.bytes());
      const uint64_t s = channel.next_chunk();
      if (round.sends && is_here) {
        for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
        combiner.copy_in(lo, hi, channel.payload(channel.me(), s, hi - lo));
        channel.publish(s, hi - lo);
      }
      if (round.takes && is_here) {
        co_await channel.published(place, s);
        const std::byte* const chunk = channel.payload(place, s, hi - lo);
        if (round.last) {
          combiner.take_result(lo, hi, chunk);
        } else {
          combiner.take_partner(lo, hi, chunk);
        }
      }
      channel.finish(s);
      co_await LetOthers{};
    }
    if (round.takes && !round.last) combiner.combine(round.partner < group.me());
  }
  combiner.end();
}

}  // namespace hvd
