// Allreduce on shared memory, by three algorithms. All fold in the order of the members, so that every rank gets the
// same bits, whatever was fused with what.
//
// direct   Every member publishes its chunk and folds all members' chunks itself, straight into the output. One
//          synchronisation a chunk. Best for two members at any size, and for small payloads.
//
//            member 0   |in 0|      |in 1| fold 0 |in 2| fold 1 | ...
//            member 1   |in 0|      |in 1| fold 0 |in 2| fold 1 | ...
//
// sliced   Every member publishes its chunk, folds its own slice of it in place (nobody else reads that slice of its
//          buffer), publishes that, and copies all slices out. Each byte is folded once on the host. Where members
//          share cores they do each of these for a *window* of several chunks, because they wait for each other longer.
//
// placed   As sliced, but the chunks are the tensors themselves: all members' lie in memory from hvd_alloc, which the
//          others can read. Nothing is copied in. Member m owns the m-th slice of the whole tensor and folds it in
//          place, chunk by chunk; the others copy it from there. Whether all are placed is asked first, by one tiny
//          chunk that holds each member's offset; who is not placed itself does not wait for the answer.
//
// In direct and sliced a member stays one chunk (or window) ahead: it publishes the next one before it waits for its
// peers' last one.
#include <cstring>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"
#include "collectives/outputs.h"
#include "collectives/parts.h"
#include "transport/errors.h"

namespace hvd {
namespace {

// Larger payloads are reduced by slices: without a core for every member only when they take several chunks.
constexpr size_t kDirectBytes = 32 << 10;
constexpr size_t kCrowdedDirectBytes = Channel::kChunkBytes;
// Chunks of direct where every member has a core: smaller ones leave less of the first and the last to wait for.
constexpr size_t kDirectChunkBytes = 128 << 10;
// Chunks of a window. Two windows must fit into the slots.
constexpr size_t kCrowdedWindow = 2;
static_assert(2 * kCrowdedWindow <= Channel::kSlots);
// From here on asking whether the tensors are placed is cheap compared with what it can save.
constexpr size_t kPlacedBytes = 512 << 10;

// The chunk that begins lo bytes into a range; empty past its end.
Range chunk_of(const Range& range, size_t lo) {
  const size_t from = std::min(range.begin + lo, range.end);
  return {from, std::min(from + Channel::kChunkBytes, range.end)};
}

class Reduction {
 public:
  Reduction(const Channel& channel, const Batch& batch, size_t chunk_bytes = Channel::kChunkBytes)
      : channel_(channel), batch_(batch), chunk_bytes_(chunk_bytes), arithmetic_(batch, channel.size()) {}

  size_t chunks() const { return (batch_.bytes() + chunk_bytes_ - 1) / chunk_bytes_; }
  size_t lo(size_t c) const { return c * chunk_bytes_; }
  size_t hi(size_t c) const { return std::min(lo(c) + chunk_bytes_, batch_.bytes()); }
  size_t bytes(size_t c) const { return hi(c) - lo(c); }

  void copy_in(size_t c, uint64_t s) const {
    std::byte* const chunk = channel_.payload(channel_.me(), s, bytes(c));
    batch_.for_pieces(lo(c), hi(c), [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
      arithmetic_.copy_in(chunk + offset, input, n);
    });
  }

  // The same for who is to fold its own slice: that is needed from the slot only where it is not as it lies in the
  // input.
  void copy_in_for_others(size_t c, uint64_t s) const {
    std::byte* const chunk = channel_.payload(channel_.me(), s, bytes(c));
    const Range mine = slice(channel_.me(), bytes(c));
    const auto copy = [&](const Range& part, bool own) {
      batch_.for_pieces(lo(c) + part.begin, lo(c) + part.end,
                        [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
                          if (own && is_in_input(input)) return;
                          arithmetic_.copy_in(chunk + part.begin + offset, input, n);
                        });
    };
    copy({0, mine.begin}, false);
    copy(mine, true);
    copy({mine.end, bytes(c)}, false);
  }

