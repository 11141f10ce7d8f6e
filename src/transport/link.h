// One TCP connection to a rank on another host, plain or encrypted (wire.h).
//
// Words. A link carries *lanes*, one per process set and some for standing orders: each is an ordered stream of bytes
// in each direction, without boundaries. Both ends run the same collective on the same lane, so both know how many
// bytes come next and where they belong.
//
// On the wire there are frames: a header, and for kData its bytes. Frames of different lanes take turns, and a lane may
// be at most kWindow bytes ahead of what its receiver has asked for. So what comes early fits into kWindow of memory,
// every socket is always read to its end, and a lane that nobody looks at can't hold up another one.
//
// Beside the lanes go letters (letter_boxes.h), whole and without credit: there are few of them, at most two for a box.
//
// Nothing is copied on the way out, nor on the way in if receive() was called before the bytes came. (TLS has its own
// buffers, and encrypts from and decrypts to the places of large payloads.) Memory given to
// send(), receive() or post() belongs to the link until `sent`, `received` or `letters_sent` has reached the position
// that was returned.
//
// Used by the driver alone.
#ifndef HOROVOD_TRANSPORT_LINK_H_
#define HOROVOD_TRANSPORT_LINK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/aligned.h"
#include "transport/counters.h"
#include "transport/errors.h"
#include "transport/frames.h"
#include "transport/letter_boxes.h"
#include "transport/segment.h"
#include "transport/wire.h"

namespace hvd {

class Link {
 public:
  static constexpr uint64_t kWindow = 2 << 20;

  // What the links of a rank share.
  struct Shared {
    Shared();
    std::vector<Link*> dirty;    // those with something to write
    const AlignedBytes staging;  // where read() puts what it does not put in place at once
  };

  // Duplicates the descriptor. Throws SystemError.
  Link(int rank, const Connected& connected, Counters& counters, Shared& shared);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Queue bytes to be sent, or memory to be filled. Return the position of their end, for sent() and received().
  uint64_t send(int lane, const std::byte* data, size_t bytes);
  uint64_t receive(int lane, std::byte* into, size_t bytes);
  const Flag& sent(int lane) { return at(lane).sent; }
  const Flag& received(int lane) { return at(lane).received; }
  // Lets go of a lane's memory; nothing more goes over it. What of it is on the way out is copied.
  void let_go(int lane);

  // Queues a letter. Returns its number, for letters_sent().
  uint64_t post(uint64_t box, const std::byte* data, size_t bytes);
  // Copies what of a box's letters has not been sent: their memory is its owner's again.
  void keep_letters(uint64_t box);
  const Flag& letters_sent() const { return letters_sent_; }
  LetterBoxes& boxes() { return boxes_; }

  // Say the last word, as far as the socket takes it at once.
  void say_bye(RankState state, int cause);
  // Lets go of all memory that was given to send() and receive(). What still comes is dropped, except the last word.
  void abandon();
  // The connection has ended, or is not to be used any more.
  void lose(const std::string& why);
  // The same, and the other end is told so as far as that is possible.
  void reset(const std::string& why);

  // Move what the socket takes or has. True if anything moved. Throw BadFrame.
  bool write();
  bool read();
  // Whether write() has left something because the socket is full.
  bool blocked() const { return (!outgoing_.empty() || wire_.has_output()) && !closed_; }
  void clean() { dirty_ = false; }

  // What came last: kBye's content, or the end of the connection.
  enum class End { kNone, kBye, kLost };
  End end() const { return end_; }
  RankState bye_state() const { return bye_state_; }
  int bye_cause() const { return bye_cause_; }
  const std::string& lost_because() const { return lost_because_; }
  // How many bytes have come, of whatever.
  uint64_t bytes_in() const { return bytes_in_; }
  bool closed() const { return closed_; }

  int rank() const { return rank_; }
  const Wire& wire() const { return wire_; }

 private:
  template <typename Byte>
  struct Span {
    Byte* data;
    size_t bytes;
  };
  struct Lane {
    // Outgoing. framed <= queued, framed <= taken_by_peer + kWindow.
    std::deque<Span<const std::byte>> out;
    uint64_t queued = 0, framed = 0, taken_by_peer = 0;
    Flag sent{0};
    // Incoming. Bytes up to `received` are in place; those up to `arrived` beyond it wait in `early`.
    std::deque<Span<std::byte>> into;
    uint64_t posted = 0, arrived = 0, credited = 0;
    Flag received{0};
    std::deque<std::vector<std::byte>> early;
    size_t early_skip = 0;  // of the first of them
  };
  struct Frame {
    FrameHeader header;
    const std::byte* payload = nullptr;
    size_t done = 0;                              // of header and payload together
    std::unique_ptr<std::byte[]> kept = nullptr;  // the payload, where it is our own copy
    size_t bytes() const { return sizeof header + (payload == nullptr ? 0 : header.value); }
    void keep();
  };

  Lane& at(int lane);
  void fill_frames();
  ssize_t write_frames();
  void give_credit(int lane_id, Lane& lane);
  void touch();
  void fail_writing(const std::string& why);
  Span<std::byte> place_of_payload(Lane*& lane);
  void placed(Lane* lane, size_t bytes);
  size_t take(const std::byte* data, size_t bytes);
  void handle_header();
  void place(Lane& lane, const std::byte* data, size_t bytes);
  void letter_has(size_t bytes);

  const int rank_;
  Wire wire_;
  Counters& counters_;
  Shared& shared_;
  bool dirty_ = false;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<int> sending_;  // lanes that have bytes to frame, in turns
  std::vector<int> crediting_;
  std::deque<Frame> outgoing_;
  bool abandoned_ = false, said_bye_ = false, closed_ = false, ended_writing_ = false;
  std::string write_error_;
  LetterBoxes boxes_;
  uint64_t letters_posted_ = 0;
  Flag letters_sent_{0};

  // Incoming: the header that is being read, and how much of its payload is still to come.
  FrameHeader header_;
  size_t header_bytes_ = 0;
  uint64_t payload_left_ = 0, last_payload_ = 0;
  Letter letter_;  // whose payload that is, of a kLetter
  uint64_t bytes_in_ = 0;
  End end_ = End::kNone;
  RankState bye_state_ = kAlive;
  int bye_cause_ = -1;
  std::string lost_because_;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_LINK_H_
