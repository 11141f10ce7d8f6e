// A connection between hosts at its edges; what it does for collectives is in hosts_test.cc, what it makes of noise in
// tests/fuzz/link.cc.
#include "transport/link.h"

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

using namespace hvd;

namespace {

// Two links that are connected with each other.
struct Pair {
  Pair() {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    a = std::make_unique<Link>(0, fds[0], counters, dirty);
    b = std::make_unique<Link>(1, fds[1], counters, dirty);
    close(fds[0]);
    close(fds[1]);
  }
  Counters counters;
  std::vector<Link*> dirty;
  std::unique_ptr<Link> a, b;
};

}  // namespace

TEST_CASE("a link that was abandoned reads on to the last word of its peer") {
  Pair pair;
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
