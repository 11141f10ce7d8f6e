// Allgather and alltoall: see rows.h. They differ in one thing: which part of a member's stream another one takes. Of
// an allgather that is all of it, of an alltoall the rows that were split off for it.
//
//   counts   everybody publishes its counts, reads all others', allocates
//   step k   everybody publishes the k-th chunk of its stream, if it has one, and copies its part of the others'
#include "collectives/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/collectives.h"
#include "transport/errors.h"

namespace hvd {
namespace {

// A run of bytes in a member's stream that this member takes, and where it goes.
struct Piece {
  size_t start, bytes;
  std::byte* output;
};

// All counts of all members, and what follows from them for this member.
class Plan {
 public:
  Plan(const Channel& channel, const Batch& batch)
      : channel_(channel),
        tensors_(batch.rows),
        per_tensor_(batch.op == HVD_ALLTOALL ? static_cast<size_t>(channel.size()) : 1),
        counts_(static_cast<size_t>(channel.size())) {}

  size_t counts_bytes() const { return tensors_.size() * per_tensor_ * sizeof(int64_t); }

  void write_counts(std::byte* to) const {
    for (const RowsTensor& tensor : tensors_) {
      std::memcpy(to, tensor.counts.data(), per_tensor_ * sizeof(int64_t));
      to += per_tensor_ * sizeof(int64_t);
    }
  }

  void read_counts(int member, const std::byte* from) {
    std::vector<int64_t>& counts = counts_[static_cast<size_t>(member)];
    counts.resize(tensors_.size() * per_tensor_);
    if (!counts.empty()) std::memcpy(counts.data(), from, counts_bytes());
  }

  // With all counts known: allocates the outputs and finds the pieces.
  void lay_out() {
    const auto members = static_cast<size_t>(channel_.size()), me = static_cast<size_t>(channel_.me());
    pieces_.resize(members);
    stream_bytes_.assign(members, 0);
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const RowsTensor& tensor = tensors_[t];
      std::vector<int64_t> received(members);
      for (size_t m = 0; m < members; ++m) received[m] = count(m, t, me);
      std::byte* output = tensor.allocate(received);
      for (size_t m = 0; m < members; ++m) {
        size_t skipped = 0, all = 0;  // rows of this tensor before our part, and in total
        for (size_t part = 0; part < per_tensor_; ++part) {
          const auto rows = static_cast<size_t>(count(m, t, part));
          if (part < me && per_tensor_ > 1) skipped += rows;
          all += rows;
        }
        const size_t bytes = static_cast<size_t>(received[m]) * tensor.row_bytes;
        if (bytes > 0) pieces_[m].push_back({stream_bytes_[m] + skipped * tensor.row_bytes, bytes, output});
        output += bytes;
        stream_bytes_[m] += all * tensor.row_bytes;
      }
    }
    longest_ = *std::max_element(stream_bytes_.begin(), stream_bytes_.end());
  }

  size_t steps() const { return (longest_ + Channel::kChunkBytes - 1) / Channel::kChunkBytes; }
  // The bytes of a member's k-th chunk; 0 past its end.
  size_t chunk_bytes(int member, size_t k) const {
    const size_t all = stream_bytes_[static_cast<size_t>(member)], lo = std::min(k * Channel::kChunkBytes, all);
    return std::min(all - lo, Channel::kChunkBytes);
  }

  // Copies the k-th chunk of our own stream into the channel.
  void copy_in(size_t k, std::byte* chunk) const {
    const size_t lo = k * Channel::kChunkBytes, hi = lo + chunk_bytes(channel_.me(), k);
    size_t start = 0;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      size_t bytes = 0;
      for (size_t part = 0; part < per_tensor_; ++part) {
        bytes += static_cast<size_t>(count(static_cast<size_t>(channel_.me()), t, part)) * tensors_[t].row_bytes;
      }
      const size_t from = std::max(lo, start), to = std::min(hi, start + bytes);
      if (from < to) std::memcpy(chunk + (from - lo), tensors_[t].input + (from - start), to - from);
      start += bytes;
    }
  }

  // Copies our part of a member's k-th chunk out of the channel.
  void copy_out(int member, size_t k, const std::byte* chunk) const {
    const size_t lo = k * Channel::kChunkBytes, hi = lo + chunk_bytes(member, k);
    const std::vector<Piece>& pieces = pieces_[static_cast<size_t>(member)];
    auto piece =
        std::partition_point(pieces.begin(), pieces.end(), [lo](const Piece& p) { return p.start + p.bytes <= lo; });
    for (; piece != pieces.end() && piece->start < hi; ++piece) {
      const size_t from = std::max(lo, piece->start), to = std::min(hi, piece->start + piece->bytes);
      std::memcpy(piece->output + (from - piece->start), chunk + (from - lo), to - from);
    }
  }

 private:
  // An allgather has one count, which is for every part.
  int64_t count(size_t member, size_t tensor, size_t part) const {
    return counts_[member][tensor * per_tensor_ + (per_tensor_ > 1 ? part : 0)];
  }

  const Channel& channel_;
  const std::vector<RowsTensor>& tensors_;
  const size_t per_tensor_;
  std::vector<std::vector<int64_t>> counts_;  // by member: per tensor, per part
  std::vector<std::vector<Piece>> pieces_;    // by member, ascending
  std::vector<size_t> stream_bytes_;          // by member
  size_t longest_ = 0;
};

}  // namespace

Task move_rows(Channel& channel, const Batch& batch) {
  Plan plan(channel, batch);
  uint64_t s = channel.next_chunk();
  for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
  plan.write_counts(channel.payload(channel.me(), s, plan.counts_bytes()));
  channel.publish(s, plan.counts_bytes());
  for (int m = 0; m < channel.size(); ++m) {
    co_await channel.published(m, s);
    plan.read_counts(m, channel.payload(m, s, plan.counts_bytes()));
  }
  channel.finish(s);
  plan.lay_out();

  for (size_t k = 0; k < plan.steps(); ++k) {
    s = channel.next_chunk();
    if (const size_t bytes = plan.chunk_bytes(channel.me(), k); bytes > 0) {
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
      plan.copy_in(k, channel.payload(channel.me(), s, bytes));
      channel.publish(s, bytes);
    }
    for (int m = 0; m < channel.size(); ++m) {
      const size_t bytes = plan.chunk_bytes(m, k);
      if (bytes == 0) continue;
      co_await channel.published(m, s);
      plan.copy_out(m, k, channel.payload(m, s, bytes));
    }
    channel.finish(s);
    co_await LetOthers{};
  }
}

}  // namespace hvd
