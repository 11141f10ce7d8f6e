// Allgather and alltoall: see rows.h. They differ in one thing: which part of a member's rows another one takes. Of an
// allgather that is all of them, of an alltoall the rows that were split off for it.
//
//   counts     everybody tells all others how many rows it sends; then every member knows where everything goes, and
//              allocates its outputs
//   rows       the rows of members on this host move through the channel: a member's *stream* is what it puts there of
//              all tensors of the batch, laid end to end; step k publishes the k-th chunk of every stream. A member
//              stays one chunk ahead: it publishes chunk k + 1 before it waits for the others' chunk k. What it sends
//              to itself it copies meanwhile. Where all members are on one host the first chunk rides with the counts:
//              what a member sends there is known by its own counts alone, and little rows need no second exchange
//   other      an alltoall's rows go straight from the sender's input to the receiver's output. Those of an allgather
//   hosts      are needed by all members of a host and sent there once, to its *proxy*, the member at place (sender mod
//              members there): it receives them into its own output and appends them to its stream
#include "collectives/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/collectives.h"
#include "collectives/outputs.h"
#include "transport/errors.h"

namespace hvd {
namespace {

// Bytes of a stream in a chunk: that of a long one fills it, a short one has several all the same, so that everybody
// copies all the time. Where ranks share cores chunks are as large as can be, and a member goes further ahead: to wait
// costs more there.
constexpr size_t kLeastStep = 64 << 10;

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
        counts_(at(channel_.size()) * tensors_.size() * parts_here()),
        local_(at(channel_.size())) {
    for (int h = 0; h < group.hosts(); ++h) {
      if (h == group.host()) continue;
      for (const int m : group.members(h)) remote_.push_back(m);
    }
    if (remote_.empty()) {
      rows_at_ = counts_bytes() <= Channel::kInlineBytes ? 0 : (counts_bytes() + kLine - 1) / kLine * kLine;
      first_ = std::min(channel_.crowded() ? Channel::kChunkBytes : kLeastStep, Channel::kChunkBytes - rows_at_);
    } else {
      const auto members = at(group.size());
      remote_counts_.resize(members);
      outgoing_.resize(members);
      sent_.resize(members);
      received_.resize(members);
    }
    for (size_t t = 0; t < tensors_.size(); ++t) {
      std::copy_n(tensors_[t].counts.data(), parts_here(), counts_of(channel_.me(), t));
    }
    lay_out_runs();
  }

  // The members on other hosts.
  const std::vector<int>& remote() const { return remote_; }
  Until sent(int member) { return group_.stream(member).sent(sent_[at(member)]); }
  Until received(int member) { return group_.stream(member).received(received_[at(member)]); }

  // ---- Counts ----

  size_t counts_bytes() const { return tensors_.size() * parts_here() * sizeof(int64_t); }

  void write_counts(uint64_t s) {
    if (counts_bytes() == 0) return;
    std::memcpy(channel_.payload(channel_.me(), s, counts_bytes()), counts_of(channel_.me(), 0), counts_bytes());
  }

  void read_counts(int place, uint64_t s) {
    if (counts_bytes() == 0 || place == channel_.me()) return;
    std::memcpy(counts_of(place, 0), channel_.payload(place, s, counts_bytes()), counts_bytes());
  }

  // A member on another host is told one count per tensor: what it gets.
  void exchange_counts() {
    for (const int m : remote_) {
      for (const RowsTensor& tensor : tensors_) outgoing_[at(m)].push_back(tensor.counts[splits_ ? at(m) : 0]);
      remote_counts_[at(m)].resize(tensors_.size());
      const size_t bytes = tensors_.size() * sizeof(int64_t);
      sent_[at(m)] = group_.stream(m).send(reinterpret_cast<const std::byte*>(outgoing_[at(m)].data()), bytes);
      received_[at(m)] = group_.stream(m).receive(reinterpret_cast<std::byte*>(remote_counts_[at(m)].data()), bytes);
    }
  }

  // ---- Rows ----

  // With all counts known: allocates the outputs, starts what goes to and comes from other hosts, and finds the pieces.
  void lay_out() {
    const auto members = at(group_.size());
    std::vector<std::byte*> outputs;  // by tensor and member
    outputs.reserve(tensors_.size() * members);
    std::vector<int64_t> received(members);
    size_t all_bytes = 0;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      for (const int m : remote_) received[at(m)] = remote_counts_[at(m)][t];
      for (int place = 0; place < channel_.size(); ++place) {
        received[member_at(place)] = counts_of(place, t)[splits_ ? at(group_.me()) : 0];
      }
      std::byte* output = tensors_[t].allocate(received);
      for (size_t m = 0; m < members; ++m) {
        outputs.push_back(output);
        const size_t bytes = static_cast<size_t>(received[m]) * tensors_[t].row_bytes;
        output += bytes;
        all_bytes += bytes;
      }
    }
    copy_to_output_ = copy_for_outputs(all_bytes);
    for (const int m : remote_) send_rows(m);
    for (int place = 0; place < channel_.size(); ++place) {
      for (size_t t = 0; t < tensors_.size(); ++t) lay_out_pieces(place, t, outputs[t * members + member_at(place)]);
    }
    for (const int m : remote_) {
      const int proxy = splits_ ? channel_.me() : m % channel_.size();
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const size_t bytes = static_cast<size_t>(remote_counts_[at(m)][t]) * tensors_[t].row_bytes;
        std::byte* const output = outputs[t * members + at(m)];
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
    if (!channel_.crowded()) step_ = std::clamp(longest_ / 16, kLeastStep, Channel::kChunkBytes) / kLine * kLine;
  }

