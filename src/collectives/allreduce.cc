// Allreduce on shared memory, by two algorithms. Both fold in the order of the members, so that every rank gets the
// same bits, whatever was fused with what.
//
// direct   Every member publishes its chunk and folds all members' chunks itself, straight into the output. One
//          synchronisation a chunk. Best for two members at any size, and for small payloads.
//
//            member 0   |in 0|      |in 1| fold 0 |in 2| fold 1 | ...
//            member 1   |in 0|      |in 1| fold 0 |in 2| fold 1 | ...
//
// sliced   Every member publishes its chunk, folds its own slice of it in place (nobody else reads that slice of its
//          buffer), publishes that, and copies all slices out. Each byte is folded once on the host.
//
// In both a member stays one chunk ahead: it publishes chunk s + 1 before it waits for its peers' chunk s.
#include <cstring>

#include "collectives/collectives.h"
#include "kernels/kernels.h"

namespace hvd {
namespace {

// With three or more members, larger payloads are reduced by slices. All members must decide alike, so this depends on
// nothing but the payload and the number of members.
constexpr size_t kDirectBytes = 32 << 10;

class Reduction {
 public:
  Reduction(const Channel& channel, const Batch& batch)
      : channel_(channel),
        batch_(batch),
        element_(dtype_bytes(batch.dtype)),
        scale_copy_(kernels().scale_copy[batch.dtype]),
        fold_(kernels().fold[batch.dtype][batch.reduce_op]) {
    finish_.factor = batch.postscale;
    if (batch.reduce_op == HVD_AVERAGE) {
      const bool integer = batch.dtype <= HVD_INT64;
      if (integer) {
        finish_.divisor = channel.size();
      } else {
        finish_.factor /= channel.size();
      }
    }
  }

  size_t chunks() const { return (batch_.bytes() + Channel::kChunkBytes - 1) / Channel::kChunkBytes; }
  size_t lo(size_t c) const { return c * Channel::kChunkBytes; }
  size_t hi(size_t c) const { return std::min(lo(c) + Channel::kChunkBytes, batch_.bytes()); }
  size_t bytes(size_t c) const { return hi(c) - lo(c); }

  void copy_in(size_t c, uint64_t s) const {
    std::byte* const chunk = channel_.payload(channel_.me(), s, bytes(c));
    batch_.for_pieces(lo(c), hi(c), [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
      if (batch_.prescale == 1.0) {
        std::memcpy(chunk + offset, input, n);
      } else {
        scale_copy_(chunk + offset, input, n / element_, batch_.prescale);
      }
    });
  }

  // Folds all members' chunk s into the output.
  void fold_out(size_t c, uint64_t s) const {
    std::vector<const void*> sources(static_cast<size_t>(channel_.size()));
    batch_.for_pieces(lo(c), hi(c), [&](const std::byte*, std::byte* output, size_t offset, size_t n) {
      for (int m = 0; m < channel_.size(); ++m)
        sources[static_cast<size_t>(m)] = channel_.payload(m, s, bytes(c)) + offset;
      fold_(output, sources.data(), channel_.size(), n / element_, finish_);
    });
  }

  // The part of a chunk of this many bytes that a member folds: multiples of a cache line, so that no two write one.
  size_t slice_begin(int member, size_t chunk_bytes) const {
    const auto n = static_cast<size_t>(channel_.size()), m = static_cast<size_t>(member);
    return m == n ? chunk_bytes : std::min(chunk_bytes, chunk_bytes * m / n / kLine * kLine);
  }

  void fold_slice(size_t c, uint64_t s) const {
    const size_t begin = slice_begin(channel_.me(), bytes(c)), end = slice_begin(channel_.me() + 1, bytes(c));
    std::vector<const void*> sources(static_cast<size_t>(channel_.size()));
    for (int m = 0; m < channel_.size(); ++m)
      sources[static_cast<size_t>(m)] = channel_.payload(m, s, bytes(c)) + begin;
    std::byte* const mine = channel_.payload(channel_.me(), s, bytes(c)) + begin;
    fold_(mine, sources.data(), channel_.size(), (end - begin) / element_, finish_);
  }

  void copy_out(size_t c, uint64_t s, int member) const {
    const size_t begin = slice_begin(member, bytes(c)), end = slice_begin(member + 1, bytes(c));
    const std::byte* const slice = channel_.payload(member, s, bytes(c)) + begin;
    batch_.for_pieces(lo(c) + begin, lo(c) + end,
                      [slice](const std::byte*, std::byte* output, size_t offset, size_t n) {
                        std::memcpy(output, slice + offset, n);
                      });
  }

 private:
  const Channel& channel_;
  const Batch& batch_;
  const size_t element_;
  void (*scale_copy_)(void*, const void*, size_t, double);
  void (*fold_)(void*, const void* const*, int, size_t, const Finish&);
  Finish finish_;
};

Task reduce_direct(Channel& channel, const Batch& batch) {
  const Reduction reduction(channel, batch);
  uint64_t ahead = 0, current = 0;
  for (size_t c = 0; c <= reduction.chunks(); ++c) {
    if (c < reduction.chunks()) {
      ahead = channel.next_chunk();
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
      reduction.copy_in(c, ahead);
      channel.publish(ahead, reduction.bytes(c));
    }
    if (c > 0) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, current);
      reduction.fold_out(c - 1, current);
      channel.finish(current);
      if (c < reduction.chunks()) co_await LetOthers{};
    }
    current = ahead;
  }
}

Task reduce_sliced(Channel& channel, const Batch& batch) {
  const Reduction reduction(channel, batch);
  uint64_t ahead = 0, current = 0;
  for (size_t c = 0; c <= reduction.chunks(); ++c) {
    if (c < reduction.chunks()) {
      ahead = channel.next_chunk();
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
      reduction.copy_in(c, ahead);
      channel.publish(ahead, reduction.bytes(c));
    }
    if (c > 0) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, current);
      reduction.fold_slice(c - 1, current);
      channel.publish_reduced(current);
      for (int m = 0; m < channel.size(); ++m) {
        co_await channel.reduced(m, current);
        reduction.copy_out(c - 1, current, m);
      }
      channel.finish(current);
      if (c < reduction.chunks()) co_await LetOthers{};
    }
    current = ahead;
  }
}

}  // namespace

Task allreduce(Channel& channel, const Batch& batch) {
  if (channel.size() <= 2 || batch.bytes() <= kDirectBytes) return reduce_direct(channel, batch);
  return reduce_sliced(channel, batch);
}

}  // namespace hvd
