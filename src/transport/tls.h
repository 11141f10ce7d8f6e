// TLS 1.3 over a connected socket, by a key that both ends know and nobody else: no certificates, no tickets, no
// renegotiation, a fresh key exchange for each session (so who learns the key later can't read what was recorded).
//
// A session has buffers of its own for encrypted bytes in both directions and works on any non-blocking socket that it
// is given; it never waits. Its functions behave like those of a socket, with one difference: bytes that write() has
// taken may still be here, and flush() has to be called until has_output() is false; and bytes may be here that have
// not been asked for yet, so read() has to be called until it has nothing, not until the socket is empty.
//
// What a peer sent before its connection was cut still counts. That the end itself was meant is for the protocol above
// to say (Link's last word, Records' farewell): a session does not tell a cut from an end.
//
// Used by one thread at a time.
#ifndef HOROVOD_TRANSPORT_TLS_H_
#define HOROVOD_TRANSPORT_TLS_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/libssl.h"

namespace hvd::tls {

class Session {
 public:
  enum class Role { kConnecting, kListening };
  static constexpr size_t kKeyBytes = 32;
  using Key = std::array<std::byte, kKeyBytes>;
  // After so many records the sender takes new keys. AES-GCM is safe for some 2^24 (RFC 8446, section 5.5), which are
  // 400 GB: less than a long training sends.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

  // The key must be for this connection alone. Throws Error.
  Session(const Libssl& libssl, Role role, const Key& key, uint64_t records_per_key = kRecordsPerKey);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // To be called until it is true, whenever the socket is readable (or writable, if has_output()). Throws Error: the
  // other side does not know the key, or does not speak TLS.
  bool handshake(int fd);

  // As recv: 0 at the end, -1 with errno. Fills all that is asked for if it has come. Throws BadFrame: somebody has
  // changed what was sent.
  ssize_t read(int fd, std::byte* into, size_t bytes);
  // As sendmsg. -1 and EAGAIN if nothing was taken; EPROTO if the session has failed, and read() tells why.
  ssize_t write(int fd, const iovec* parts, size_t count);
  // Sends what write() has left. False with errno if the socket does not take it all.
  bool flush(int fd);
  bool has_output() const { return sent_ < output_.size(); }
  // Whether read() may have something although the socket has not: bytes, or that what came after them was changed.
  bool has_input() const { return !input_.empty() || !broken_.empty(); }
  void discard_output();
  // Says that nothing more will be written: for flush() to send.
  void end_writing();

  // The cipher in use, after the handshake.
  std::string cipher() const;

  // What libssl calls back. It does so only while one of the functions above runs, of which `at_work` is the session.
  static unsigned tell_key(SSL* ssl, const char* hint, char* identity, unsigned identity_bytes, unsigned char* key,
                           unsigned key_bytes);
  static unsigned find_key(SSL* ssl, const char* identity, unsigned char* key, unsigned key_bytes);
  static BIO_METHOD* make_method(const Libssl& libssl);

 private:
  class Work;
  enum class Fill { kSome, kNothing, kEnd, kError };
  Fill fill(int fd);
  bool encrypt(const std::byte* data, size_t bytes);
  [[noreturn]] void fail_handshake(int fd, const std::string& why);

  static thread_local Session* at_work;
  static int bio_write(BIO* bio, const char* data, size_t bytes, size_t* written);
  static int bio_read(BIO* bio, char* into, size_t bytes, size_t* read);

  const Libssl& libssl_;
  SSL* ssl_ = nullptr;
  Key key_;  // wiped when the handshake is done
  bool done_ = false;
  const uint64_t records_per_key_;
  uint64_t records_ = 0;  // sent with the present keys

  // Encrypted bytes: those that have come and libssl has not taken, and those that libssl has made and are not sent.
  std::unique_ptr<std::byte[]> received_;
  std::span<const std::byte> input_;
  bool socket_is_empty_ = false;  // known within one call of read()
  bool ended_ = false;            // nothing more comes
  int read_error_ = 0;
  std::string broken_;  // why nothing more can be decrypted
  std::vector<std::byte> output_;
  size_t sent_ = 0;  // of output_
};

}  // namespace hvd::tls
#endif  // HOROVOD_TRANSPORT_TLS_H_
