// An encrypted connection with somebody in its middle, who changes, repeats, leaves out or cuts what goes over it: what
// comes out at the other end is the beginning of what was sent, and nothing is thrown but BadFrame. A handshake with
// noise fails or goes on waiting.
#include "transport/tls.h"

#include <fcntl.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "target.h"
#include "transport/errors.h"

using namespace hvd;
using tls::Libssl;
using tls::Session;

namespace {

using Stream = std::vector<std::byte>;

// Two connected sockets that never block.
struct Sockets {
  Sockets() { EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0); }
  ~Sockets() {
    close(fds[0]);
    close(fds[1]);
  }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;
  int fds[2];
};

Session::Key key() {
  Session::Key made;
  made.fill(std::byte{5});
  return made;
}

Stream take_all(int fd) {
  Stream bytes(256 << 10);
  const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
  bytes.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return bytes;
}

void give(int fd, const Stream& bytes) {
  EXPECT(bytes.empty() || send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

// What the one in the middle does with the bytes of some writes.
void disturb(FuzzedDataProvider& input, std::vector<Stream>& pieces) {
  while (input.remaining_bytes() > 0 && !pieces.empty()) {
    const size_t which = input.ConsumeIntegralInRange<size_t>(0, pieces.size() - 1);
    Stream& piece = pieces[which];
    const auto at = [&] { return static_cast<ptrdiff_t>(input.ConsumeIntegralInRange<size_t>(0, piece.size())); };
    switch (input.ConsumeIntegralInRange(0, 4)) {
      case 0:
        if (!piece.empty())
          piece[static_cast<size_t>(at()) % piece.size()] ^= std::byte{input.ConsumeIntegral<uint8_t>()};
        break;
      case 1:
        piece.resize(static_cast<size_t>(at()));
        break;
      case 2:
        if (pieces.size() < 16) pieces.push_back(piece);
        break;
      case 3:
        pieces.erase(pieces.begin() + static_cast<ptrdiff_t>(which));
        break;
      default: {
        const std::vector<uint8_t> more = input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(0, 40));
        const auto bytes = fuzz::as_bytes(more.data(), more.size());
        piece.insert(piece.begin() + at(), bytes.begin(), bytes.end());
      }
    }
  }
}

void use_session(const Libssl& libssl, FuzzedDataProvider& input) {
  const Sockets sockets;
  const auto [from_fd, to_fd] = sockets.fds;
  const uint64_t records_per_key = input.ConsumeIntegralInRange<uint64_t>(1, 4);
  Session from(libssl, Session::Role::kConnecting, key(), records_per_key);
  Session to(libssl, Session::Role::kListening, key(), records_per_key);
  for (bool done = false; !done;) {
    done = from.handshake(from_fd);
    done = to.handshake(to_fd) && done;
  }
  Stream sent;
  std::vector<Stream> pieces;
  for (int i = input.ConsumeIntegralInRange(1, 5); i > 0; --i) {
    const Stream text(input.ConsumeIntegralInRange<size_t>(1, 20'000), static_cast<std::byte>(i));
    const iovec part{const_cast<std::byte*>(text.data()), text.size()};
    EXPECT(from.write(from_fd, &part, 1) == static_cast<ssize_t>(text.size()));
    sent.insert(sent.end(), text.begin(), text.end());
    pieces.push_back(take_all(to_fd));
  }
  const bool is_cut = input.ConsumeBool();
  disturb(input, pieces);
  const Sockets detour;
  Stream heard;
  try {
    for (const Stream& piece : pieces) {
      give(detour.fds[0], piece);
      if (is_cut && &piece == &pieces.back()) shutdown(detour.fds[0], SHUT_WR);
      for (;;) {
        // Of exactly that size: the sanitizer sees the first byte beyond it.
        const size_t room = 1 + heard.size() % 30'000;
        const auto into = std::make_unique<std::byte[]>(room);
        const ssize_t n = to.read(detour.fds[1], into.get(), room);
        if (n <= 0) break;
        heard.insert(heard.end(), into.get(), into.get() + n);
      }
    }
  } catch (const BadFrame&) {
  }
  EXPECT(heard.size() <= sent.size());
  EXPECT(std::equal(heard.begin(), heard.end(), sent.begin()));
}

void shake_hands_with_noise(const Libssl& libssl, FuzzedDataProvider& input) {
  const Sockets sockets;
  const auto role = input.ConsumeBool() ? Session::Role::kConnecting : Session::Role::kListening;
  Session session(libssl, role, key());
  try {
    while (input.remaining_bytes() > 0) {
      const std::vector<uint8_t> noise = input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(1, 2000));
      const auto bytes = fuzz::as_bytes(noise.data(), noise.size());
      give(sockets.fds[0], {bytes.begin(), bytes.end()});
      EXPECT(!session.handshake(sockets.fds[1]));
    }
  } catch (const Error&) {
  }
}

}  // namespace

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> all;
  for (uint8_t i = 1; i < 16; ++i) {
    Input steps;
    for (uint8_t j = 0; j < 60; ++j) steps.push_back(static_cast<std::byte>(i * j + i));
    all.push_back(std::move(steps));
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Libssl& libssl = Libssl::load(Libssl::kDefaultName);
  FuzzedDataProvider input(data, size);
  if (input.ConsumeBool()) {
    use_session(libssl, input);
  } else {
    shake_hands_with_noise(libssl, input);
  }
  return 0;
}
