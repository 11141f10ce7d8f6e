// One small tensor by a standing order (engine/standing_orders.h) among members that share a host, other than
// allreduce: each member leaves one letter in its tray (transport/trays.h), waits for all others', and takes what it
// needs of them.
//
//   broadcast      the root's letter is the tensor, in parts; those of the others are empty
//   reducescatter  the tensor, scaled. Each member folds its own rows, in the order of members, as always
//   allgather      how many rows there are, and the rows
//   alltoall       how many rows each member gets, and the rows, in the order of members
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"
#include "transport/errors.h"

namespace hvd {
namespace {

// The letters of one round.
class Letters {
 public:
  Letters(const Group& group, const OrderRound& round)
      : trays_(group.trays()), channel_(group.channel()), round_(round) {}

  int me() const { return channel_.me(); }
  int size() const { return channel_.size(); }
  int rank(int member) const { return channel_.ranks()[static_cast<size_t>(member)]; }
  bool crowded() const { return channel_.crowded(); }

  std::byte* payload(int member, size_t bytes) const {
    return trays_.payload(member, round_.tray, round_.letter, bytes);
  }
  void publish_part(uint64_t part) const { trays_.publish_part(round_.tray, round_.letter, part); }
  void publish(size_t bytes) const { trays_.publish(round_.tray, round_.letter, bytes); }
  Until published(int member, uint64_t part = Trays::kParts) const {
    return trays_.published(member, round_.tray, round_.letter, part);
  }
  std::span<const std::byte> of(int member) const { return trays_.letter(member, round_.tray, round_.letter); }

 private:
  Trays& trays_;
  const Channel& channel_;
  const OrderRound round_;
};

// ---- Broadcast ------------------------------------------------------------------------------------------------------

constexpr size_t kLeastPart = 4 << 10;

// The others copy a part out while the root copies the next one in. Where they share cores that is of no use.
Task broadcast_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  const Letters letters(group, round);
  const bool is_root = letters.me() == batch.root;
  const size_t bytes = batch.bytes(), most_parts = letters.crowded() ? 1 : Trays::kParts;
  const size_t part = std::max(kLeastPart, (bytes + most_parts - 1) / most_parts);
  std::byte* const letter = letters.payload(batch.root, bytes);
  if (!is_root) letters.publish(0);
  uint64_t parts = 0;
  for (size_t lo = 0; lo < bytes; lo += part) {
    const size_t n = std::min(part, bytes - lo);
    const bool is_last = lo + part >= bytes;
    ++parts;
    if (is_root) {
      copy_bytes(letter + lo, batch.input(0) + lo, n);
      if (!is_last) letters.publish_part(parts);
    } else {
      co_await letters.published(batch.root, is_last ? Trays::kParts : parts);
      copy_bytes(batch.output(0) + lo, letter + lo, n);
    }
  }
  if (is_root) letters.publish(bytes);
  if (is_root && batch.output(0) != batch.input(0)) copy_bytes(batch.output(0), batch.input(0), bytes);
  for (int m = 0; m < letters.size(); ++m) {
    if (m != letters.me()) co_await letters.published(m);
  }
}

// ---- Reducescatter --------------------------------------------------------------------------------------------------

Task reducescatter_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  const Letters letters(group, round);
  const Arithmetic arithmetic(batch, letters.size());
  const size_t bytes = batch.bytes();
  arithmetic.copy_in(letters.payload(letters.me(), bytes), batch.input(0), bytes);
  letters.publish(bytes);
  const RowsTensor& tensor = batch.rows.front();
  size_t skipped = 0;  // rows
  for (int m = 0; m < letters.me(); ++m) {
    skipped += static_cast<size_t>(rows_of(m, letters.size(), tensor.counts[0]));
  }
  std::vector<const void*> sources(static_cast<size_t>(letters.size()));
  for (int m = 0; m < letters.size(); ++m) {
    if (m != letters.me()) co_await letters.published(m);
    sources[static_cast<size_t>(m)] = letters.payload(m, bytes) + skipped * tensor.row_bytes;
  }
  const auto rows = static_cast<size_t>(rows_of(letters.me(), letters.size(), tensor.counts[0]));
  arithmetic.fold(batch.output(0), sources, rows * tensor.row_bytes);
}

// ---- Allgather and alltoall -----------------------------------------------------------------------------------------

void write_rows(const Letters& letters, const RowsTensor& tensor) {
  const size_t bytes = letter_bytes(tensor.counts, tensor.row_bytes), head = tensor.counts.size() * sizeof(int64_t);
  std::byte* const letter = letters.payload(letters.me(), bytes);
  std::memcpy(letter, tensor.counts.data(), head);
  if (bytes > head) copy_bytes(letter + head, tensor.input, bytes - head);
  letters.publish(bytes);
}

// Where in a member's letter our rows are, and how many.
struct OurRows {
  const std::byte* data = nullptr;
  int64_t count = 0;
};

OurRows our_rows(const Letters& letters, int member, const RowsTensor& tensor) {
  const std::span<const std::byte> letter = letters.of(member);
  const size_t parts = tensor.counts.size(), head = parts * sizeof(int64_t);
  size_t before = 0, all = head;  // bytes
  bool sane = letter.size() >= head;
  OurRows ours;
  for (size_t part = 0; part < parts && sane; ++part) {
    int64_t count = 0;
    std::memcpy(&count, letter.data() + part * sizeof(int64_t), sizeof count);
    sane = count >= 0 && (tensor.row_bytes == 0 || static_cast<size_t>(count) <= letter.size() / tensor.row_bytes);
    if (parts == 1 || part == static_cast<size_t>(letters.me())) {
      before = all;
      ours.count = count;
    }
    all += static_cast<size_t>(count) * tensor.row_bytes;
  }
  if (!sane || letter.size() != all) {
    throw Error(HVD_SYSTEM, "rank " + std::to_string(letters.rank(member)) + " has left " +
                                std::to_string(letter.size()) + " bytes, which are not the rows that it says");
  }
  ours.data = letter.data() + before;
  return ours;
}

Task rows_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  const Letters letters(group, round);
  const RowsTensor& tensor = batch.rows.front();
  write_rows(letters, tensor);
  const auto members = static_cast<size_t>(letters.size());
  std::vector<OurRows> rows(members);
  std::vector<int64_t> received(members);
  for (int m = 0; m < letters.size(); ++m) {
    if (m != letters.me()) co_await letters.published(m);
    rows[static_cast<size_t>(m)] = our_rows(letters, m, tensor);
    received[static_cast<size_t>(m)] = rows[static_cast<size_t>(m)].count;
  }
  std::byte* output = tensor.allocate(received);
  for (const OurRows& each : rows) {
    const size_t bytes = static_cast<size_t>(each.count) * tensor.row_bytes;
    if (bytes > 0) copy_bytes(output, each.data, bytes);
    output += bytes;
  }
}

}  // namespace

size_t letter_bytes(const std::vector<int64_t>& counts, size_t row_bytes) {
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return counts.size() * sizeof(int64_t) + static_cast<size_t>(rows) * row_bytes;
}

Task run_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  if (batch.op == HVD_BROADCAST) return broadcast_by_letters(group, batch, round);
  if (batch.op == HVD_REDUCESCATTER) return reducescatter_by_letters(group, batch, round);
  return rows_by_letters(group, batch, round);
}

}  // namespace hvd
