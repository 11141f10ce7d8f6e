#include "transport/network.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info is too short
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "transport/durations.h"

namespace hvd {
namespace {

// To listen again costs a system call for each quiet connection.
constexpr int kFindsBeforeQuiet = 8;
constexpr size_t kMostQuiet = 4;

// Finds hosts and networks that are down, and keeps those in between from forgetting a connection that idles. The other
// end's kernel answers, also for a process that is stopped: that one is the heartbeat's affair. No TCP_USER_TIMEOUT: it
// would also break a connection whose other end is alive but reads nothing, as when the whole job is stopped for a
// while. Nor does it find out where bytes are under way: the kernel asks only connections that idle
// (give_up_unconfirmed()).
void keep_alive(int fd, double timeout) {
  constexpr int kProbes = 3;
  const int on = 1, probes = kProbes;
  const int idle = static_cast<int>(std::clamp(timeout / 2, 1.0, 3600.0));
  const int interval = static_cast<int>(std::clamp(timeout / 2 / kProbes, 1.0, 3600.0));
  // Without them a dead connection is found later: no reason to fail.
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

// What the other end's kernel has not confirmed, and what waits to be sent to it.
int bytes_under_way(int fd) {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace

Network::Network(const std::vector<Connected>& links, const std::vector<Connected>& controls,
                 const std::vector<std::string>& hosts, double timeout, Counters& counters)
    : timeout_(timeout), links_(links.size()), controls_(controls.size()), index_of_link_(links.size()) {
  for (size_t r = 0; r < links.size(); ++r) {
    if (links[r].fd < 0) continue;
    keep_alive(links[r].fd, timeout);
    links_[r] = std::make_unique<Link>(static_cast<int>(r), links[r], counters, shared_);
    index_of_link_[r] = watched_.size();
    watched_.push_back({links_[r].get(), nullptr, "the connection with rank " + std::to_string(r)});
  }
  for (size_t h = 0; h < controls.size(); ++h) {
    if (controls[h].fd < 0) continue;
    keep_alive(controls[h].fd, timeout);
    controls_[h] = std::make_unique<Records>(controls[h], "host " + hosts[h], counters);
    watched_.push_back({nullptr, controls_[h].get(), "the control connection with host " + hosts[h]});
  }
  if (watched_.empty()) return;
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) throw SystemError("can't create an epoll descriptor");
  try {
    for (Watched& watched : watched_) watch(watched, false);
  } catch (...) {
    close(epoll_);
    throw;
  }
}

Network::~Network() {
  if (epoll_ >= 0) close(epoll_);
}

std::vector<int> Network::descriptors() const {
  std::vector<int> all;
  if (epoll_ >= 0) all.push_back(epoll_);
  for (const Watched& watched : watched_) all.push_back(watched.wire().fd());
  return all;
}

void Network::watch(Watched& watched, bool for_writing, bool quiet) {
  if (watched.watched && watched.for_writing == for_writing && watched.quiet == quiet) return;
  epoll_event event{};
  if (!quiet) event.events |= EPOLLIN;
  if (for_writing) event.events |= EPOLLOUT;
  event.data.u64 = static_cast<uint64_t>(&watched - watched_.data());
  const int fd = watched.wire().fd();
  if (epoll_ctl(epoll_, watched.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
    throw SystemError("can't watch a connection (epoll_ctl)");
  }
  watched.watched = true;
  watched.for_writing = for_writing;
  watched.quiet = quiet;
}

void Network::listen() {
  for (const size_t index : std::exchange(quiet_, {})) {
    Watched& watched = watched_[index];
    watched.finds = 0;
    if (watched.watched) watch(watched, watched.for_writing);
  }
}

bool Network::poll(int rank) {
  const size_t index = index_of_link_[static_cast<size_t>(rank)];
  Watched& watched = watched_[index];
  if (!serve(index, true)) return false;
  if (++watched.finds >= kFindsBeforeQuiet && watched.watched && !watched.quiet && quiet_.size() < kMostQuiet) {
    watch(watched, watched.for_writing, true);
    quiet_.push_back(index);
  }
  return true;
}

bool Network::poll() {
  if (epoll_ < 0) return false;
  bool moved = false;
  if (std::exchange(fresh_, false)) {
    // What came early is in a session already, and no descriptor tells of it.
    for (size_t i = 0; i < watched_.size(); ++i) {
      if (watched_[i].wire().has_input()) moved |= serve(i, true);
    }
  }
  moved |= flush();
  for (const size_t index : quiet_) moved |= serve(index, true);
  epoll_event events[64];
  const int n = epoll_wait(epoll_, events, 64, 0);
  for (int i = 0; i < n; ++i) moved |= serve(events[i].data.u64, true);
  return moved;
}

bool Network::flush() {
  bool moved = false;
  for (const Watched& watched : watched_) {
    if (watched.records != nullptr && watched.records->has_output() && !watched.for_writing) {
      moved |= serve(static_cast<size_t>(&watched - watched_.data()), false);
    }
  }
  for (Link* link : std::exchange(shared_.dirty, {})) {
    link->clean();
    moved |= serve(index_of_link_[static_cast<size_t>(link->rank())], false);
  }
  return moved;
}

bool Network::blocked() const {
  return std::any_of(watched_.begin(), watched_.end(), [](const Watched& watched) { return watched.for_writing; });
}

bool Network::move(Watched& watched, bool readable) {
  bool moved = false;
  if (watched.link != nullptr) {
    if (readable) moved |= watched.link->read();
    moved |= watched.link->write();
  } else {
    if (readable) moved |= watched.records->read();
    moved |= watched.records->write();
  }
  return moved;
}

bool Network::serve(size_t index, bool readable) {
  Watched& watched = watched_[index];
  bool moved = false;
  bool blocked = false;
  bool over = false;
  bool closed = false;
  try {
    moved = move(watched, readable);
  } catch (const BadFrame& error) {
    if (watched.link != nullptr) {
      watched.link->lose(error.what());
    } else {
      watched.records->lose();
    }
    throw Error(error.status, std::string(error.what()) + ", on " + watched.who);
  }
  if (watched.link != nullptr) {
    if (moved) ++link_moves_;
    blocked = watched.link->blocked();
    over = watched.link->end() != Link::End::kNone;
    closed = watched.link->closed();
  } else {
    blocked = watched.records->has_output();
    over = closed = watched.records->lost();
  }
  if (over && !watched.counted) {
    watched.counted = true;
    ++ended_;
    moved = true;
  }
  if (closed) {
    // It stays readable for ever. The descriptor itself is closed with the network.
    const int fd = watched.wire().fd();
    if (watched.watched) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    watched.watched = watched.for_writing = watched.quiet = false;
    shutdown(fd, SHUT_RDWR);
  } else if (blocked != watched.for_writing) {
    watch(watched, blocked, watched.quiet);
  }
  return moved;
}

void Network::abandon() {
  for (const auto& link : links_) {
    if (link) link->abandon();
  }
}

bool Network::has_bytes_under_way() const {
  return std::any_of(links_.begin(), links_.end(), [](const std::unique_ptr<Link>& link) {
    return link && !link->closed() && bytes_under_way(link->wire().fd()) > 0;
  });
}

// A path may let some through and not others: between two hosts that both hear rank 0, or only packets that are small.
// Then nobody is silent, and the kernel would go on for a quarter of an hour. Of a process that reads nothing the
// kernel confirms what it has room for, and answers who asks whether there is more.
bool Network::give_up_unconfirmed(uint64_t now) {
  const uint64_t timeout = nanoseconds_of(timeout_);
  const uint64_t interval = std::clamp<uint64_t>(timeout / 8, 10'000'000, 1'000'000'000);
  if (last_look_ != 0 && now - last_look_ < interval) return false;
  // Time in which this process did not run counts little: the network may have moved all the while, unseen.
  const uint64_t elapsed = last_look_ == 0 ? 0 : std::min(now - last_look_, 2 * interval);
  last_look_ = now;
  bool found = false;
  for (Watched& watched : watched_) {
    if (watched.link == nullptr || watched.link->closed()) continue;  // of control connections heartbeats tell
    const int fd = watched.wire().fd();
    const int under_way = bytes_under_way(fd);
    tcp_info info{};
    socklen_t length = sizeof info;
    const bool known = under_way > 0 && getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
    // Sent again, or asked again whether there is room by now: any answer makes that 0, and one is often under way.
    const bool unanswered = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
    const bool stuck = known && unanswered && info.tcpi_bytes_acked == watched.confirmed;
    watched.confirmed = info.tcpi_bytes_acked;
    watched.unconfirmed_for = stuck ? watched.unconfirmed_for + elapsed : 0;
    if (watched.unconfirmed_for < timeout || !stuck) continue;
    // The other end may wait for these bytes, and nobody here for anything from there: it has to hear of it.
    watched.link->reset("for " + seconds_text(timeout_) + " its host has confirmed none of the " +
                        std::to_string(under_way) + " bytes under way");
    (void)serve(static_cast<size_t>(&watched - watched_.data()), false);
    found = true;
  }
  return found;
}

void Network::take_leave(int timeout_ms, int patience_ms) {
  if (epoll_ < 0) return;
  listen();
  for (const auto& records : controls_) {
    if (records) records->end_writing();
  }
  const auto still_open = [](const Watched& watched) {
    return watched.link != nullptr ? !watched.link->closed() : !watched.records->lost();
  };
  // Where something is left to write, that has to wake us too.
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (still_open(watched_[i])) (void)serve(i, false);
  }
  const auto start = std::chrono::steady_clock::now();
  while (std::any_of(watched_.begin(), watched_.end(), still_open)) {
    const auto passed =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start).count();
    if (passed >= timeout_ms && (passed >= patience_ms || !has_bytes_under_way())) return;
    // Nothing tells when bytes have been taken.
    constexpr int kLookAgainMs = 50;
    epoll_event events[64];
    const int n =
        epoll_wait(epoll_, events, 64, passed < timeout_ms ? timeout_ms - static_cast<int>(passed) : kLookAgainMs);
    for (int i = 0; i < n; ++i) {
      try {
        (void)serve(events[i].data.u64, true);
      } catch (const Error&) {
        // What comes now is of no interest, and its connection is closed.
      }
    }
  }
}

}  // namespace hvd
