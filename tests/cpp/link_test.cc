// One connection between two hosts: lanes, windows, endings, damage. What it does for collectives is in hosts_test.cc,
// what it makes of noise in tests/fuzz/link.cc.
#include "transport/link.h"

#include <doctest/doctest.h>
#include <poll.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "rank_group.h"
#include "transport/network.h"

using namespace hvd;
using namespace hvd::testing;

namespace {

std::vector<std::byte> some_bytes(size_t n, unsigned seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 7);
  return bytes;
}

// The kinds of connections that a test runs over.
std::vector<bool> plain_and_encrypted() {
  if (encryption_is_possible()) return {false, true};
  MESSAGE("SKIPPED with TLS: libssl is missing; install the Debian package libssl3");
  return {false};
}

// Two links that are each other's ends; b's rank is what a's link is with, and the other way round.
struct Pair {
  explicit Pair(bool encrypted = false) {
    Connected one, other;
    std::tie(one.fd, other.fd) = tcp_pair();
    if (encrypted) encrypt(one, other);
    a = std::make_unique<Link>(1, one, counters, shared);
    b = std::make_unique<Link>(0, other, counters, shared);
    close(one.fd);
    close(other.fd);
  }
  void move() const {
    for (Link* const link : {a.get(), b.get()}) {
      link->write();
      link->read();
    }
  }
  Counters counters;
  Link::Shared shared;
  std::unique_ptr<Link> a, b;
};

// A link whose other end we hold as a plain socket.
struct Raw {
  Raw() {
    const auto [one, other] = tcp_pair();
    link = std::make_unique<Link>(1, Connected{one}, counters, shared);
    close(one);
    peer = other;
  }
  ~Raw() {
    if (peer >= 0) close(peer);
  }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  void send(const void* data, size_t bytes) const {
    REQUIRE(::send(peer, data, bytes, 0) == static_cast<ssize_t>(bytes));
  }
  void send(const FrameHeader& header) const { send(&header, sizeof header); }
  // Reads until so many bytes of a lane are there or the link has ended.
  void read_until(int lane, uint64_t position) const {
    while (link->received(lane).load() < position && link->end() == Link::End::kNone) {
      pollfd event{link->wire().fd(), POLLIN, 0};
      REQUIRE(::poll(&event, 1, 10'000) == 1);
      link->read();
    }
  }
  Counters counters;
  Link::Shared shared;
  std::unique_ptr<Link> link;
  int peer = -1;
};

}  // namespace

TEST_CASE("lanes carry their bytes in order, in pieces of any size, whoever is early") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    constexpr int kLanes = 3;
    constexpr size_t kBytes = 12 << 20;
    const Pair pair(encrypted);
    std::mt19937_64 random(1);
    std::vector<std::vector<std::byte>> from, to(2 * kLanes, std::vector<std::byte>(kBytes));
    for (unsigned i = 0; i < 2 * kLanes; ++i) from.push_back(some_bytes(kBytes, i));
    std::vector<size_t> sent(2 * kLanes), asked(2 * kLanes);
    const auto piece = [&random](size_t done) {
      const size_t most = random() % 3 == 0 ? 3'000'000 : random() % 3 == 0 ? 50'000 : 100;
      return std::min<size_t>(random() % most, kBytes - done);
    };
    const auto end_of = [&](size_t i) -> Link& { return i % 2 == 0 ? *pair.a : *pair.b; };
    const auto there = [&](size_t i) { return end_of(i + 1).received(static_cast<int>(i / 2)).load() == kBytes; };
    const auto all_there = [&] {
      bool all = true;
      for (size_t i = 0; i < 2 * kLanes; ++i) all &= there(i);
      return all;
    };
    for (int rounds = 0; !all_there(); ++rounds) {
      REQUIRE(rounds < 1'000'000);
      const size_t i = random() % (2 * kLanes);
      const auto lane = static_cast<int>(i / 2);
      if (random() % 2 == 0) {
        const size_t n = piece(sent[i]);
        CHECK(end_of(i).send(lane, from[i].data() + sent[i], n) == sent[i] + n);
        sent[i] += n;
      } else {
        const size_t n = piece(asked[i]);
        CHECK(end_of(i + 1).receive(lane, to[i].data() + asked[i], n) == asked[i] + n);
        asked[i] += n;
      }
      if (random() % 4 == 0) pair.move();
    }
    CHECK(from == to);
  }
}

