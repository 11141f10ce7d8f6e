// Allgather and alltoall: see rows.h. They differ in one thing: which part of a member's rows another one takes. Of an
// allgather that is all of them, of an alltoall the rows that were split off for it.
//
//   counts     everybody tells all others how many rows it sends; then every member knows where everything goes, and
//              allocates its outputs
//   rows       the rows of members on this host move through the channel: a member's *stream* is what it puts there of
//              all tensors of the batch, laid end to end; step k publishes the k-th chunk of every stream. A member
//              stays one chunk ahead: it publishes chunk k + 1 before it waits for the others' chunk k. What it sends
//              to itself it copies meanwhile
//   other      an alltoall's rows go straight from the sender's input to the receiver's output. Those of an allgather
//   hosts      are needed by all members of a host and sent there once, to its *proxy*, the member at place (sender mod
//              members there): it receives them into its own output and appends them to its stream
#include "collectives/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/collectives.h"
#include "kernels/kernels.h"
#include "transport/errors.h"

namespace hvd {
namespace {

// A run of bytes in our own stream: the rows of one tensor, where they lie, and if they come from another host when all
// of them are there.
struct Run {
  size_t start, bytes;
  const std::byte* source;
  int from = -1;  // member
  uint64_t position = 0;
};

// A run of bytes that this member takes, and where it goes.
struct Piece {
  size_t start, bytes;
  std::byte* output;
};

// A run of bytes that this member sends to itself.
struct OwnRun {
  const std::byte* input;
  std::byte* output;
  size_t bytes;
};

struct LocalStream {
  std::vector<Run> runs;
  std::vector<Piece> pieces;
  size_t bytes = 0;
};

class Plan {
 public:
  Plan(const Group& group, const Batch& batch)
      : group_(group),
        channel_(group.channel()),
        tensors_(batch.rows),
        splits_(batch.op == HVD_ALLTOALL),
        counts_(static_cast<size_t>(group.size())),
        outgoing_(static_cast<size_t>(group.size())),
        sent_(static_cast<size_t>(group.size())),
        received_(static_cast<size_t>(group.size())),
        local_(static_cast<size_t>(channel_.size())) {
    for (int h = 0; h < group.hosts(); ++h) {
      if (h == group.host()) continue;
      for (const int m : group.members(h)) remote_.push_back(m);
    }
  }

  // The members on other hosts.
  const std::vector<int>& remote() const { return remote_; }
  Until sent(int member) { return group_.stream(member).sent(sent_[at(member)]); }
  Until received(int member) { return group_.stream(member).received(received_[at(member)]); }

  // ---- Counts ----

  size_t counts_bytes() const { return tensors_.size() * parts_here() * sizeof(int64_t); }

  void write_counts(std::byte* to) const {
    for (const RowsTensor& tensor : tensors_) {
      std::memcpy(to, tensor.counts.data(), parts_here() * sizeof(int64_t));
      to += parts_here() * sizeof(int64_t);
    }
  }

  void read_counts(int place, const std::byte* from) {
    std::vector<int64_t>& counts = counts_[at(group_.members_here()[at(place)])];
    counts.resize(tensors_.size() * parts_here());
    if (!counts.empty()) std::memcpy(counts.data(), from, counts_bytes());
  }

  // A member on another host is told one count per tensor: what it gets.
  void exchange_counts() {
    for (const int m : remote_) {
      for (const RowsTensor& tensor : tensors_) outgoing_[at(m)].push_back(tensor.counts[splits_ ? at(m) : 0]);
      counts_[at(m)].resize(tensors_.size());
      const size_t bytes = tensors_.size() * sizeof(int64_t);
      sent_[at(m)] = group_.stream(m).send(reinterpret_cast<const std::byte*>(outgoing_[at(m)].data()), bytes);
      received_[at(m)] = group_.stream(m).receive(reinterpret_cast<std::byte*>(counts_[at(m)].data()), bytes);
    }
  }

  // ---- Rows ----

