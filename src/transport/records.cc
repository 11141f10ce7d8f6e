#include "transport/records.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/link.h"

namespace hvd {

bool RecordCutter::next(std::span<const std::byte>& record) {
  uint32_t length = 0;
  if (begin_ == bytes_.size() || (begin_ > bytes_.size() / 2 && begin_ > (64 << 10))) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(begin_));
    begin_ = 0;
  }
  if (bytes_.size() - begin_ < sizeof length) return false;
  std::memcpy(&length, bytes_.data() + begin_, sizeof length);
  if (length == 0 || length > kMostBytes) throw BadFrame("a record of " + std::to_string(length) + " bytes");
  if (bytes_.size() - begin_ - sizeof length < length) return false;
  record = {bytes_.data() + begin_ + sizeof length, length};
  begin_ += sizeof length + length;
  return true;
}

Records::Records(int fd, Counters& counters) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 3)), counters_(counters) {
  if (fd_ < 0) throw SystemError("can't keep a control connection");
  if (fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK) != 0) {
    SystemError error("can't use a control connection");
    close(fd_);
    throw error;
  }
  staging_.resize(64 << 10);
}

Records::~Records() { close(fd_); }

void Records::send(std::span<const std::byte> record) {
  if (lost_ || ending_) return;
  counters_.control_records.add();
  const auto length = static_cast<uint32_t>(record.size());
  const auto* head = reinterpret_cast<const std::byte*>(&length);
  output_.insert(output_.end(), head, head + sizeof length);
  output_.insert(output_.end(), record.begin(), record.end());
}

bool Records::write() {
  bool moved = false;
  while (has_output()) {
    const ssize_t n = ::send(fd_, output_.data() + written_, output_.size() - written_, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return moved;
      // What the other end had sent before still counts: read() comes to the end of it.
      shutdown(fd_, SHUT_RDWR);
      ending_ = true;
      break;
    }
    moved = true;
    written_ += static_cast<size_t>(n);
    counters_.control_bytes.add(static_cast<uint64_t>(n));
  }
  output_.clear();
  written_ = 0;
  if (ending_) shutdown(fd_, SHUT_WR);
  return moved;
}

bool Records::read() {
  bool moved = false;
  while (!lost_) {
    const ssize_t n = recv(fd_, staging_.data(), staging_.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return moved;
    moved = true;
    if (n <= 0) {
      lost_ = true;
      break;
    }
    cutter_.add({staging_.data(), static_cast<size_t>(n)});
    if (static_cast<size_t>(n) < staging_.size()) break;
  }
  return moved;
}

void Records::end_writing() {
  ending_ = true;
  (void)write();
}

}  // namespace hvd
