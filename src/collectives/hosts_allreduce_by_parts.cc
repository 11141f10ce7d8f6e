// Allreduce of hosts with one member each. Nobody shares its memory, so nothing is copied there: tensors are sent from
// where they are, and results are received where they belong.
//
// Each host *owns* one of H parts of the payload. All parts are cut into *pieces*; for each piece p
//
//   send       every host sends the owners their pieces p, as they are in its input
//   fold       an owner folds its piece of all hosts, in their order, into its output
//   spread     and sends the result to all, who receive it in their outputs
//
// so that each byte is folded once in the job, and 2 (H - 1) / H of the bytes leave a host, the least that is possible.
// Sending is kAhead pieces ahead of folding, and what was spread is under way while the next piece is folded: both
// directions of a connection stay busy. A stream carries
//
//   sent 0, ..., sent kAhead - 1, spread 0, sent kAhead, spread 1, sent kAhead + 1, ...
//
// What is safe to use again. We fold piece p when all others have sent it; they did so after they had our pieces up to
// p - kAhead, and what we had spread before that one, up to p - kBuffers. So whatever of p - kBuffers we had sent is
// out, and buffers for kBuffers pieces are enough, also for all that can come before we ask for it. In the same way
// the result of a piece comes after its input was sent: it may go to the same memory.
//
// A round of a standing order (engine/standing_orders.h) begins without agreement, so its first pieces go in letters.
// When those of all others are there everybody takes part in the round; the rest goes over a lane of the order's own.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "collectives/arithmetic.h"
#include "collectives/collectives.h"
#include "collectives/parts.h"

namespace hvd {
namespace {

class PartsExchange {
 public:
  static constexpr size_t kAhead = 1;
  static constexpr size_t kBuffers = 2 * kAhead;
  // One piece of all parts together, and the least of one: then only the last pieces of some parts can be empty.
  static constexpr size_t kPiecesBytes = 1024 << 10;
  static constexpr size_t kLeastPieceBytes = 4 << 10;
  static_assert(kPiecesBytes / 2 <= LetterBoxes::kMostBytes);

  PartsExchange(const Group& group, const Batch& batch, const OrderRound& round)
      : group_(group),
        batch_(batch),
        round_(round),
        arithmetic_(batch, group.size()),
        piece_(std::max(kPiecesBytes / static_cast<size_t>(group.hosts()) / kLine * kLine, kLeastPieceBytes)),
        pieces_(most_pieces()),
        scratch_(scratch(kBuffers * 2 * static_cast<size_t>(group.hosts()) * piece_)),
        letters_(static_cast<size_t>(group.hosts())),
        sources_(static_cast<size_t>(group.hosts())),
        ends_(static_cast<size_t>(group.hosts())) {}

  // Of every part.
  size_t pieces() const { return pieces_; }

  // ---- For a round of an order: its first pieces ----

  bool by_order() const { return round_.order != 0; }
  void post_first() {
    for (int h = 0; h < group_.hosts(); ++h) {
      if (talks_to(h)) link(h).post(round_.order, payload_of(0, h), piece(h, 0).bytes());
    }
  }
  Until letter_from(int h) { return {{&link(h).boxes().arrived(round_.order), round_.number, link(h).rank(), 0}}; }
  // With that of all others.
  void take_letters() {
    for (int h = 0; h < group_.hosts(); ++h) {
      if (talks_to(h)) letters_[index(h)] = take_letter(link(h), round_.order, piece(group_.host(), 0).bytes());
    }
  }

  // ---- All other pieces ----

  // Gets ready for what comes next: the others' inputs of piece p and, before them, the results of the piece kAhead
  // before.
  void expect(size_t p) {
    for (int h = 0; h < group_.hosts(); ++h) {
      if (!talks_to(h)) continue;
      Stream stream = peer(h);
      End& end = ends_[index(h)];
      if (p >= kAhead) {
        const Range spread = piece(h, p - kAhead);
        batch_.for_pieces(spread.begin, spread.end, [&](const std::byte*, std::byte* output, size_t, size_t bytes) {
          end.received_all = stream.receive(output, bytes);
        });
      }
      if (p == 0 && by_order()) continue;
      end.received[p % kBuffers] = stream.receive(incoming(p, h), piece(group_.host(), p).bytes());
    }
  }

  void send(size_t p) {
    for (int h = 0; h < group_.hosts(); ++h) {
      const size_t bytes = piece(h, p).bytes();
      if (talks_to(h) && bytes > 0) ends_[index(h)].sent_all = peer(h).send(payload_of(p, h), bytes);
    }
  }

  // With this of all others.
  Until received_from(int h, size_t p) { return peer(h).received(ends_[index(h)].received[p % kBuffers]); }
  void fold_and_spread(size_t p) {
    const Range own = piece(group_.host(), p);
    if (own.bytes() == 0) return;
    std::byte* const copy = outgoing(p, group_.host());
    const std::byte* result = copy;
    batch_.for_pieces(own.begin, own.end, [&](const std::byte* input, std::byte* output, size_t offset, size_t bytes) {
      for (int h = 0; h < group_.hosts(); ++h) sources_[index(h)] = source(p, h) + offset;
      if (input != nullptr && batch_.prescale == 1.0) {
        sources_[index(group_.host())] = input;
      } else {
        arithmetic_.copy_in(incoming(p, group_.host()) + offset, input, bytes);
      }
      arithmetic_.fold(output, sources_, bytes);
      if (bytes == own.bytes()) {
        result = output;
      } else {
        copy_bytes(copy + offset, output, bytes);
      }
    });
    for (int h = 0; h < group_.hosts(); ++h) {
      if (!talks_to(h)) continue;
      ends_[index(h)].sent_all = peer(h).send(result, own.bytes());
      if (letters_[index(h)].data) link(h).boxes().reuse(std::exchange(letters_[index(h)], {}));
    }
  }

