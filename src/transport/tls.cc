#include "transport/tls.h"

#include <strings.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hvd::tls {
namespace {

// From OpenSSL's headers, which are not needed to build.
constexpr int kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kVerifyPeer = 1;
constexpr int kBioTypeSourceSink = 0x0400;
constexpr int kBioFlagsRead = 0x01, kBioFlagsShouldRetry = 0x08, kBioFlagsAll = 0x0f;
constexpr int kBioCtrlFlush = 11;

// The most that one record holds. Whatever goes into one costs as much as some hundred bytes more, so small parts are
// put together first.
constexpr size_t kRecord = 16 << 10;
// How much is taken from the socket at once, and from how much on it is given to it.
constexpr size_t kInput = 64 << 10;
constexpr size_t kOutput = 64 << 10;
// One name: the key is for one connection, so nothing has to be looked up by it.
constexpr char kIdentity[] = "horovod";

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

}  // namespace

thread_local Session* Session::at_work = nullptr;

// The time in which this session's libssl runs on this thread.
class Session::Work {
 public:
  explicit Work(Session& session) {
    at_work = &session;
    session.libssl_.ERR_clear_error();  // what others of this thread have left
  }
  ~Work() { at_work = nullptr; }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};

Session::Session(const Libssl& libssl, Role role, const Key& key, uint64_t records_per_key)
    : libssl_(libssl), key_(key), records_per_key_(records_per_key) {
  const Work work(*this);
  ssl_ = libssl_.SSL_new(libssl_.context);
  BIO* const bio = ssl_ == nullptr ? nullptr : libssl_.BIO_new(libssl_.method);
  if (bio == nullptr) {
    libssl_.SSL_free(ssl_);  // may be null
    throw Error(HVD_SYSTEM, "no TLS session: " + libssl_.reason());
  }
  libssl_.BIO_set_init(bio, 1);
  libssl_.SSL_set_bio(ssl_, bio, bio);  // which owns it from now on
  if (role == Role::kConnecting) {
    libssl_.SSL_set_connect_state(ssl_);
    // There are no certificates that we trust: who does not know the key and shows one is refused.
    libssl_.SSL_set_verify(ssl_, kVerifyPeer, nullptr);
  } else {
    libssl_.SSL_set_accept_state(ssl_);
  }
}

Session::~Session() {
  const Work work(*this);
  libssl_.SSL_free(ssl_);
  explicit_bzero(key_.data(), key_.size());
}

std::string Session::cipher() const {
  return std::string(libssl_.SSL_get_version(ssl_)) + " " +
         libssl_.SSL_CIPHER_get_name(libssl_.SSL_get_current_cipher(ssl_));
}

// ---- What libssl calls ----------------------------------------------------------------------------------------------

unsigned Session::tell_key(SSL* ssl, const char*, char* identity, unsigned identity_bytes, unsigned char* key,
                           unsigned key_bytes) {
  if (identity_bytes < sizeof kIdentity) return 0;
  std::memcpy(identity, kIdentity, sizeof kIdentity);
  return find_key(ssl, kIdentity, key, key_bytes);
}

unsigned Session::find_key(SSL*, const char* identity, unsigned char* key, unsigned key_bytes) {
  if (key_bytes < kKeyBytes || identity == nullptr || std::strcmp(identity, kIdentity) != 0) return 0;
  std::memcpy(key, at_work->key_.data(), kKeyBytes);
  return kKeyBytes;
}