  // Folds all members' chunk s into the output.
  void fold_out(size_t c, uint64_t s) const {
    std::vector<const std::byte*> chunks;
    for (int m = 0; m < channel_.size(); ++m) chunks.push_back(channel_.payload(m, s, bytes(c)));
    std::vector<const void*> sources(chunks.size());
    batch_.for_pieces(lo(c), hi(c), [&](const std::byte* input, std::byte* output, size_t offset, size_t n) {
      for (size_t m = 0; m < chunks.size(); ++m) sources[m] = chunks[m] + offset;
      if (is_in_input(input)) sources[static_cast<size_t>(channel_.me())] = input;
      arithmetic_.fold(output, sources, n);
    });
  }

  // The part of this many bytes that a member folds.
  Range slice(int member, size_t bytes) const { return part_of(bytes, member, channel_.size()); }

  void fold_slice(size_t c, uint64_t s) const {
    const Range mine = slice(channel_.me(), bytes(c));
    std::byte* const result = channel_.payload(channel_.me(), s, bytes(c)) + mine.begin;
    std::vector<const void*> sources(static_cast<size_t>(channel_.size()));
    batch_.for_pieces(lo(c) + mine.begin, lo(c) + mine.end,
                      [&](const std::byte* input, std::byte*, size_t offset, size_t n) {
                        for (int m = 0; m < channel_.size(); ++m) {
                          sources[static_cast<size_t>(m)] = channel_.payload(m, s, bytes(c)) + mine.begin + offset;
                        }
                        if (is_in_input(input)) sources[static_cast<size_t>(channel_.me())] = input;
                        arithmetic_.fold(result + offset, sources, n);
                      });
  }

  void copy_out(size_t c, uint64_t s, int member) const {
    const Range part = slice(member, bytes(c));
    const std::byte* const from = channel_.payload(member, s, bytes(c)) + part.begin;
    batch_.for_pieces(
        lo(c) + part.begin, lo(c) + part.end,
        [from](const std::byte*, std::byte* output, size_t offset, size_t n) { copy_bytes(output, from + offset, n); });
  }

  // Folds the chunk that begins lo bytes into this member's slice of the whole tensor.
  void fold_placed(const std::vector<const std::byte*>& tensors, std::byte* mine, size_t lo) const {
    const Range part = chunk_of(slice(channel_.me(), batch_.bytes()), lo);
    std::vector<const void*> sources;
    for (const std::byte* tensor : tensors) sources.push_back(tensor + part.begin);
    arithmetic_.fold(mine + part.begin, sources, part.bytes());
  }

 private:
  // Whether a piece of our own values may be read from where it lies: it need not be scaled, nor made (of a joined
  // rank).
  bool is_in_input(const std::byte* input) const { return batch_.prescale == 1.0 && input != nullptr; }

