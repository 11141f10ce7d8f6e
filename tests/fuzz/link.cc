// A link whose other end says anything, in pieces, while this end sends and receives: it never touches memory that it
// was not given, throws nothing but BadFrame, and that only to a peer that breaks the protocol. The bytes of a lane
// arrive in order on both sides, and never more of them than were granted; letters arrive whole, in boxes that are
// open.
#include "transport/link.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "target.h"
#include "transport/errors.h"

using namespace hvd;

namespace {

constexpr int kLanes = 3;
constexpr size_t kMostBytes = 600 << 10;  // of one send or receive: several frames
constexpr uint64_t kBoxes = 3;

// The content of every lane, so that a byte tells where it belongs.
constexpr size_t kPeriod = 251;
const std::byte* content(int lane, uint64_t position) {
  static const std::vector<std::byte> bytes = [] {
    std::vector<std::byte> made(kMostBytes + kPeriod);
    for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::byte>(i % kPeriod);
    return made;
  }();
  return bytes.data() + (position + static_cast<uint64_t>(lane) * 17) % kPeriod;
}
bool is_content(int lane, uint64_t position, const std::byte* data, size_t bytes) {
  return std::memcmp(content(lane, position), data, bytes) == 0;
}

// The other end of the connection.
class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {}

  // ---- What it says. It is honest until it says something that is not of the protocol.
  void say(const FrameHeader& header) { queue(&header, sizeof header); }
  void say_junk(const std::vector<uint8_t>& bytes) {
    honest_ = false;
    queue(bytes.data(), bytes.size());
  }
  void say_data(int lane_id, uint64_t most) {
    Lane& lane = lanes_[static_cast<size_t>(lane_id)];
    const uint64_t bytes = std::min({most, FrameHeader::kMostBytes, lane.granted + Link::kWindow - lane.said});
    if (bytes == 0) return;
    say({FrameHeader::kData, static_cast<uint32_t>(lane_id), bytes, lane.said});
    queue(content(lane_id, lane.said), bytes);
    lane.said += bytes;
  }
  void say_credit(int lane_id, uint64_t step) {
    Lane& lane = lanes_[static_cast<size_t>(lane_id)];
    lane.credited = std::min(lane.heard, lane.credited + step);
    say({FrameHeader::kCredit, static_cast<uint32_t>(lane_id), 0, lane.credited});
  }
  // A letter begins with the box's own content, and no box gets more than it can hold.
  void say_letter(uint64_t box, uint64_t most) {
    if (box > opened_ || letters_[box] == LetterBoxes::kMostWaiting) return;
    ++letters_[box];
    const uint64_t bytes = std::min<uint64_t>(most, LetterBoxes::kMostBytes);
    say({FrameHeader::kLetter, 0, bytes, box});
    queue(content(static_cast<int>(box), bytes), bytes);
  }
  void knows_open(uint64_t box) { opened_ = std::max(opened_, box); }
  void knows_taken(uint64_t box) { --letters_[box]; }
  void say_bye(RankState state, int64_t cause) {
    say({FrameHeader::kBye, 0, static_cast<uint64_t>(state), static_cast<uint64_t>(cause)});
    over_ = true;
  }
  bool over() const { return over_; }
  bool honest() const { return honest_; }

  // Brings up to that many bytes onto their way.
  void deliver(size_t most) {
    const size_t bytes = std::min(most, outgoing_.size() - delivered_);
    const ssize_t n = send(fd_, outgoing_.data() + delivered_, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) delivered_ += static_cast<size_t>(n);
  }
  void hang_up() { shutdown(fd_, SHUT_WR); }

  // ---- What it hears: everything that the link writes is of the protocol.
  void listen() {
    std::array<std::byte, 64 << 10> staging;
    for (;;) {
      const ssize_t n = recv(fd_, staging.data(), staging.size(), MSG_DONTWAIT);
      if (n <= 0) return;
      const std::byte* data = staging.data();
      for (auto left = static_cast<size_t>(n); left > 0;) {
        const size_t taken = hear(data, left);
        data += taken;
        left -= taken;
      }
    }
  }

 private:
  struct Lane {
    uint64_t said = 0, granted = 0;    // to the link
    uint64_t heard = 0, credited = 0;  // from it
  };

  void queue(const void* data, size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    outgoing_.insert(outgoing_.end(), begin, begin + bytes);
  }

