// Reducescatter: every member gets its own rows of the sum.
//
// Words. Member m's *lane* is what belongs to it: its rows of all tensors of the batch, laid end to end. A chunk holds
// an equal share of every lane, so that all members always have something to fold:
//
//   chunk k   | lane 0, k-th part | lane 1, k-th part | ... |
//
//   publish chunk k + 1; wait for everybody's chunk k; fold our own lane's part of it into the output
#include <algorithm>
#include <cstring>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"

namespace hvd {
namespace {

class Scatter {
 public:
  Scatter(const Channel& channel, const Batch& batch) : channel_(channel), arithmetic_(batch, channel.size()) {
    const int n = channel.size();
    part_ = Channel::kChunkBytes / static_cast<size_t>(n) / kLine * kLine;
    lanes_.resize(static_cast<size_t>(n));
    for (size_t t = 0; t < batch.rows.size(); ++t) {
      const RowsTensor& tensor = batch.rows[t];
      size_t start = 0;
      for (int m = 0; m < n; ++m) {
        const auto bytes = static_cast<size_t>(rows_of(m, n, tensor.counts[0])) * tensor.row_bytes;
        lanes_[static_cast<size_t>(m)].add(tensor.input + start, m == channel.me() ? batch.output(t) : nullptr, bytes);
        start += bytes;
      }
    }
    for (const Batch& lane : lanes_) longest_ = std::max(longest_, lane.bytes());
  }

  size_t steps() const { return (longest_ + part_ - 1) / part_; }
  size_t chunk_bytes() const { return part_ * lanes_.size(); }

  void copy_in(size_t k, uint64_t s) const {
    std::byte* const chunk = channel_.payload(channel_.me(), s, chunk_bytes());
    for (size_t m = 0; m < lanes_.size(); ++m) {
      lanes_[m].for_pieces(k * part_, (k + 1) * part_,
                           [&](const std::byte* input, std::byte*, size_t offset, size_t bytes) {
                             arithmetic_.copy_in(chunk + m * part_ + offset, input, bytes);
                           });
    }
  }

  void fold(size_t k, uint64_t s) const {
    const auto me = static_cast<size_t>(channel_.me());
    std::vector<const void*> sources(lanes_.size());
    lanes_[me].for_pieces(k * part_, (k + 1) * part_,
                          [&](const std::byte*, std::byte* output, size_t offset, size_t bytes) {
                            for (int m = 0; m < channel_.size(); ++m) {
                              const std::byte* chunk = channel_.payload(m, s, chunk_bytes());
                              sources[static_cast<size_t>(m)] = chunk + me * part_ + offset;
                            }
                            arithmetic_.fold(output, sources, bytes);
                          });
  }

 private:
  const Channel& channel_;
  const Arithmetic arithmetic_;
  std::vector<Batch> lanes_;  // by member
  size_t part_ = 0;           // bytes of a lane in a chunk
  size_t longest_ = 0;
};

}  // namespace

int64_t rows_of(int member, int members, int64_t rows) { return rows / members + (member < rows % members ? 1 : 0); }

Task reducescatter(Channel& channel, const Batch& batch) {
  const Scatter scatter(channel, batch);
  uint64_t ahead = 0, current = 0;
  for (size_t k = 0; k <= scatter.steps(); ++k) {
    if (k < scatter.steps()) {
      ahead = channel.next_chunk();
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
      scatter.copy_in(k, ahead);
      channel.publish(ahead, scatter.chunk_bytes());
    }
    if (k > 0) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.published(m, current);
      scatter.fold(k - 1, current);
      channel.finish(current);
      if (k < scatter.steps()) co_await LetOthers{};
    }
    current = ahead;
  }
}

}  // namespace hvd