  // With all counts known: allocates the outputs, starts what goes to and comes from other hosts, and finds the pieces.
  void lay_out() {
    const auto members = static_cast<size_t>(group_.size());
    std::vector<std::vector<std::byte*>> outputs(tensors_.size());  // by tensor and member
    for (size_t t = 0; t < tensors_.size(); ++t) {
      std::vector<int64_t> received(members);
      for (size_t m = 0; m < members; ++m) received[m] = count_for_us(m, t);
      std::byte* output = tensors_[t].allocate(received);
      for (size_t m = 0; m < members; ++m) {
        outputs[t].push_back(output);
        output += static_cast<size_t>(received[m]) * tensors_[t].row_bytes;
      }
    }
    for (const int m : remote_) send_rows(m);
    for (int place = 0; place < channel_.size(); ++place) {
      LocalStream& stream = local_[at(place)];
      const auto m = at(group_.members_here()[at(place)]);
      for (size_t t = 0; t < tensors_.size(); ++t) append_own(stream, place, m, t, outputs[t][m]);
    }
    for (const int m : remote_) {
      const int proxy = splits_ ? channel_.me() : m % channel_.size();
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const size_t bytes = static_cast<size_t>(count_for_us(at(m), t)) * tensors_[t].row_bytes;
        std::byte* const output = outputs[t][at(m)];
        if (proxy == channel_.me()) received_[at(m)] = group_.stream(m).receive(output, bytes);
        if (splits_ || bytes == 0) continue;
        LocalStream& stream = local_[at(proxy)];
        if (proxy == channel_.me()) {
          stream.runs.push_back({stream.bytes, bytes, output, m, received_[at(m)]});
        } else {
          stream.pieces.push_back({stream.bytes, bytes, output});
        }
        stream.bytes += bytes;
      }
    }
    for (const LocalStream& stream : local_) longest_ = std::max(longest_, stream.bytes);
  }

  size_t steps() const { return (longest_ + Channel::kChunkBytes - 1) / Channel::kChunkBytes; }
  // The bytes of a stream's k-th chunk; 0 past its end.
  size_t chunk_bytes(int place, size_t k) const {
    const size_t all = local_[at(place)].bytes, lo = std::min(k * Channel::kChunkBytes, all);
    return std::min(all - lo, Channel::kChunkBytes);
  }

  // The runs of our own stream that have a part in its k-th chunk.
  std::vector<const Run*> runs_in(size_t k) const {
    const size_t lo = k * Channel::kChunkBytes, hi = lo + chunk_bytes(channel_.me(), k);
    std::vector<const Run*> found;
    for (const Run& run : local_[at(channel_.me())].runs) {
      if (run.start < hi && run.start + run.bytes > lo) found.push_back(&run);
    }
    return found;
  }
  // Whether what our own stream's k-th chunk has of a run is there yet.
  Until there(const Run& run, size_t k) const {
    const size_t hi = k * Channel::kChunkBytes + chunk_bytes(channel_.me(), k), end = run.start + run.bytes;
    return group_.stream(run.from).received(run.position - (end - std::min(hi, end)));
  }

  void copy_in(const Run& run, size_t k, std::byte* chunk) const {
    const size_t lo = k * Channel::kChunkBytes, hi = lo + chunk_bytes(channel_.me(), k);
    const size_t from = std::max(lo, run.start), to = std::min(hi, run.start + run.bytes);
    copy_bytes(chunk + (from - lo), run.source + (from - run.start), to - from);
  }

  // Copies so much more of what we send to ourselves. False if that was all.
  bool copy_own(size_t bytes) {
    while (bytes > 0 && next_own_ < own_.size()) {
      OwnRun& run = own_[next_own_];
      const size_t n = std::min(bytes, run.bytes);
      copy_bytes(run.output, run.input, n);
      run = {run.input + n, run.output + n, run.bytes - n};
      bytes -= n;
      if (run.bytes == 0) ++next_own_;
    }
    return next_own_ < own_.size();
  }

  // Copies our part of another member's k-th chunk out of the channel.
  void copy_out(int place, size_t k, const std::byte* chunk) const {
    const size_t lo = k * Channel::kChunkBytes, hi = lo + chunk_bytes(place, k);
    const std::vector<Piece>& pieces = local_[at(place)].pieces;
    auto piece =
        std::partition_point(pieces.begin(), pieces.end(), [lo](const Piece& p) { return p.start + p.bytes <= lo; });
    for (; piece != pieces.end() && piece->start < hi; ++piece) {
      const size_t from = std::max(lo, piece->start), to = std::min(hi, piece->start + piece->bytes);
      copy_bytes(piece->output + (from - piece->start), chunk + (from - lo), to - from);
    }
  }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }
  // Counts per tensor that members on this host tell each other: an alltoall's are needed to find one's part.
  size_t parts_here() const { return splits_ ? at(group_.size()) : 1; }
  bool is_here(size_t member) const {
    const auto& here = group_.members_here();
    return std::binary_search(here.begin(), here.end(), static_cast<int>(member));
  }
  int64_t count_for_us(size_t member, size_t tensor) const {
    if (!is_here(member)) return counts_[member][tensor];
    return counts_[member][tensor * parts_here() + (splits_ ? at(group_.me()) : 0)];
  }