TEST_CASE("a lane that nobody looks at holds up no other one, and costs no more than its window") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    constexpr size_t kBytes = 8 << 20;
    const Pair pair(encrypted);
    const std::vector<std::byte> ignored = some_bytes(kBytes, 1), wanted = some_bytes(kBytes, 2);
    std::vector<std::byte> into(kBytes), late(kBytes);
    pair.a->send(0, ignored.data(), kBytes);
    for (int i = 0; i < 1000; ++i) pair.move();
    CHECK(pair.a->sent(0).load() == Link::kWindow);
    pair.a->send(1, wanted.data(), kBytes);
    const uint64_t end = pair.b->receive(1, into.data(), kBytes);
    for (int i = 0; i < 1'000'000 && pair.b->received(1).load() < end; ++i) pair.move();
    CHECK(into == wanted);
    CHECK(pair.a->sent(0).load() == Link::kWindow);
    pair.b->receive(0, late.data(), kBytes);
    for (int i = 0; i < 1'000'000 && pair.b->received(0).load() < kBytes; ++i) pair.move();
    CHECK(late == ignored);
  }
}

TEST_CASE("what a peer sent before it closed still counts, also if writing to it fails first") {
  const Raw raw;
  std::vector<std::byte> into(1000);
  raw.link->receive(0, into.data(), 1000);
  const std::vector<std::byte> more = some_bytes(1 << 20, 2);
  raw.link->send(0, more.data(), more.size());
  raw.link->write();  // it is never read, so that closing resets the connection
  const std::vector<std::byte> last = some_bytes(1000, 1);
  raw.send({FrameHeader::kData, 0, 1000, 0});
  raw.send(last.data(), 1000);
  raw.send({FrameHeader::kBye, 0, kBroken, 7});
  close(raw.peer);
  const_cast<Raw&>(raw).peer = -1;
  for (int i = 0; i < 3; ++i) {
    raw.link->send(1, more.data(), more.size());
    raw.link->write();
  }
  raw.read_until(0, 1001);
  CHECK(into == last);
  CHECK(raw.link->end() == Link::End::kBye);
  CHECK(raw.link->bye_state() == kBroken);
  CHECK(raw.link->bye_cause() == 7);
}

TEST_CASE("an abandoned link touches no memory, and still says and hears the last word") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    const Pair pair(encrypted);
    std::vector<std::byte> data = some_bytes(1 << 20, 1), into(1 << 20), before = into;
    pair.b->receive(0, into.data(), into.size());
    pair.b->abandon();
    pair.a->send(0, data.data(), 100'000);
    pair.a->write();
    pair.a->send(0, data.data(), 100'000);
    pair.a->write();
    pair.a->say_bye(kDeparted, -1);
    pair.b->say_bye(kBroken, 3);
    for (int i = 0; i < 1'000'000 && !(pair.a->closed() && pair.b->closed()); ++i) pair.move();
    CHECK(into == before);
    CHECK(pair.b->end() == Link::End::kBye);
    CHECK(pair.b->bye_state() == kDeparted);
    CHECK(pair.a->end() == Link::End::kBye);
    CHECK(pair.a->bye_cause() == 3);
  }
}

TEST_CASE("an end in the middle of a frame is no last word") {
  const Raw raw;
  std::vector<std::byte> into(1000);
  raw.link->receive(0, into.data(), 1000);
  raw.send({FrameHeader::kData, 0, 1000, 0});
  raw.send(into.data(), 10);
  shutdown(raw.peer, SHUT_WR);
  raw.read_until(0, 1000);
  CHECK(raw.link->received(0).load() == 10);
  CHECK(raw.link->end() == Link::End::kLost);
  CHECK(raw.link->lost_because() == "the connection was closed");
}

