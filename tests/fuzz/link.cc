// A link whose other end says anything, in pieces, while this end sends and receives: it never touches memory that it
// was not given, throws nothing but BadFrame, and that only to a peer that breaks the protocol. The bytes of a lane
// arrive in order on both sides, and never more of them than were granted.
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
  void give_up() {
    link_.abandon();
    given_up_ = true;
    // Nothing that was given to the link may be touched any more.
    received_.clear();
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
  kMaxValue = kGiveUp
};

void take(Step step, FuzzedDataProvider& input, Link& link, User& user, Peer& peer) {
  const int lane = input.ConsumeIntegralInRange(0, kLanes - 1);
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
      FrameHeader header{input.ConsumeIntegralInRange<uint32_t>(0, 4), input.ConsumeIntegralInRange<uint32_t>(0, 257),
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