  bool talks_to(int h) const { return h != group_.host(); }
  // At the end.
  Until received_all_from(int h) { return peer(h).received(ends_[index(h)].received_all); }
  Until sent_all_to(int h) { return peer(h).sent(ends_[index(h)].sent_all); }

 private:
  struct End {
    uint64_t received_all = 0, sent_all = 0;
    std::array<uint64_t, kBuffers> received{};  // a piece's inputs
  };

  std::byte* scratch(size_t bytes) const {
    return by_order() ? group_.scratch_of_order(round_.tray, bytes) : group_.scratch(bytes);
  }
  // What we send of a host's part: our input as it is, or a copy.
  const std::byte* payload_of(size_t p, int h) const {
    const Range sent = piece(h, p);
    const std::byte* payload = nullptr;
    batch_.for_pieces(sent.begin, sent.end, [&](const std::byte* input, std::byte*, size_t, size_t bytes) {
      if (bytes == sent.bytes() && batch_.prescale == 1.0) payload = input;
    });
    if (payload != nullptr) return payload;
    batch_.for_pieces(sent.begin, sent.end, [&](const std::byte* input, std::byte*, size_t offset, size_t bytes) {
      arithmetic_.copy_in(outgoing(p, h) + offset, input, bytes);
    });
    return outgoing(p, h);
  }
  // A host's input of our piece p, when it is there.
  const std::byte* source(size_t p, int h) const {
    const Letter& letter = letters_[index(h)];
    return p == 0 && letter.data ? letter.data.get() : incoming(p, h);
  }
  size_t most_pieces() const {
    size_t most = 0;
    for (int h = 0; h < group_.hosts(); ++h) {
      most = std::max(most, (part_of(batch_.bytes(), h, group_.hosts()).bytes() + piece_ - 1) / piece_);
    }
    return most;
  }
  // Of a host's part.
  Range piece(int h, size_t p) const {
    const Range part = part_of(batch_.bytes(), h, group_.hosts());
    return {std::min(part.end, part.begin + p * piece_), std::min(part.end, part.begin + (p + 1) * piece_)};
  }
  static size_t index(int h) { return static_cast<size_t>(h); }
  // Room for a host's input of our piece p; and for what we send for piece p of a host's part, where it can't be sent
  // from where it is.
  std::byte* incoming(size_t p, int h) const {
    return scratch_ + (p % kBuffers * static_cast<size_t>(group_.hosts()) + index(h)) * piece_;
  }
  std::byte* outgoing(size_t p, int h) const {
    return incoming(p, h) + kBuffers * static_cast<size_t>(group_.hosts()) * piece_;
  }
  Stream peer(int h) const { return by_order() ? group_.stream_of_order(h, 0, round_.tray) : group_.stream(h, 0); }
  Link& link(int h) const { return *group_.link(group_.members(h).front()); }

  const Group& group_;
  const Batch& batch_;
  const OrderRound round_;
  const Arithmetic arithmetic_;
  const size_t piece_, pieces_;
  std::byte* const scratch_;
  std::vector<Letter> letters_;  // by host
  std::vector<const void*> sources_;
  std::vector<End> ends_;  // by host
};

}  // namespace

Task allreduce_by_parts(const Group& group, const Batch& batch, OrderRound round) {
  PartsExchange exchange(group, batch, round);
  constexpr size_t kAhead = PartsExchange::kAhead, kBuffers = PartsExchange::kBuffers;
  const size_t pieces = exchange.pieces();
  if (exchange.by_order()) {
    exchange.post_first();
    for (int h = 0; h < group.hosts(); ++h) {
      if (exchange.talks_to(h)) co_await exchange.letter_from(h);
    }
    exchange.take_letters();
    *round.begun_by_all = true;
  }
  for (size_t p = 0; p < std::min(pieces + kAhead, kBuffers); ++p) exchange.expect(p);
  for (size_t t = 0; t < pieces + kAhead; ++t) {
    if (t >= kAhead) {
      const size_t p = t - kAhead;
      for (int h = 0; h < group.hosts(); ++h) {
        if (exchange.talks_to(h)) co_await exchange.received_from(h, p);  // a letter has been waited for
      }
      exchange.fold_and_spread(p);
      if (p + kBuffers < pieces + kAhead) exchange.expect(p + kBuffers);
    }
    if (t < pieces && (t > 0 || !exchange.by_order())) exchange.send(t);
    if (t >= kAhead && t + 1 < pieces + kAhead) co_await LetOthers{};
  }
  for (int h = 0; h < group.hosts(); ++h) {
    if (!exchange.talks_to(h)) continue;
    co_await exchange.received_all_from(h);
    co_await exchange.sent_all_to(h);
  }
}

}  // namespace hvd
