// Encrypted connections: what arrives is what was sent, or nothing. What links make of them is in link_test.cc, what
// the meeting of the ranks does with them in tests/python/test_encryption.py.
#include "transport/tls.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <cstring>
#include <random>
#include <thread>

#include "rank_group.h"
#include "transport/records.h"

using namespace hvd;
using namespace hvd::testing;
using tls::Libssl;
using tls::Session;

namespace {

Session::Key key_of(int n) {
  Session::Key key;
  key.fill(static_cast<std::byte>(n));
  return key;
}

std::vector<std::byte> some_bytes(size_t n, unsigned seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 9);
  return bytes;
}

// Two connected sockets and a session at each.
struct Ends {
  // Unix sockets with little room are often full, and know no timers.
  explicit Ends(bool narrow = false) {
    if (!narrow) {
      std::tie(one.fd, other.fd) = tcp_pair();
      return;
    }
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const int room = 8 << 10;
    for (const int fd : fds) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    one.fd = fds[0];
    other.fd = fds[1];
  }
  ~Ends() {
    close(one.fd);
    if (other.fd >= 0) close(other.fd);
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  Connected one, other;
};

bool readable(int fd) {
  pollfd event{fd, POLLIN, 0};
  return ::poll(&event, 1, 10'000) == 1;
}

ssize_t write(const Connected& end, const std::vector<std::byte>& bytes) {
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return end.session->write(end.fd, &part, 1);
}

// Reads until so many bytes are there, or the end.
std::vector<std::byte> read(const Connected& end, size_t bytes) {
  std::vector<std::byte> all(bytes);
  size_t done = 0;
  while (done < bytes) {
    const ssize_t n = end.session->read(end.fd, all.data() + done, bytes - done);
    if (n == 0) break;
    if (n > 0) done += static_cast<size_t>(n);
    if (n < 0) {
      REQUIRE(errno == EAGAIN);
      REQUIRE(readable(end.fd));
    }
  }
  all.resize(done);
  return all;
}

// What is on its way to a socket, taken from it.
std::vector<std::byte> intercept(int fd) {
  std::vector<std::byte> bytes(1 << 20);
  REQUIRE(readable(fd));
  const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
  REQUIRE(n > 0);
  bytes.resize(static_cast<size_t>(n));
  return bytes;
}

}  // namespace

// They are skipped where there is no libssl: then nothing is encrypted, and that has its own tests.
TEST_SUITE_BEGIN("tls" * doctest::skip(!encryption_is_possible()));

TEST_CASE("both ends agree on TLS 1.3 by their key") {
  Ends ends;
  encrypt(ends.one, ends.other);
  const std::string cipher = ends.one.session->cipher();
  CHECK((cipher == "TLSv1.3 TLS_AES_128_GCM_SHA256" || cipher == "TLSv1.3 TLS_CHACHA20_POLY1305_SHA256"));
  CHECK(ends.other.session->cipher() == cipher);
  // No tickets or other words behind the handshake.
  CHECK(!ends.one.session->has_output());
  CHECK(!ends.other.session->has_output());
  std::byte nothing[1];
  CHECK(ends.one.session->read(ends.one.fd, nothing, 1) == -1);
  CHECK(recv(ends.one.fd, nothing, 1, MSG_DONTWAIT) == -1);
}

TEST_CASE("another key is refused, on both sides") {
  const Ends made;
  auto& ends = const_cast<Ends&>(made);
  CHECK_THROWS_WITH_AS(encrypt(ends.one, ends.other, key_of(1), key_of(2)),
                       doctest::Contains("the TLS handshake failed"), Error);
  CHECK_THROWS_WITH_AS(
      {
        REQUIRE(readable(ends.one.fd));
        for (int i = 0; i < 100; ++i) (void)ends.one.session->handshake(ends.one.fd);
      },
      doctest::Contains("the TLS handshake failed"), Error);
}

TEST_CASE("a peer that does not speak TLS is refused") {
  for (const auto role : {Session::Role::kConnecting, Session::Role::kListening}) {
    Ends ends;
    fcntl(ends.one.fd, F_SETFL, O_NONBLOCK);
    Session session(Libssl::load(Libssl::kDefaultName), role, key_of(1));
    CHECK(!session.handshake(ends.one.fd));
    const std::vector<std::byte> plain = some_bytes(1000, 1);
    REQUIRE(send(ends.other.fd, plain.data(), plain.size(), 0) == 1000);
    REQUIRE(readable(ends.one.fd));
    CHECK_THROWS_WITH_AS(session.handshake(ends.one.fd), doctest::Contains("the TLS handshake failed"), Error);
  }
}

TEST_CASE("a peer that goes away in the handshake is no peer") {
  Ends ends;
  fcntl(ends.one.fd, F_SETFL, O_NONBLOCK);
  Session session(Libssl::load(Libssl::kDefaultName), Session::Role::kConnecting, key_of(1));
  CHECK(!session.handshake(ends.one.fd));
  shutdown(ends.other.fd, SHUT_WR);
  REQUIRE(readable(ends.one.fd));
  CHECK_THROWS_WITH_AS(session.handshake(ends.one.fd), doctest::Contains("the connection was closed"), Error);
}

TEST_CASE("bytes arrive in order, written and read in pieces of any size, over sockets that are often full") {
  Ends ends(true);
  constexpr uint64_t kRecordsPerKey = 7;  // so that keys are changed all the time
  encrypt(ends.one, ends.other, key_of(1), key_of(1), kRecordsPerKey);
  std::mt19937_64 random(1);
  const std::vector<std::byte> from = some_bytes(6 << 20, 3);
  for (const auto& [sender, receiver] : {std::pair(&ends.one, &ends.other), std::pair(&ends.other, &ends.one)}) {
    std::vector<std::byte> to(from.size());
    size_t sent = 0, received = 0;
    int waits = 0;
    for (int rounds = 0; received < to.size(); ++rounds) {
      REQUIRE(rounds < 10'000'000);
      std::array<iovec, 5> parts;
      size_t planned = sent;
      for (iovec& part : parts) {
        const size_t most = random() % 3 == 0 ? 200'000 : 300;
        part = {const_cast<std::byte*>(from.data()) + planned,
                std::min<size_t>(random() % most, from.size() - planned)};
        planned += part.iov_len;
      }
      const ssize_t n = sender->session->write(sender->fd, parts.data(), parts.size());
      if (n >= 0) sent += static_cast<size_t>(n);
      if (n < 0) {
        REQUIRE(errno == EAGAIN);
        ++waits;
      }
      (void)sender->session->flush(sender->fd);
      const size_t room = std::min<size_t>(1 + random() % 100'000, to.size() - received);
      const ssize_t m = receiver->session->read(receiver->fd, to.data() + received, room);
      if (m > 0) received += static_cast<size_t>(m);
      if (m < 0) REQUIRE(errno == EAGAIN);
    }
    CHECK(to == from);
    CHECK(waits > 0);
  }
}

TEST_CASE("nothing that is written appears on the wire") {
  Ends ends;
  encrypt(ends.one, ends.other);
  const std::string secret = "the gradient of the first layer, many times. ";
  std::vector<std::byte> text;
  for (int i = 0; i < 1000; ++i) {
    const auto* begin = reinterpret_cast<const std::byte*>(secret.data());
    text.insert(text.end(), begin, begin + secret.size());
  }
  REQUIRE(write(ends.one, text) == static_cast<ssize_t>(text.size()));
  const std::vector<std::byte> seen = intercept(ends.other.fd);
  const std::string_view wire(reinterpret_cast<const char*>(seen.data()), seen.size());
  CHECK(wire.size() > text.size());
  CHECK(wire.find("gradient") == std::string_view::npos);
}

TEST_CASE("a byte that was changed on its way is an error, and what came before it counts") {
  for (const size_t where : {0u, 3u, 5u, 100u, 16'500u, 40'000u}) {
    CAPTURE(where);
    Ends ends;
    encrypt(ends.one, ends.other);
    const std::vector<std::byte> from = some_bytes(60'000, 1);
    REQUIRE(write(ends.one, from) == 60'000);
    std::vector<std::byte> seen = intercept(ends.other.fd);
    REQUIRE(seen.size() > 60'000);
    seen[where] ^= std::byte{1};
    // What was taken from the one end is given to it again, by a pair of its own.
    const Ends detour;
    fcntl(detour.other.fd, F_SETFL, O_NONBLOCK);
    REQUIRE(send(detour.one.fd, seen.data(), seen.size(), 0) == static_cast<ssize_t>(seen.size()));
    shutdown(detour.one.fd, SHUT_WR);
    std::vector<std::byte> to(60'000);
    size_t done = 0;
    bool refused = false;
    while (!refused) {
      REQUIRE(readable(detour.other.fd));
      try {
        const ssize_t n = ends.other.session->read(detour.other.fd, to.data() + done, to.size() - done);
        if (n == 0) break;
        if (n > 0) done += static_cast<size_t>(n);
      } catch (const BadFrame&) {
        refused = true;
      }
    }
    // A length that was made greater waits for bytes that never come; everything else is seen.
    CHECK((refused || where == 3));
    CHECK(done <= where);
    CHECK(std::equal(to.begin(), to.begin() + static_cast<ptrdiff_t>(done), from.begin()));
    if (refused) {
      // It stays so, in both directions.
      std::byte more[1];
      CHECK_THROWS_AS(ends.other.session->read(detour.other.fd, more, 1), BadFrame);
      CHECK(write(ends.other, from) == -1);
      CHECK(errno == EPROTO);
    }
  }
}

TEST_CASE("a record that is repeated or left out is an error") {
  for (const bool repeated : {true, false}) {
    Ends ends;
    encrypt(ends.one, ends.other);
    std::vector<std::vector<std::byte>> records;
    for (unsigned i = 0; i < 3; ++i) {
      REQUIRE(write(ends.one, some_bytes(100, i)) == 100);
      records.push_back(intercept(ends.other.fd));
    }
    const Ends detour;
    fcntl(detour.other.fd, F_SETFL, O_NONBLOCK);
    for (const size_t i : repeated ? std::vector<size_t>{0, 0} : std::vector<size_t>{0, 2}) {
      REQUIRE(send(detour.one.fd, records[i].data(), records[i].size(), 0) > 0);
    }
    REQUIRE(readable(detour.other.fd));
    std::byte first[100];
    REQUIRE(ends.other.session->read(detour.other.fd, first, 100) == 100);
    std::byte second[1];
    CHECK_THROWS_AS(
        {
          for (int i = 0; i < 1000; ++i) (void)ends.other.session->read(detour.other.fd, second, 1);
        },
        BadFrame);
  }
}

TEST_CASE("what was sent before an end still counts, whether the end was said or not") {
  for (const bool said : {true, false}) {
    Ends ends;
    encrypt(ends.one, ends.other);
    const std::vector<std::byte> last = some_bytes(50'000, 1);
    REQUIRE(write(ends.other, last) == 50'000);
    if (said) ends.other.session->end_writing();
    CHECK(ends.other.session->flush(ends.other.fd));
    shutdown(ends.other.fd, SHUT_WR);
    CHECK(read(ends.one, 100'000) == last);
    std::byte more[1];
    CHECK(ends.one.session->read(ends.one.fd, more, 1) == 0);
    CHECK(ends.one.session->read(ends.one.fd, more, 1) == 0);
    // The other direction is still open.
    REQUIRE(write(ends.one, last) == 50'000);
    CHECK(read(ends.other, 50'000) == last);
  }
}

TEST_CASE("a reset connection is an error of the system, after what came before") {
  Ends ends;
  encrypt(ends.one, ends.other);
  const linger at_once{1, 0};
  setsockopt(ends.other.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  close(std::exchange(ends.other.fd, -1));
  REQUIRE(readable(ends.one.fd));
  std::byte more[1];
  CHECK(ends.one.session->read(ends.one.fd, more, 1) == -1);
  CHECK(errno == ECONNRESET);
  CHECK(ends.one.session->read(ends.one.fd, more, 1) == -1);
  CHECK(errno == ECONNRESET);
  CHECK(write(ends.one, some_bytes(10, 1)) == -1);
  CHECK(errno != EAGAIN);
}

TEST_CASE("records go over an encrypted control connection, and garbage on it is refused") {
  Ends ends;
  encrypt(ends.one, ends.other);
  Counters counters;
  Records one(ends.one, "host a", counters), other(ends.other, "host b", counters);
  const std::vector<std::byte> large = some_bytes(3 << 20, 1), small = some_bytes(10, 2);
  one.send(large);
  one.send(small);
  std::vector<std::vector<std::byte>> heard;
  std::span<const std::byte> record;
  for (int i = 0; i < 10'000'000 && heard.size() < 2; ++i) {
    one.write();
    other.read();
    while (other.next(record)) heard.emplace_back(record.begin(), record.end());
  }
  CHECK(heard == std::vector{large, small});
  CHECK(!one.has_output());
  one.end_writing();
  for (int i = 0; i < 10'000'000 && !other.lost(); ++i) other.read();
  CHECK(other.lost());
  const std::string garbage(100, 'x');
  REQUIRE(send(ends.other.fd, garbage.data(), garbage.size(), 0) == 100);
  REQUIRE(readable(ends.one.fd));
  CHECK_THROWS_AS(
      {
        for (int i = 0; i < 100; ++i) one.read();
      },
      BadFrame);
}

TEST_CASE("an engine that hears garbage says on which connection") {
  // Rank 1 is a peer that we play ourselves.
  for (const bool on_control : {false, true}) {
    CAPTURE(on_control);
    std::vector<Connected> links(2), controls(2);
    Ends data, control;
    encrypt(data.one, data.other);
    encrypt(control.one, control.other);
    links[1] = data.one;
    controls[1] = control.one;
    Counters counters;
    Network network(links, controls, {"a", "b"}, 30, counters);
    const std::string garbage(100, 'x');
    REQUIRE(send((on_control ? control : data).other.fd, garbage.data(), garbage.size(), 0) == 100);
    REQUIRE(readable(network.fd()));
    CHECK_THROWS_WITH_AS(
        network.poll(),
        doctest::Contains(on_control ? "on the control connection with host b" : "on the connection with rank 1"),
        Error);
    CHECK(network.poll() == false);
  }
}

TEST_CASE("an engine hears of a byte that was changed, also if nothing comes after it") {
  for (const bool on_control : {false, true}) {
    CAPTURE(on_control);
    Ends ends;
    encrypt(ends.one, ends.other);
    // Two records of TLS, of which the second is changed. The first is good for a part of a frame, or of a record.
    REQUIRE(write(ends.one, some_bytes(1, 0)) == 1);
    REQUIRE(write(ends.one, some_bytes(100, 0)) == 100);
    for (int bytes = 0, i = 0; i < 1000 && bytes < 1 + 100 + 2 * 22; ++i) {
      REQUIRE(ioctl(ends.other.fd, FIONREAD, &bytes) == 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::vector<std::byte> seen = intercept(ends.other.fd);
    REQUIRE(seen.size() == 1 + 100 + 2 * 22);
    seen[60] ^= std::byte{1};
    const Ends detour;
    REQUIRE(send(detour.one.fd, seen.data(), seen.size(), 0) == static_cast<ssize_t>(seen.size()));
    const Connected end{detour.other.fd, ends.other.session};
    Counters counters;
    Network network({{}, on_control ? Connected{} : end}, {{}, on_control ? end : Connected{}}, {"a", "b"}, 30,
                    counters);
    CHECK_THROWS_WITH_AS(while (readable(network.fd())) network.poll(), doctest::Contains("it can't be decrypted"),
                         Error);
  }
}

TEST_CASE("bytes that a session took in before the engine had it are not lost") {
  Ends ends;
  encrypt(ends.one, ends.other);
  REQUIRE(write(ends.other, {std::byte{9}}) == 1);
  const std::vector<std::byte> record = {std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0}, std::byte{5}};
  REQUIRE(write(ends.other, record) == 5);
  // The meeting reads one byte, and both records come along.
  for (int i = 0; i < 1000; ++i) {
    int bytes = 0;
    REQUIRE(ioctl(ends.one.fd, FIONREAD, &bytes) == 0);
    if (bytes >= 2 * 22) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(read(ends.one, 1) == std::vector{std::byte{9}});
  REQUIRE(ends.one.session->has_input());
  Counters counters;
  Network network({{}, {}}, {{}, ends.one}, {"a", "b"}, 30, counters);
  CHECK(network.poll());
  std::span<const std::byte> heard;
  REQUIRE(network.control(1)->next(heard));
  CHECK(heard.size() == 1);
  CHECK(heard[0] == std::byte{5});
}

TEST_CASE("a library that is not there is told, with its name") {
  CHECK_THROWS_WITH_AS(Libssl::load("libnothing.so.9"), doctest::Contains("libnothing.so.9"), Error);
  CHECK_THROWS_WITH_AS(Libssl::load("libm.so.6"), doctest::Contains("not OpenSSL 3"), Error);
}

TEST_SUITE_END();
