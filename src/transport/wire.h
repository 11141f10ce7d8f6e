// A connection to another host as a stream of bytes: a socket, plain or with TLS over it.
//
// Not virtual: a plain one costs one comparison more than its system calls.
#ifndef HOROVOD_TRANSPORT_WIRE_H_
#define HOROVOD_TRANSPORT_WIRE_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

namespace hvd {

namespace tls {
class Session;
}

// A connection as it is handed to the engine.
struct Connected {
  int fd = -1;                                      // -1: there is none
  std::shared_ptr<tls::Session> session = nullptr;  // whose handshake is done; null: a plain connection
};

class Wire {
 public:
  // Duplicates the descriptor and makes it non-blocking. `who`: the other end, for messages. Throws SystemError.
  Wire(const Connected& connected, const std::string& who);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // As recv. Less than was asked for means that there is no more for now, unless has_input(). Throws BadFrame.
  ssize_t read(std::byte* into, size_t bytes);
  // The same into two places, one after the other; not of an encrypted connection.
  ssize_t read(std::byte* into, size_t bytes, std::byte* then, size_t then_bytes);
  // As sendmsg.
  ssize_t write(iovec* parts, size_t count);
  // As send; not of an encrypted connection.
  ssize_t write(const std::byte* data, size_t bytes);
  // Whether bytes that write() has taken wait for the socket.
  bool has_output() const;
  // Sends these. False with errno if the socket does not take them all.
  bool flush();
  // Whether read() may have something that makes no descriptor readable.
  bool has_input() const;
  // Says that nothing more will come from here, as soon as what was written is out.
  void end_writing();
  // Ends both directions at once. What has come can still be read.
  void cut();
  // The same, and the other end hears of it although not all that was sent to it gets through. Nothing can be read.
  void reset();

  bool encrypted() const { return session_ != nullptr; }
  int fd() const { return fd_; }

 private:
  const std::shared_ptr<tls::Session> session_;
  const int fd_;
  bool ending_ = false;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_WIRE_H_