  // Sends a member on another host its rows of our input; of an allgather only to its host's proxy for us.
  void send_rows(int member) {
    const auto place = [this, member] {
      for (int h = 0; h < group_.hosts(); ++h) {
        const auto& members = group_.members(h);
        const auto found = std::find(members.begin(), members.end(), member);
        if (found != members.end()) {
          return std::pair(static_cast<int>(found - members.begin()), static_cast<int>(members.size()));
        }
      }
      throw Error(HVD_SYSTEM, "no such member");
    }();
    if (!splits_ && group_.me() % place.second != place.first) return;
    for (const RowsTensor& tensor : tensors_) {
      const auto rows = static_cast<size_t>(tensor.counts[splits_ ? at(member) : 0]);
      size_t skipped = 0;
      for (int before = 0; splits_ && before < member; ++before)
        skipped += static_cast<size_t>(tensor.counts[at(before)]);
      sent_[at(member)] =
          group_.stream(member).send(tensor.input + skipped * tensor.row_bytes, rows * tensor.row_bytes);
    }
  }

  // Appends what a member of this host sends of a tensor to the others here.
  void append_own(LocalStream& stream, int place, size_t member, size_t t, std::byte* output) {
    const size_t row_bytes = tensors_[t].row_bytes;
    if (!splits_) {
      const size_t bytes = static_cast<size_t>(count_for_us(member, t)) * row_bytes;
      if (bytes == 0) return;
      if (place == channel_.me()) {
        own_.push_back({tensors_[t].input, output, bytes});
        stream.runs.push_back({stream.bytes, bytes, tensors_[t].input, -1, 0});
      } else {
        stream.pieces.push_back({stream.bytes, bytes, output});
      }
      stream.bytes += bytes;
      return;
    }
    size_t skipped = 0;  // rows of this tensor before the part in question
    for (int part = 0; part < group_.size(); ++part) {
      const size_t bytes = static_cast<size_t>(counts_[member][t * parts_here() + at(part)]) * row_bytes;
      const std::byte* const source = place == channel_.me() ? tensors_[t].input + skipped * row_bytes : nullptr;
      if (at(part) == member) {
        if (source != nullptr && bytes > 0) own_.push_back({source, output, bytes});
      } else if (is_here(at(part)) && bytes > 0) {
        if (source != nullptr) stream.runs.push_back({stream.bytes, bytes, source, -1, 0});
        if (part == group_.me()) stream.pieces.push_back({stream.bytes, bytes, output});
        stream.bytes += bytes;
      }
      skipped += bytes / std::max<size_t>(row_bytes, 1);
    }
  }

  const Group& group_;
  Channel& channel_;
  const std::vector<RowsTensor>& tensors_;
  const bool splits_;
  std::vector<int> remote_;
  // By member.
  std::vector<std::vector<int64_t>> counts_;    // here: per tensor, per part; on another host: per tensor, for us
  std::vector<std::vector<int64_t>> outgoing_;  // counts on their way
  std::vector<uint64_t> sent_, received_;
  std::vector<LocalStream> local_;  // by place
  size_t longest_ = 0;
  std::vector<OwnRun> own_;
  size_t next_own_ = 0;
};

}  // namespace

Task move_rows(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  Plan plan(group, batch);
  uint64_t s = channel.next_chunk();
  for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
  plan.write_counts(channel.payload(channel.me(), s, plan.counts_bytes()));
  channel.publish(s, plan.counts_bytes());
  plan.exchange_counts();
  for (int m = 0; m < channel.size(); ++m) {
    co_await channel.published(m, s);
    plan.read_counts(m, channel.payload(m, s, plan.counts_bytes()));
  }
  channel.finish(s);
  for (const int m : plan.remote()) co_await plan.received(m);
  plan.lay_out();

  uint64_t ahead = 0;
  for (size_t k = 0; k <= plan.steps(); ++k) {
    if (k < plan.steps()) {
      ahead = channel.next_chunk();
      if (const size_t bytes = plan.chunk_bytes(channel.me(), k); bytes > 0) {
        for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
        for (const Run* run : plan.runs_in(k)) {
          if (run->from >= 0) co_await plan.there(*run, k);
          plan.copy_in(*run, k, channel.payload(channel.me(), ahead, bytes));
        }
        channel.publish(ahead, bytes);
      }
    }
    (void)plan.copy_own(Channel::kChunkBytes);
    if (k > 0) {
      for (int m = 0; m < channel.size(); ++m) {
        const size_t bytes = plan.chunk_bytes(m, k - 1);
        if (bytes == 0 || m == channel.me()) continue;
        co_await channel.published(m, s);
        plan.copy_out(m, k - 1, channel.payload(m, s, bytes));
      }
      channel.finish(s);
      if (k < plan.steps()) co_await LetOthers{};
    }
    s = ahead;
  }
  while (plan.copy_own(Channel::kChunkBytes)) co_await LetOthers{};
  for (const int m : plan.remote()) {
    co_await plan.received(m);
    co_await plan.sent(m);
  }
}

}  // namespace hvd
