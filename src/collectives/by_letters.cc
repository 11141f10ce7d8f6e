// One small tensor by a standing order (engine/standing_orders.h) among members that share a host, other than
// allreduce: each member leaves one letter in its tray (transport/trays.h), waits for all others', and takes what it
// needs of them.
//
//   broadcast      the root's letter is the tensor; those of the others are empty
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

class Letters {
 public:
  Letters(const Group& group, const OrderRound& round)
      : trays_(group.trays()), channel_(group.channel()), round_(round) {}

  int me() const { return channel_.me(); }
  int size() const { return channel_.size(); }
  int rank(int member) const { return channel_.ranks()[static_cast<size_t>(member)]; }
  std::byte* own(size_t bytes) const { return trays_.payload(me(), round_.tray, round_.letter, bytes); }
  void publish(size_t bytes) const { trays_.publish(round_.tray, round_.letter, bytes); }
  Until published(int member) const { return trays_.published(member, round_.tray, round_.letter); }
  std::span<const std::byte> of(int member) const { return trays_.letter(member, round_.tray, round_.letter); }

 private:
  Trays& trays_;
  const Channel& channel_;
  const OrderRound& round_;
};

// ---- Broadcast ------------------------------------------------------------------------------------------------------

void write_broadcast(const Letters& letters, const Batch& batch) {
  const bool is_root = letters.me() == batch.root;
  if (is_root) copy_bytes(letters.own(batch.bytes()), batch.input(0), batch.bytes());
  letters.publish(is_root ? batch.bytes() : 0);
}

void read_broadcast(const Letters& letters, const Batch& batch) {
  const bool is_root = letters.me() == batch.root;
  const std::byte* const source = is_root ? batch.input(0) : letters.of(batch.root).data();
  if (batch.output(0) != source) copy_bytes(batch.output(0), source, batch.bytes());
}

// ---- Reducescatter --------------------------------------------------------------------------------------------------

void write_reducescatter(const Letters& letters, const Batch& batch) {
  Arithmetic(batch, letters.size()).copy_in(letters.own(batch.bytes()), batch.input(0), batch.bytes());
  letters.publish(batch.bytes());
}

void read_reducescatter(const Letters& letters, const Batch& batch) {
  const RowsTensor& tensor = batch.rows.front();
  int64_t skipped = 0;
  for (int m = 0; m < letters.me(); ++m) skipped += rows_of(m, letters.size(), tensor.counts[0]);
  std::vector<const void*> sources;
  for (int m = 0; m < letters.size(); ++m) {
    sources.push_back(letters.of(m).data() + static_cast<size_t>(skipped) * tensor.row_bytes);
  }
  const auto rows = static_cast<size_t>(rows_of(letters.me(), letters.size(), tensor.counts[0]));
  Arithmetic(batch, letters.size()).fold(batch.output(0), sources, rows * tensor.row_bytes);
}

// ---- Allgather and alltoall -----------------------------------------------------------------------------------------

void write_rows(const Letters& letters, const Batch& batch) {
  const RowsTensor& tensor = batch.rows.front();
  const size_t bytes = letter_bytes(tensor.counts, tensor.row_bytes), head = tensor.counts.size() * sizeof(int64_t);
  std::byte* const letter = letters.own(bytes);
  std::memcpy(letter, tensor.counts.data(), head);
  if (bytes > head) copy_bytes(letter + head, tensor.input, bytes - head);
  letters.publish(bytes);
}

// The rows of a member's letter for us, and how many there are.
struct RowsForUs {
  const std::byte* data = nullptr;
  int64_t count = 0;
};

RowsForUs rows_for_us(const Letters& letters, int member, const RowsTensor& tensor, bool splits) {
  const std::span<const std::byte> letter = letters.of(member);
  std::vector<int64_t> counts(tensor.counts.size());
  const size_t head = counts.size() * sizeof(int64_t);
  if (letter.size() >= head) std::memcpy(counts.data(), letter.data(), head);
  if (letter.size() < head || letter_bytes(counts, tensor.row_bytes) != letter.size()) {
    throw Error(HVD_SYSTEM, "rank " + std::to_string(letters.rank(member)) + " has left " +
                                std::to_string(letter.size()) + " bytes, which are not the rows that it says");
  }
  const auto own = counts.begin() + (splits ? letters.me() : 0);
  const auto skipped = static_cast<size_t>(std::accumulate(counts.begin(), own, int64_t{0}));
  return {letter.data() + head + skipped * tensor.row_bytes, *own};
}

void read_rows(const Letters& letters, const Batch& batch) {
  const RowsTensor& tensor = batch.rows.front();
  std::vector<RowsForUs> all;
  std::vector<int64_t> received;
  for (int m = 0; m < letters.size(); ++m) {
    all.push_back(rows_for_us(letters, m, tensor, batch.op == HVD_ALLTOALL));
    received.push_back(all.back().count);
  }
  std::byte* output = tensor.allocate(received);
  for (const RowsForUs& rows : all) {
    const size_t bytes = static_cast<size_t>(rows.count) * tensor.row_bytes;
    if (bytes > 0) copy_bytes(output, rows.data, bytes);
    output += bytes;
  }
}

}  // namespace

size_t letter_bytes(const std::vector<int64_t>& counts, size_t row_bytes) {
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return counts.size() * sizeof(int64_t) + static_cast<size_t>(rows) * row_bytes;
}

Task run_by_letters(const Group& group, const Batch& batch, const OrderRound& round) {
  const Letters letters(group, round);
  if (batch.op == HVD_BROADCAST) {
    write_broadcast(letters, batch);
  } else if (batch.op == HVD_REDUCESCATTER) {
    write_reducescatter(letters, batch);
  } else {
    write_rows(letters, batch);
  }
  for (int m = 0; m < letters.size(); ++m) {
    if (m != letters.me()) co_await letters.published(m);
  }
  if (batch.op == HVD_BROADCAST) {
    read_broadcast(letters, batch);
  } else if (batch.op == HVD_REDUCESCATTER) {
    read_reducescatter(letters, batch);
  } else {
    read_rows(letters, batch);
  }
}

}  // namespace hvd