  // Bytes of a stream in a chunk, and how many chunks a member stays ahead.
  size_t step() const { return step_; }
  size_t lead() const { return channel_.crowded() ? Channel::kSlots / 2 : 1; }
  // How many chunks there are, the one with the counts among them.
  size_t chunks() const { return 1 + (longest_ - std::min(longest_, first_) + step_ - 1) / step_; }
  // The bytes of a stream's k-th chunk; 0 past its end.
  size_t chunk_bytes(int place, size_t k) const { return end_of(place, k) - begin_of(place, k); }

  // Where the rows of a member's k-th chunk lie.
  std::byte* rows(int place, size_t k, uint64_t s) const {
    if (k > 0) return channel_.payload(place, s, chunk_bytes(place, k));
    return channel_.payload(place, s, Channel::kChunkBytes) + rows_at_;
  }

  // The runs of our own stream that have a part in its k-th chunk.
  std::vector<const Run*> runs_in(size_t k) const {
    const size_t lo = begin_of(channel_.me(), k), hi = end_of(channel_.me(), k);
    std::vector<const Run*> found;
    for (const Run& run : local_[at(channel_.me())].runs) {
      if (run.start < hi && run.start + run.bytes > lo) found.push_back(&run);
    }
    return found;
  }
  // Whether what our own stream's k-th chunk has of a run is there yet.
  Until there(const Run& run, size_t k) const {
    const size_t hi = end_of(channel_.me(), k), end = run.start + run.bytes;
    return group_.stream(run.from).received(run.position - (end - std::min(hi, end)));
  }

  void copy_in(const Run& run, size_t k, uint64_t s) const {
    const size_t lo = begin_of(channel_.me(), k), hi = end_of(channel_.me(), k);
    const size_t from = std::max(lo, run.start), to = std::min(hi, run.start + run.bytes);
    copy_bytes(rows(channel_.me(), k, s) + (from - lo), run.source + (from - run.start), to - from);
  }

  // Copies so much more of what we send to ourselves. False if that was all.
  bool copy_own(size_t bytes) {
    while (bytes > 0 && next_own_ < own_.size()) {
      OwnRun& run = own_[next_own_];
      const size_t n = std::min(bytes, run.bytes);
      copy_to_output_(run.output, run.input, n);
      run = {run.input + n, run.output + n, run.bytes - n};
      bytes -= n;
      if (run.bytes == 0) ++next_own_;
    }
    return next_own_ < own_.size();
  }

  // Copies our part of another member's k-th chunk out of the channel.
  void copy_out(int place, size_t k, uint64_t s) const {
    const size_t lo = begin_of(place, k), hi = end_of(place, k);
    const std::byte* const chunk = rows(place, k, s);
    const std::vector<Piece>& pieces = local_[at(place)].pieces;
    auto piece =
        std::partition_point(pieces.begin(), pieces.end(), [lo](const Piece& p) { return p.start + p.bytes <= lo; });
    for (; piece != pieces.end() && piece->start < hi; ++piece) {
      const size_t from = std::max(lo, piece->start), to = std::min(hi, piece->start + piece->bytes);
      copy_to_output_(piece->output + (from - piece->start), chunk + (from - lo), to - from);
    }
  }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }
  size_t member_at(int place) const { return at(group_.members_here()[at(place)]); }
  bool is_here(int member) const {
    const auto& here = group_.members_here();
    return remote_.empty() || std::binary_search(here.begin(), here.end(), member);
  }
  // Counts per tensor that members on this host tell each other: an alltoall's are needed to find one's part.
  size_t parts_here() const { return splits_ ? at(group_.size()) : 1; }
  int64_t* counts_of(int place, size_t tensor) {
    return counts_.data() + (at(place) * tensors_.size() + tensor) * parts_here();
  }

  // Where a stream's k-th chunk begins and ends.
  size_t begin_of(int place, size_t k) const {
    return std::min(local_[at(place)].bytes, k == 0 ? 0 : first_ + (k - 1) * step_);
  }
  size_t end_of(int place, size_t k) const { return std::min(local_[at(place)].bytes, first_ + k * step_); }