  size_t hear(const std::byte* data, size_t bytes) {
    Lane& lane = lanes_[header_.lane % kLanes];
    if (payload_left_ > 0 && header_.kind == FrameHeader::kLetter) {
      const size_t n = std::min<size_t>(bytes, payload_left_);
      EXPECT(is_content(static_cast<int>(header_.position), header_.value + (header_.value - payload_left_), data, n));
      payload_left_ -= n;
      return n;
    }
    if (payload_left_ > 0) {
      const size_t n = std::min<size_t>(bytes, payload_left_);
      EXPECT(is_content(static_cast<int>(header_.lane), lane.heard, data, n));
      lane.heard += n;
      payload_left_ -= n;
      return n;
    }
    const size_t n = std::min(bytes, sizeof header_ - header_bytes_);
    std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_bytes_, data, n);
    header_bytes_ += n;
    if (header_bytes_ < sizeof header_) return n;
    header_bytes_ = 0;
    hear_header();
    return n;
  }

  void hear_header() {
    check_frame(header_);
    EXPECT(header_.lane < kLanes);
    EXPECT(!heard_bye_);
    Lane& lane = lanes_[header_.lane];
    if (header_.kind == FrameHeader::kBye) {
      heard_bye_ = true;
    } else if (header_.kind == FrameHeader::kLetter) {
      payload_left_ = header_.value;
    } else if (header_.kind == FrameHeader::kCredit) {
      EXPECT(header_.position >= lane.granted);
      EXPECT(!honest_ || header_.position <= lane.said);
      lane.granted = header_.position;
    } else {
      EXPECT(header_.position == lane.heard);
      EXPECT(!honest_ || header_.position + header_.value <= lane.credited + Link::kWindow);
      payload_left_ = header_.value;
    }
  }

  const int fd_;
  std::array<Lane, kLanes> lanes_;
  std::array<size_t, kBoxes + 1> letters_{};  // by box: said, and not taken
  uint64_t opened_ = 0;
  std::vector<std::byte> outgoing_;
  size_t delivered_ = 0;
  bool honest_ = true, over_ = false, heard_bye_ = false;
  FrameHeader header_;
  size_t header_bytes_ = 0;
  uint64_t payload_left_ = 0;
};

// This end, as the collectives use it.
class User {
 public:
  explicit User(Link& link) : link_(link) {}

  void send(int lane, size_t bytes) {
    uint64_t& at = sent_[static_cast<size_t>(lane)];
    const uint64_t end = link_.send(lane, content(lane, at), bytes);
    EXPECT(given_up_ || end == at + bytes);
    at = end;
  }
  void receive(int lane, size_t bytes) {
    // Of exactly that size: the sanitizer sees the first byte beyond it.
    auto memory = std::make_unique<std::byte[]>(bytes);
    uint64_t& at = asked_[static_cast<size_t>(lane)];
    const uint64_t end = link_.receive(lane, memory.get(), bytes);
    EXPECT(given_up_ || end == at + bytes);
    received_.push_back({lane, at, end - at, std::move(memory)});
    at = end;
  }
  void post(uint64_t box, size_t bytes) {
    auto letter = std::make_unique<std::byte[]>(bytes);
    std::memcpy(letter.get(), content(static_cast<int>(box), bytes), bytes);
    const uint64_t number = link_.post(box, letter.get(), bytes);
    letters_[box].push_back(std::move(letter));
    EXPECT(number == posted_ + 1 || number == posted_);  // after the last word nothing is sent
    posted_ = number;
    EXPECT(link_.letters_sent().load() <= posted_);
  }
  void keep_letters(uint64_t box) {
    link_.keep_letters(box);
    letters_[box].clear();
  }
  void open(uint64_t box) {
    link_.boxes().open(box);
    open_[box] = true;
  }
  void close(uint64_t box) {
    link_.boxes().close(box);
    open_[box] = false;
    taken_[box] = 0;
  }
  // True if there was one.
  bool take_letter(uint64_t box) {
    if (!open_[box] || link_.boxes().arrived(box).load() == taken_[box]) return false;
    ++taken_[box];
    Letter letter = link_.boxes().take(box);
    EXPECT(is_content(static_cast<int>(box), letter.bytes, letter.data.get(), letter.bytes));
    link_.boxes().reuse(std::move(letter));
    return true;
  }
  void give_up() {
    link_.abandon();
    given_up_ = true;
    // Nothing that was given to the link may be touched any more.
    received_.clear();
    for (auto& letters : letters_) letters.clear();
  }

  // All that is said to have come is what the lane has there.
  void check() const {
    for (const Memory& memory : received_) {
      const uint64_t come = link_.received(memory.lane).load();
      if (come <= memory.begin) continue;
      const size_t bytes = std::min(come - memory.begin, memory.bytes);
      EXPECT(is_content(memory.lane, memory.begin, memory.data.get(), bytes));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      EXPECT(link_.sent(lane).load() <= sent_[static_cast<size_t>(lane)]);
      EXPECT(link_.received(lane).load() <= asked_[static_cast<size_t>(lane)]);
    }
  }