int Session::bio_write(BIO*, const char* data, size_t bytes, size_t* written) {
  const auto* const begin = reinterpret_cast<const std::byte*>(data);
  try {
    at_work->output_.insert(at_work->output_.end(), begin, begin + bytes);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  *written = bytes;
  return 1;
}

int Session::bio_read(BIO* bio, char* into, size_t bytes, size_t* read) {
  std::span<const std::byte>& input = at_work->input_;
  const Libssl& libssl = at_work->libssl_;
  libssl.BIO_clear_flags(bio, kBioFlagsAll);
  *read = std::min(bytes, input.size());
  if (*read == 0) {
    libssl.BIO_set_flags(bio, kBioFlagsRead | kBioFlagsShouldRetry);
    return -1;
  }
  std::memcpy(into, input.data(), *read);
  input = input.subspan(*read);
  return 1;
}

BIO_METHOD* Session::make_method(const Libssl& libssl) {
  BIO_METHOD* const method = libssl.BIO_meth_new(kBioTypeSourceSink, "horovod");
  if (method == nullptr) throw Error(HVD_SYSTEM, "no TLS: " + libssl.reason());
  libssl.BIO_meth_set_write_ex(method, bio_write);
  libssl.BIO_meth_set_read_ex(method, bio_read);
  libssl.BIO_meth_set_ctrl(method, [](BIO*, int command, long, void*) -> long { return command == kBioCtrlFlush; });
  return method;
}

// ---- The handshake --------------------------------------------------------------------------------------------------

bool Session::handshake(int fd) {
  const Work work(*this);
  socket_is_empty_ = false;
  while (!done_) {
    const int result = libssl_.SSL_do_handshake(ssl_);
    if (result != 1 && libssl_.SSL_get_error(ssl_, result) != kErrorWantRead) fail_handshake(fd, libssl_.reason());
    if (result == 1) {
      // A handshake without our key would need a certificate, and is refused for lack of one. Be sure of it.
      if (libssl_.SSL_session_reused(ssl_) != 1) fail_handshake(fd, "the key was not used");
      explicit_bzero(key_.data(), key_.size());
      done_ = true;
    }
    if (!flush(fd) && !would_block(errno)) fail_handshake(fd, std::strerror(errno));
    if (done_) break;
    switch (fill(fd)) {
      case Fill::kSome:
        continue;
      case Fill::kNothing:
        return false;
      case Fill::kEnd:
        fail_handshake(fd, "the connection was closed");
      case Fill::kError:
        fail_handshake(fd, std::strerror(read_error_));
    }
  }
  return true;
}

void Session::fail_handshake(int fd, const std::string& why) {
  (void)flush(fd);  // libssl's word to the other side
  throw Error(HVD_SYSTEM, "the TLS handshake failed: " + why);
}

// ---- Receiving ------------------------------------------------------------------------------------------------------

// Called when libssl has taken all input there was.
Session::Fill Session::fill(int fd) {
  if (read_error_ != 0) return Fill::kError;
  if (ended_) return Fill::kEnd;
  if (socket_is_empty_) return Fill::kNothing;
  if (!received_) received_ = std::make_unique_for_overwrite<std::byte[]>(kInput);
  for (;;) {
    const ssize_t n = recv(fd, received_.get(), kInput, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && would_block(errno)) return Fill::kNothing;
    if (n < 0) {
      read_error_ = errno;
      return Fill::kError;
    }
    if (n == 0) {
      ended_ = true;
      return Fill::kEnd;
    }
    input_ = {received_.get(), static_cast<size_t>(n)};
    socket_is_empty_ = input_.size() < kInput;
    return Fill::kSome;
  }
}

ssize_t Session::read(int fd, std::byte* into, size_t bytes) {
  const Work work(*this);
  socket_is_empty_ = false;
  size_t done = 0;
  while (done < bytes && broken_.empty()) {
    size_t n = 0;
    if (libssl_.SSL_read_ex(ssl_, into + done, bytes - done, &n) == 1) {
      done += n;
      continue;
    }
    const int error = libssl_.SSL_get_error(ssl_, 0);
    if (error == kErrorZeroReturn) {
      ended_ = true;
      break;
    }
    if (error != kErrorWantRead) {
      broken_ = libssl_.reason();
      break;
    }
    const Fill filled = fill(fd);
    if (filled == Fill::kSome) continue;
    if (done > 0 || filled == Fill::kEnd) break;
    errno = filled == Fill::kNothing ? EAGAIN : read_error_;
    return -1;
  }
  // What came before the damage is good.
  if (done == 0 && !broken_.empty()) throw BadFrame("it can't be decrypted (" + broken_ + ")");
  return static_cast<ssize_t>(done);
}

// ---- Sending --------------------------------------------------------------------------------------------------------

// One record, into output_.
bool Session::encrypt(const std::byte* data, size_t bytes) {
  if (records_ == records_per_key_) {
    (void)libssl_.SSL_key_update(ssl_, kKeyUpdateNotRequested);  // goes out with what is written next
    records_ = 0;
  }
  ++records_;
  size_t taken = 0;
  return libssl_.SSL_write_ex(ssl_, data, bytes, &taken) == 1 && taken == bytes;
}

ssize_t Session::write(int fd, const iovec* parts, size_t count) {
  const Work work(*this);
  if (sent_ > 0) {
    output_.erase(output_.begin(), output_.begin() + static_cast<ptrdiff_t>(sent_));
    sent_ = 0;
  }
  std::array<std::byte, kRecord> together;
  size_t done = 0;
  size_t part = 0, skip = 0;  // where we are
  while (part < count) {
    if (output_.size() >= kOutput && !flush(fd)) {
      if (!would_block(errno)) return -1;
      break;
    }
    const auto* data = static_cast<const std::byte*>(parts[part].iov_base) + skip;
    size_t bytes = std::min(parts[part].iov_len - skip, kRecord);
    if (bytes == kRecord || part + 1 == count) {
      skip += bytes;
    } else {
      data = together.data();
      for (bytes = 0; part < count && bytes < kRecord;) {
        const size_t n = std::min(parts[part].iov_len - skip, kRecord - bytes);
        std::memcpy(together.data() + bytes, static_cast<const std::byte*>(parts[part].iov_base) + skip, n);
        bytes += n;
        skip += n;
        if (skip < parts[part].iov_len) break;
        ++part;
        skip = 0;
      }
    }
    if (bytes > 0 && !encrypt(data, bytes)) {
      errno = EPROTO;
      return -1;
    }
    done += bytes;
    if (part < count && skip == parts[part].iov_len) {
      ++part;
      skip = 0;
    }
  }
  if (!flush(fd) && !would_block(errno)) return -1;
  if (done == 0 && count > 0) {
    errno = EAGAIN;
    return -1;
  }
  return static_cast<ssize_t>(done);
}

bool Session::flush(int fd) {
  while (has_output()) {
    const ssize_t n = send(fd, output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    sent_ += static_cast<size_t>(n);
  }
  output_.clear();
  sent_ = 0;
  return true;
}

void Session::discard_output() {
  output_.clear();
  sent_ = 0;
}

void Session::end_writing() {
  const Work work(*this);
  if (done_) (void)libssl_.SSL_shutdown(ssl_);
}

}  // namespace hvd::tls