  const Channel& channel_;
  const Batch& batch_;
  const size_t chunk_bytes_;
  const Arithmetic arithmetic_;
};

Task reduce_direct(Channel& channel, const Batch& batch) {
  const Reduction reduction(channel, batch, channel.crowded() ? Channel::kChunkBytes : kDirectChunkBytes);
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
  const size_t window = channel.crowded() ? kCrowdedWindow : 1;
  const size_t windows = (reduction.chunks() + window - 1) / window;
  const auto begin = [&](size_t w) { return w * window; };
  const auto end = [&](size_t w) { return std::min(begin(w) + window, reduction.chunks()); };
  uint64_t ahead = 0, current = 0;  // the first chunk of the next window, and of this one
  for (size_t w = 0; w <= windows; ++w) {
    if (w < windows) {
      for (size_t c = begin(w); c < end(w); ++c) {
        const uint64_t s = channel.next_chunk();
        if (c == begin(w)) ahead = s;
        for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
        reduction.copy_in_for_others(c, s);
        channel.publish(s, reduction.bytes(c));
      }
    }
    if (w > 0) {
      const size_t first = begin(w - 1), count = end(w - 1) - first;
      const uint64_t last = current + count - 1;
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, last);
      for (size_t i = 0; i < count; ++i) reduction.fold_slice(first + i, current + i);
      channel.publish_reduced(last);
      for (int m = 0; m < channel.size(); ++m) {
        co_await channel.reduced(m, last);
        for (size_t i = 0; i < count; ++i) reduction.copy_out(first + i, current + i, m);
      }
      channel.finish(last);
      if (w < windows) co_await LetOthers{};
    }
    current = ahead;
  }
}

// All members must decide alike, so the choice depends on nothing but the payload, the number of members and the
// segment.
Task reduce_copied(Channel& channel, const Batch& batch) {
  const bool sliced = channel.size() > 2 && batch.bytes() > (channel.crowded() ? kCrowdedDirectBytes : kDirectBytes);
  return sliced ? reduce_sliced(channel, batch) : reduce_direct(channel, batch);
}

constexpr uint64_t kNotPlaced = ~uint64_t{0};

Task reduce_placed(Channel& channel, const Batch& batch, PeerArenas& arenas) {
  std::byte* const mine = batch.output(0);
  const bool in_place = batch.input(0) == mine;
  uint64_t offset = kNotPlaced;
  if (in_place) offset = arenas.offset_of(mine, batch.bytes(), channel.members()).value_or(kNotPlaced);

  uint64_t s = channel.next_chunk();
  for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
  std::memcpy(channel.payload(channel.me(), s, sizeof offset), &offset, sizeof offset);
  channel.publish(s, sizeof offset);
  // All members see the same offsets, so all of them decide alike. One that is not placed itself knows the answer, and
  // waits for nobody's.
  bool all_placed = offset != kNotPlaced;
  std::vector<const std::byte*> tensors;  // by member
  for (int m = 0; m < channel.size() && all_placed; ++m) {
    co_await channel.published(m, s);
    std::memcpy(&offset, channel.payload(m, s, sizeof offset), sizeof offset);
    all_placed = offset != kNotPlaced;
    if (!all_placed) break;
    const int local_rank = channel.members()[static_cast<size_t>(m)];
    tensors.push_back(m == channel.me() ? mine : arenas.at(local_rank, offset, batch.bytes()));
    if (tensors.back() == nullptr) {
      throw Error(HVD_SYSTEM, "local rank " + std::to_string(local_rank) + " points outside of its shared memory");
    }
  }
  channel.finish(s);

  if (!all_placed) {
    Task copied = reduce_copied(channel, batch);
    for (copied.resume(); !copied.done(); copied.resume()) {
      if (copied.wait().flag == nullptr) {
        co_await LetOthers{};
      } else {
        co_await Until{copied.wait()};
      }
    }
    if (copied.error()) std::rethrow_exception(copied.error());
    co_return;
  }

  const Reduction reduction(channel, batch);
  const CopyBytes copy_to_output = copy_for_outputs(batch.bytes());
  channel.count_placed(batch.bytes());
  // Every slice has as many steps as the longest one. A member stays one step ahead: it folds the next part of its
  // slice before it waits for the others' last one.
  size_t longest = 0;
  for (int m = 0; m < channel.size(); ++m) longest = std::max(longest, reduction.slice(m, batch.bytes()).bytes());
  const size_t steps = (longest + Channel::kChunkBytes - 1) / Channel::kChunkBytes;
  uint64_t ahead = 0;
  for (size_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      ahead = channel.next_chunk();
      reduction.fold_placed(tensors, mine, step * Channel::kChunkBytes);
      channel.publish_reduced(ahead);
    }
    if (step > 0) {
      for (int m = 0; m < channel.size(); ++m) {
        if (m == channel.me()) continue;
        co_await channel.reduced(m, s);
        // Its owner has folded this part, so nobody needs our own values there any more.
        const Range part = chunk_of(reduction.slice(m, batch.bytes()), (step - 1) * Channel::kChunkBytes);
        copy_to_output(mine + part.begin, tensors[static_cast<size_t>(m)] + part.begin, part.bytes());
      }
      // Nobody may leave before all are done; who has done so may have changed what we have just copied.
      for (int m = 0; m < channel.size(); ++m) {
        if (channel.has_left(m)) throw PeerGone(channel.ranks()[static_cast<size_t>(m)]);
      }
      channel.finish(s);
      co_await LetOthers{};
    }
    s = ahead;
  }
  // The tensor is the caller's again only when nobody reads it any more.
  for (int m = 0; m < channel.size(); ++m) co_await channel.done(m, s);
}

}  // namespace

Task allreduce(Channel& channel, const Batch& batch, PeerArenas& arenas) {
  const bool may_be_placed =
      channel.size() > 1 && batch.tensors() == 1 && batch.bytes() >= kPlacedBytes && batch.prescale == 1.0;
  return may_be_placed ? reduce_placed(channel, batch, arenas) : reduce_copied(channel, batch);
}

}  // namespace hvd