TEST_CASE("frames that make no sense are refused") {
  const FrameHeader bad[] = {
      {0, 0, 1, 0},                                             // no such kind
      {99, 0, 1, 0},                                            //
      {FrameHeader::kData, FrameHeader::kLanes, 1, 0},          // no such lane
      {FrameHeader::kData, 0xffffffff, 1, 0},                   //
      {FrameHeader::kData, 0, 0, 0},                            // no bytes
      {FrameHeader::kData, 0, FrameHeader::kMostBytes + 1, 0},  // too many
      {FrameHeader::kData, 0, ~uint64_t{0}, 0},                 //
      {FrameHeader::kData, 0, 10, 1},                           // a gap
      {FrameHeader::kCredit, 0, 0, 1},                          // for what was never sent
      {FrameHeader::kCredit, 0, 0, ~uint64_t{0}},               //
      {FrameHeader::kBye, 0, kAlive, 0},                        // alive, and yet the last word
      {FrameHeader::kLetter, 0, 0, 1},                          // an empty letter
      {FrameHeader::kLetter, 0, LetterBoxes::kMostBytes + 1, 1},
  };
  for (const FrameHeader& header : bad) {
    const Raw raw;
    raw.send(header);
    pollfd event{raw.link->wire().fd(), POLLIN, 0};
    REQUIRE(::poll(&event, 1, 10'000) == 1);
    CHECK_THROWS_AS(raw.link->read(), BadFrame);
  }
}

TEST_CASE("more bytes than the window are refused, before they fill the memory") {
  const Raw raw;
  const std::vector<std::byte> payload(FrameHeader::kMostBytes);
  bool refused = false;
  const auto read = [&] {
    try {
      raw.link->read();
    } catch (const BadFrame& error) {
      refused = true;
      CHECK(std::strstr(error.what(), "more bytes than were granted") != nullptr);
    }
  };
  for (uint64_t at = 0; at < 2 * Link::kWindow && !refused; at += payload.size()) {
    raw.send({FrameHeader::kData, 0, payload.size(), at});
    // The socket may be full, so it is read in between.
    for (size_t done = 0; done < payload.size() && !refused;) {
      const ssize_t n = ::send(raw.peer, payload.data() + done, payload.size() - done, MSG_DONTWAIT);
      if (n > 0) done += static_cast<size_t>(n);
      read();
    }
  }
  // Much of it may still be on its way.
  while (!refused) {
    pollfd event{raw.link->wire().fd(), POLLIN, 0};
    REQUIRE(::poll(&event, 1, 10'000) == 1);
    read();
  }
}

TEST_CASE("letters arrive whole and in order, beside what the lanes carry") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    const Pair pair(encrypted);
    const std::vector<std::byte> bulk = some_bytes(3 << 20, 1);
    std::vector<std::byte> received(bulk.size());
    pair.a->send(0, bulk.data(), bulk.size());
    pair.b->receive(0, received.data(), received.size());
    for (const uint64_t box : {1, 2, 5}) pair.b->boxes().open(box);
    size_t taken = 0;
    for (const size_t bytes : {size_t{1}, size_t{100}, size_t{20'000}, LetterBoxes::kMostBytes}) {
      for (const uint64_t box : {5, 2}) {
        const std::vector<std::byte> content = some_bytes(bytes, static_cast<unsigned>(box));
        std::vector<std::byte> letter = content;
        const uint64_t number = pair.a->post(box, letter.data(), bytes);
        CHECK(number == ++taken);
        if (box == 5) {
          pair.a->keep_letters(box);
          std::fill(letter.begin(), letter.end(), std::byte{0});
        }
        const Flag& arrived = pair.b->boxes().arrived(box);
        for (const uint64_t before = arrived.load(); arrived.load() == before;) pair.move();
        Letter came = pair.b->boxes().take(box);
        CHECK(std::vector<std::byte>(came.data.get(), came.data.get() + came.bytes) == content);
        pair.b->boxes().reuse(std::move(came));
      }
    }
    while (pair.b->received(0).load() < bulk.size()) pair.move();
    CHECK(pair.a->letters_sent().load() == taken);
    CHECK(received == bulk);
  }
}

TEST_CASE("credits are few, and who is early gets one as soon as it is asked for its bytes") {
  Pair pair;
  const std::vector<std::byte> bulk = some_bytes(8 << 20, 1);
  std::vector<std::byte> received(bulk.size());
  const uint64_t data_frames = bulk.size() / FrameHeader::kMostBytes;
  pair.a->send(0, bulk.data(), bulk.size());
  pair.b->receive(0, received.data(), received.size());
  while (pair.b->received(0).load() < bulk.size()) pair.move();
  CHECK(pair.counters.net_frames_out.get() - data_frames <= bulk.size() / (Link::kWindow / 4));
  // All of the window comes early, and nobody has asked for it.
  pair.a->send(2, bulk.data(), bulk.size());
  for (int i = 0; i < 100; ++i) pair.move();
  for (Link* const link : std::exchange(pair.shared.dirty, {})) link->clean();
  pair.b->receive(2, received.data(), received.size());
  CHECK(pair.shared.dirty == std::vector<Link*>{pair.b.get()});
  while (pair.b->received(2).load() < bulk.size()) pair.move();
  CHECK(received == bulk);
}

TEST_CASE("a lane's memory is let go of in the middle of a transfer, and other lanes go on") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    const Pair pair(encrypted);
    const int little = 64 << 10;  // so that much of it waits in the link
    for (const Link* const link : {pair.a.get(), pair.b.get()}) {
      REQUIRE(setsockopt(link->wire().fd(), SOL_SOCKET, SO_SNDBUF, &little, sizeof little) == 0);
      REQUIRE(setsockopt(link->wire().fd(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little) == 0);
    }
    constexpr int kLane = FrameHeader::kLanes - 1;
    const std::vector<std::byte> bulk = some_bytes(8 << 20, 1);
    auto sent = std::make_unique<std::vector<std::byte>>(bulk);
    auto received = std::make_unique<std::vector<std::byte>>(bulk.size());
    pair.a->send(kLane, sent->data(), sent->size());
    pair.b->receive(kLane, received->data(), received->size());
    while (pair.b->received(kLane).load() < 300'000) pair.move();
    pair.a->write();
    REQUIRE(pair.a->blocked());
    pair.a->let_go(kLane);
    sent.reset();
    const uint64_t before = pair.b->received(kLane).load();
    while (pair.b->received(kLane).load() == before) pair.move();
    const auto came = static_cast<ptrdiff_t>(pair.b->received(kLane).load());
    CHECK(std::equal(received->begin(), received->begin() + came, bulk.begin()));
    pair.b->let_go(kLane);
    received.reset();
    // Both ways, so that all that was on its way comes as well.
    std::vector<std::byte> there(bulk.size()), back(bulk.size());
    pair.a->send(1, bulk.data(), bulk.size());
    pair.b->receive(1, there.data(), there.size());
    pair.b->send(1, bulk.data(), bulk.size());
    pair.a->receive(1, back.data(), back.size());
    while (pair.b->received(1).load() < bulk.size() || pair.a->received(1).load() < bulk.size()) pair.move();
    CHECK(there == bulk);
    CHECK(back == bulk);
    CHECK(pair.b->received(kLane).load() == static_cast<uint64_t>(came));
  }
}

TEST_CASE("a connection that is read directly again and again is watched only when somebody listens") {
  Counters counters;
  const auto [end, peer] = tcp_pair();
  Network network({{}, Connected{end}}, {}, {"a", "b"}, 30, counters);
  LetterBoxes& boxes = network.link(1)->boxes();
  boxes.open(1);
  const auto is_readable = [](int fd, int timeout_ms) {
    pollfd event{fd, POLLIN, 0};
    return ::poll(&event, 1, timeout_ms) == 1;
  };
  const auto send_letter = [&, to = peer] {
    const FrameHeader header{FrameHeader::kLetter, 0, 4, 1};
    REQUIRE(::send(to, &header, sizeof header, MSG_MORE) == sizeof header);
    REQUIRE(::send(to, "four", 4, 0) == 4);
    REQUIRE(is_readable(network.link(1)->wire().fd(), 10'000));
  };
  const auto took_letter = [&](bool moved) { return moved && boxes.take(1).bytes == 4; };
  int finds = 0;
  for (send_letter(); is_readable(network.fd(), 0); send_letter()) {
    REQUIRE(++finds < 1000);
    REQUIRE(took_letter(network.poll(1)));
  }
  // The look at everything finds it nevertheless.
  CHECK(took_letter(network.poll()));
  send_letter();
  CHECK(!is_readable(network.fd(), 0));
  network.listen();
  CHECK(is_readable(network.fd(), 0));
  CHECK(took_letter(network.poll()));
  send_letter();
  CHECK(is_readable(network.fd(), 10'000));
  close(end);
  close(peer);
}

TEST_CASE("a letter for a closed box is dropped; one for a box that never was, or one too many, is refused") {
  LetterBoxes boxes;
  boxes.open(3);
  boxes.open(4);
  boxes.close(3);
  boxes.deliver(3, {});
  for (size_t i = 0; i < LetterBoxes::kMostWaiting; ++i) boxes.deliver(4, {});
  CHECK(boxes.arrived(4).load() == LetterBoxes::kMostWaiting);
  CHECK_THROWS_AS(boxes.deliver(4, {}), BadFrame);
  (void)boxes.take(4);
  boxes.deliver(4, {});
  CHECK_THROWS_AS(boxes.deliver(5, {}), BadFrame);
}

TEST_CASE("a link that was abandoned reads on to the last word of its peer") {
  for (const bool encrypted : plain_and_encrypted()) {
    CAPTURE(encrypted);
    const Pair pair(encrypted);
    const std::vector<std::byte> data(2 * FrameHeader::kMostBytes);
    pair.b->send(3, data.data(), data.size());
    pair.a->abandon();
    pair.b->write();
    while (pair.a->read()) pair.b->write();
    pair.b->say_bye(kBroken, 7);
    while (pair.a->read()) {
    }
    CHECK(pair.b->sent(3).load() == data.size());
    CHECK(pair.a->bye_state() == kBroken);
    CHECK(pair.a->bye_cause() == 7);
  }
}

TEST_CASE("a peer that reads nothing for long is not given up: its kernel answers") {
  const auto [one, other] = tcp_pair();
  Counters counters;
  constexpr double kTimeout = 0.5;
  Network network({{}, {one}}, {{}, {}}, {"a", "b"}, kTimeout, counters);
  close(one);
  // In pieces of all sizes, and more than any kernel takes.
  const std::vector<std::byte> bytes = some_bytes(Link::kWindow, 1);
  for (int lane = 0; lane < FrameHeader::kLanes; ++lane) {
    network.link(1)->send(lane, bytes.data(), 1 + static_cast<size_t>(lane) * 97);
    network.link(1)->send(lane, bytes.data(), bytes.size() / 8);
  }
  const auto start = std::chrono::steady_clock::now();
  for (auto now = start; now - start < std::chrono::seconds(3); now = std::chrono::steady_clock::now()) {
    network.poll();
    CHECK(!network.give_up_unconfirmed(static_cast<uint64_t>(now.time_since_epoch().count())));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(network.blocked());
  CHECK(network.link(1)->end() == Link::End::kNone);
  close(other);
}