 private:
  struct Memory {
    int lane;
    uint64_t begin, bytes;
    std::unique_ptr<std::byte[]> data;
  };
  Link& link_;
  std::array<uint64_t, kLanes> sent_{}, asked_{};
  std::vector<Memory> received_;
  uint64_t posted_ = 0;
  std::array<std::vector<std::unique_ptr<std::byte[]>>, kBoxes + 1> letters_;  // by box: posted
  std::array<bool, kBoxes + 1> open_{};
  std::array<uint64_t, kBoxes + 1> taken_{};
  bool given_up_ = false;
};

enum class Step : uint8_t {
  kSend,
  kReceive,
  kWrite,
  kRead,
  kPeerData,
  kPeerCredit,
  kPeerListens,
  kPeerHeader,
  kPeerJunk,
  kPeerBye,
  kPeerHangsUp,
  kBye,
  kGiveUp,
  kPost,
  kPeerLetter,
  kOpenBox,
  kCloseBox,
  kTakeLetter,
  kKeepLetters,
  kMaxValue = kKeepLetters
};

void take(Step step, FuzzedDataProvider& input, Link& link, User& user, Peer& peer) {
  const int lane = input.ConsumeIntegralInRange(0, kLanes - 1);
  const uint64_t box = 1 + static_cast<uint64_t>(lane);
  const auto size = [&input] {
    return input.ConsumeBool() ? input.ConsumeIntegralInRange<size_t>(0, 300)
                               : input.ConsumeIntegralInRange<size_t>(0, kMostBytes);
  };
  switch (step) {
    case Step::kSend:
      return user.send(lane, size());
    case Step::kReceive:
      return user.receive(lane, size());
    case Step::kWrite:
      link.clean();
      (void)link.write();
      return;
    case Step::kRead:
      peer.deliver(size());
      (void)link.read();
      return;
    case Step::kPeerData:
      if (!peer.over()) peer.say_data(lane, 1 + size());
      return;
    case Step::kPeerCredit:
      if (!peer.over()) peer.say_credit(lane, size());
      return;
    case Step::kPeerListens:
      return peer.listen();
    case Step::kPeerHeader: {  // close to one that makes sense
      FrameHeader header{input.ConsumeIntegralInRange<uint32_t>(0, 5), input.ConsumeIntegralInRange<uint32_t>(0, 257),
                         input.ConsumeIntegral<uint64_t>(), input.ConsumeIntegral<uint64_t>()};
      const auto* bytes = reinterpret_cast<const uint8_t*>(&header);
      return peer.say_junk({bytes, bytes + sizeof header});
    }
    case Step::kPeerJunk:
      return peer.say_junk(input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(1, 64)));
    case Step::kPeerBye:
      if (!peer.over()) peer.say_bye(input.ConsumeBool() ? kDeparted : kBroken, input.ConsumeIntegral<int64_t>());
      return;
    case Step::kPeerHangsUp:
      return peer.hang_up();
    case Step::kBye:
      return link.say_bye(input.ConsumeBool() ? kDeparted : kBroken, input.ConsumeIntegral<int8_t>());
    case Step::kGiveUp:
      return user.give_up();
    case Step::kPost:
      return user.post(box, 1 + size() % LetterBoxes::kMostBytes);
    case Step::kPeerLetter:
      if (!peer.over()) peer.say_letter(box, 1 + size());
      return;
    case Step::kOpenBox:
      peer.knows_open(box);
      return user.open(box);
    case Step::kCloseBox:
      return user.close(box);
    case Step::kTakeLetter:
      if (user.take_letter(box) && peer.honest()) peer.knows_taken(box);
      return;
    case Step::kKeepLetters:
      return user.keep_letters(box);
  }
}

// Until nothing moves any more.
void settle(Link& link, Peer& peer) {
  for (bool moved = true; moved;) {
    peer.deliver(SIZE_MAX);
    moved = link.read();
    moved |= link.write();
    peer.listen();
  }
}

void use(FuzzedDataProvider& input, int fd, int peer_fd) {
  Counters counters;
  Link::Shared shared;
  Link link(1, {fd}, counters, shared);
  User user(link);
  Peer peer(peer_fd);
  try {
    for (int i = 0; i < 200 && input.remaining_bytes() > 0; ++i) {
      take(input.ConsumeEnum<Step>(), input, link, user, peer);
      if (peer.honest()) user.check();
    }
    settle(link, peer);
    if (peer.honest()) user.check();
  } catch (const BadFrame& error) {
    if (peer.honest()) std::fprintf(stderr, "to an honest peer: %s\n", error.what());
    EXPECT(!peer.honest());
  }
}

}  // namespace

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> all;
  for (uint8_t i = 1; i < 16; ++i) {
    Input steps;
    for (uint8_t j = 0; j < 100; ++j) steps.push_back(static_cast<std::byte>(i * j));
    all.push_back(std::move(steps));
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  int fds[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  use(input, fds[0], fds[1]);
  close(fds[0]);
  close(fds[1]);
  return 0;
}
