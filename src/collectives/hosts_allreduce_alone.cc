// Allreduce over several hosts for a member that is alone on its host and exchanges whole payloads with the others
// (`gather` in hosts_allreduce.cc). Nobody shares its memory, so nothing is copied there: tensors are sent from where
// they are, and the fold of what came goes straight to where the result belongs.
//
//   send       a *piece* of the input leaves, kAhead pieces before
//   receive    memory is ready for the others' pieces, kBuffers of each
//   fold       this piece of all hosts, in their order, into the output
//
// A peer sends at most kAhead pieces beyond what it has folded, and has folded at most kAhead pieces beyond what we
// have. So with twice as many buffers whatever comes has a place already. How a host cuts its stream into pieces is its
// own affair: the others may have several members, and chunks.
#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"

namespace hvd {
namespace {

// Small enough to be still in the cache when it is folded.
constexpr size_t kPieceBytes = 128 << 10;
constexpr size_t kAhead = 4;
constexpr size_t kBuffers = 2 * kAhead;

class LoneExchange {
 public:
  LoneExchange(const Group& group, const Batch& batch)
      : group_(group), batch_(batch), arithmetic_(batch, group.size()), buffers_(std::min(pieces(), kBuffers)) {
    const size_t room = std::min(kPieceBytes, batch.bytes());
    std::byte* memory = group.scratch(buffers_.size() * static_cast<size_t>(group.hosts()) * room);
    for (Buffer& buffer : buffers_) {
      buffer.ends.resize(static_cast<size_t>(group.hosts()));
      // By host; our own is for what can't be sent from where it is.
      for (int h = 0; h < group.hosts(); ++h) buffer.of_host.push_back(std::exchange(memory, memory + room));
    }
  }

  size_t pieces() const { return (batch_.bytes() + kPieceBytes - 1) / kPieceBytes; }

  void receive(size_t p) {
    for (int h = 0; h < group_.hosts(); ++h) {
      if (h != group_.host()) at(p).ends[index(h)].received = peer(h).receive(place(p, h), hi(p) - lo(p));
    }
  }

  void send(size_t p) {
    const std::byte* const payload = in_place_of(p);
    for (int h = 0; h < group_.hosts(); ++h) {
      if (h != group_.host()) at(p).ends[index(h)].sent = peer(h).send(payload, hi(p) - lo(p));
    }
  }

  // With everything received; and, where it overwrites what is sent, that sent.
  void fold(size_t p) {
    std::vector<const void*> sources(static_cast<size_t>(group_.hosts()));
    batch_.for_pieces(lo(p), hi(p), [&](const std::byte* input, std::byte* output, size_t offset, size_t bytes) {
      for (int h = 0; h < group_.hosts(); ++h) sources[index(h)] = place(p, h) + offset;
      if (!at(p).copied) sources[index(group_.host())] = input;
      arithmetic_.fold(output, sources, bytes);
    });
  }

  bool talks_to(int h) const { return h != group_.host(); }
  Until received_from(size_t p, int h) { return peer(h).received(at(p).ends[index(h)].received); }
  Until sent_to(size_t p, int h) { return peer(h).sent(at(p).ends[index(h)].sent); }

 private:
  struct End {
    uint64_t sent = 0, received = 0;
  };
  struct Buffer {
    std::vector<End> ends;  // by host
    std::vector<std::byte*> of_host;
    bool copied = false;  // what we send is in our own
  };

  // What is sent of a piece: a part of one tensor as it is, or a copy.
  const std::byte* in_place_of(size_t p) {
    const std::byte* found = nullptr;
    size_t parts = 0;
    batch_.for_pieces(lo(p), hi(p), [&](const std::byte* input, std::byte*, size_t, size_t) {
      found = input;
      ++parts;
    });
    at(p).copied = parts != 1 || found == nullptr || batch_.prescale != 1.0;
    if (!at(p).copied) return found;
    std::byte* const own = place(p, group_.host());
    batch_.for_pieces(lo(p), hi(p), [&](const std::byte* input, std::byte*, size_t offset, size_t bytes) {
      arithmetic_.copy_in(own + offset, input, bytes);
    });
    return own;
  }

  static size_t index(int h) { return static_cast<size_t>(h); }
  size_t lo(size_t p) const { return p * kPieceBytes; }
  size_t hi(size_t p) const { return std::min(lo(p) + kPieceBytes, batch_.bytes()); }
  Buffer& at(size_t p) { return buffers_[p % buffers_.size()]; }
  std::byte* place(size_t p, int h) { return at(p).of_host[index(h)]; }
  // Place 0 owns all of it where others have several members.
  Stream peer(int h) const { return group_.stream(h, 0); }

  const Group& group_;
  const Batch& batch_;
  const Arithmetic arithmetic_;
  std::vector<Buffer> buffers_;
};

}  // namespace

Task allreduce_alone_on_host(const Group& group, const Batch& batch) {
  LoneExchange exchange(group, batch);
  const size_t pieces = exchange.pieces();
  for (size_t p = 0; p < std::min(pieces, kBuffers); ++p) exchange.receive(p);
  for (size_t p = 0; pieces > 0 && p < pieces + kAhead; ++p) {
    if (p < pieces) exchange.send(p);
    if (p < kAhead || p - kAhead >= pieces) continue;
    const size_t ready = p - kAhead;
    for (int h = 0; h < group.hosts(); ++h) {
      if (!exchange.talks_to(h)) continue;
      co_await exchange.received_from(ready, h);
      // Often the result goes where the input is; and the buffer is used again.
      co_await exchange.sent_to(ready, h);
    }
    exchange.fold(ready);
    if (ready + kBuffers < pieces) exchange.receive(ready + kBuffers);
    if (ready + 1 < pieces) co_await LetOthers{};
  }
}

}  // namespace hvd
