#include "transport/wire.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "transport/errors.h"
#include "transport/tls.h"

namespace hvd {

Wire::Wire(const Connected& connected, const std::string& who)
    : session_(connected.session), fd_(fcntl(connected.fd, F_DUPFD_CLOEXEC, 3)) {
  if (fd_ < 0) throw SystemError("can't keep the connection with " + who);
  if (fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK) != 0) {
    SystemError error("can't use the connection with " + who);
    close(fd_);
    throw error;
  }
}

Wire::~Wire() { close(fd_); }

ssize_t Wire::read(std::byte* into, size_t bytes) {
  return session_ ? session_->read(fd_, into, bytes) : recv(fd_, into, bytes, 0);
}

ssize_t Wire::read(std::byte* into, size_t bytes, std::byte* then, size_t then_bytes) {
  iovec parts[] = {{into, bytes}, {then, then_bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  return recvmsg(fd_, &message, 0);
}

ssize_t Wire::write(iovec* parts, size_t count) {
  if (session_) return session_->write(fd_, parts, count);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return sendmsg(fd_, &message, MSG_NOSIGNAL);
}

ssize_t Wire::write(const std::byte* data, size_t bytes) { return send(fd_, data, bytes, MSG_NOSIGNAL); }

bool Wire::has_output() const { return session_ && session_->has_output(); }

bool Wire::has_input() const { return session_ && session_->has_input(); }

bool Wire::flush() {
  if (session_ && !session_->flush(fd_)) return false;
  if (std::exchange(ending_, false)) shutdown(fd_, SHUT_WR);
  return true;
}

void Wire::end_writing() {
  if (session_) session_->end_writing();
  ending_ = true;
  (void)flush();
}

void Wire::cut() {
  if (session_) session_->discard_output();
  shutdown(fd_, SHUT_RDWR);
}

// An end as cut() says it comes after all bytes under way. This one does not wait for them; and where it gets lost, the
// kernel here, which knows the connection no longer, says it again to whatever comes from there, be it a probe.
void Wire::reset() {
  if (session_) session_->discard_output();
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  if (connect(fd_, &none, sizeof none) != 0) shutdown(fd_, SHUT_RDWR);
}

}  // namespace hvd