  // Calls f(part, offset among the tensor's rows, bytes) for each part of what a member of this host sends of a tensor.
  // An allgather has one, which is for everybody.
  template <typename F>
  void for_parts(int place, size_t tensor, F&& f) {
    size_t offset = 0;
    for (size_t part = 0; part < parts_here(); ++part) {
      const size_t bytes = static_cast<size_t>(counts_of(place, tensor)[part]) * tensors_[tensor].row_bytes;
      if (bytes > 0) f(static_cast<int>(part), offset, bytes);
      offset += bytes;
    }
  }
  // Whether such a part goes through the sender's stream, and whether we take it.
  bool in_stream(int place, int part) const { return !splits_ || (at(part) != member_at(place) && is_here(part)); }
  bool is_ours(int part) const { return !splits_ || part == group_.me(); }

  // What we send of our own rows, which no other member has to be asked for.
  void lay_out_runs() {
    const int me = channel_.me();
    LocalStream& stream = local_[at(me)];
    for (size_t t = 0; t < tensors_.size(); ++t) {
      for_parts(me, t, [&](int part, size_t offset, size_t bytes) {
        if (!in_stream(me, part)) return;
        stream.runs.push_back({stream.bytes, bytes, tensors_[t].input + offset});
        stream.bytes += bytes;
      });
    }
  }

  // What we get of a member's rows of a tensor, and where it goes.
  void lay_out_pieces(int place, size_t t, std::byte* output) {
    LocalStream& stream = local_[at(place)];
    for_parts(place, t, [&](int part, size_t offset, size_t bytes) {
      if (place == channel_.me()) {
        if (is_ours(part)) own_.push_back({tensors_[t].input + offset, output, bytes});
      } else if (in_stream(place, part)) {
        if (is_ours(part)) stream.pieces.push_back({stream.bytes, bytes, output});
        stream.bytes += bytes;
      }
    });
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

  const Group& group_;
  Channel& channel_;
  const std::vector<RowsTensor>& tensors_;
  const bool splits_;
  std::vector<int> remote_;
  std::vector<int64_t> counts_;  // of members on this host: by place, tensor and part
  size_t rows_at_ = 0;           // where in the first chunk's buffer rows begin
  size_t first_ = 0;             // how many bytes of a stream ride with the counts
  // By member, of those on other hosts.
  std::vector<std::vector<int64_t>> remote_counts_;  // by tensor, for us
  std::vector<std::vector<int64_t>> outgoing_;       // counts on their way
  std::vector<uint64_t> sent_, received_;
  std::vector<LocalStream> local_;  // by place
  size_t longest_ = 0;
  size_t step_ = Channel::kChunkBytes;
  std::vector<OwnRun> own_;
  size_t next_own_ = 0;
  CopyBytes copy_to_output_ = nullptr;
};

}  // namespace

Task move_rows(const Group& group, const Batch& batch) {
  Channel& channel = group.channel();
  const int me = channel.me();
  Plan plan(group, batch);
  uint64_t s = channel.next_chunk();
  for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, s);
  plan.write_counts(s);
  for (const Run* run : plan.runs_in(0)) plan.copy_in(*run, 0, s);
  channel.publish(s, plan.counts_bytes() + plan.chunk_bytes(me, 0));
  plan.exchange_counts();
  for (int m = 0; m < channel.size(); ++m) {
    co_await channel.published(m, s);
    plan.read_counts(m, s);
  }
  for (const int m : plan.remote()) co_await plan.received(m);
  plan.lay_out();

  size_t published = 1;  // chunks
  for (size_t k = 0; k < plan.chunks(); ++k, ++s) {
    for (; published < plan.chunks() && published <= k + plan.lead(); ++published) {
      const uint64_t ahead = channel.next_chunk();
      const size_t bytes = plan.chunk_bytes(me, published);
      if (bytes == 0) continue;
      for (int m = 0; m < channel.size(); ++m) co_await channel.slot_free(m, ahead);
      for (const Run* run : plan.runs_in(published)) {
        if (run->from >= 0) co_await plan.there(*run, published);
        plan.copy_in(*run, published, ahead);
      }
      channel.publish(ahead, bytes);
    }
    (void)plan.copy_own(plan.step());
    for (int m = 0; m < channel.size(); ++m) {
      if (m == me || plan.chunk_bytes(m, k) == 0) continue;
      co_await channel.published(m, s);
      plan.copy_out(m, k, s);
    }
    channel.finish(s);
    if (k + 1 < plan.chunks()) co_await LetOthers{};
  }
  while (plan.copy_own(plan.step())) co_await LetOthers{};
  for (const int m : plan.remote()) {
    co_await plan.received(m);
    co_await plan.sent(m);
  }
}

}  // namespace hvd
