// Broadcast: the root publishes chunk after chunk, everyone else copies them out.
//
//   root    wait for its slot, copy in, publish, done
//   others  wait for the root's chunk, copy out, done
//
// The root runs up to kSlots chunks ahead of the slowest member. Payloads that would fit into one chunk are cut too, so
// that the others copy out while the root still copies in.
#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/outputs.h"

namespace hvd {

constexpr size_t kLeastPiece = 16 << 10;

Task broadcast(Channel& channel, const Batch& batch) {
  const bool is_root = channel.me() == batch.root;
  const size_t pieces = channel.crowded() ? 4 : 16;  // where ranks share cores to wait costs more
  const size_t piece = std::clamp(batch.bytes() / pieces, kLeastPiece, Channel::kChunkBytes) / kLine * kLine;
  const CopyBytes copy_to_output = copy_for_outputs(batch.bytes());
  for (size_t lo = 0; lo < batch.bytes(); lo += piece) {
    const size_t hi = std::min(lo + piece, batch.bytes());
    const uint64_t s = channel.next_chunk();
    std::byte* const chunk = channel.payload(batch.root, s, hi - lo);
    if (is_root) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
      batch.for_pieces(lo, hi,
                       [chunk, copy_to_output](const std::byte* input, std::byte* output, size_t offset, size_t bytes) {
                         copy_bytes(chunk + offset, input, bytes);
                         if (output != input) copy_to_output(output, input, bytes);
                       });
      channel.publish(s, hi - lo);
    } else {
      co_await channel.published(batch.root, s);
      batch.for_pieces(lo, hi,
                       [chunk, copy_to_output](const std::byte*, std::byte* output, size_t offset, size_t bytes) {
                         copy_to_output(output, chunk + offset, bytes);
                       });
    }
    channel.finish(s);
    if (hi < batch.bytes()) co_await LetOthers{};
  }
}

}  // namespace hvd
