// The C interface of TLS sessions: transport/tls.h has what they are.
#include "api/tls.h"

#include <strings.h>

#include <cerrno>
#include <cstring>

#include "api/guarded.h"

namespace {

using hvd::InvalidError;
using hvd::api::guarded;

hvd::tls::Session& session_of(const hvd_tls* handle) {
  if (handle == nullptr || !handle->session) throw InvalidError("hvd_tls: the engine has the session");
  return *handle->session;
}

const hvd::tls::Libssl& libssl(const char* name) {
  return hvd::tls::Libssl::load(name != nullptr ? name : hvd::tls::Libssl::kDefaultName);
}

// The outcome of a call that behaves as those of sockets.
hvd_status from_errno(const char* what) {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return HVD_PENDING;
  throw hvd::SystemError(what);
}

}  // namespace

hvd_status hvd_tls_load(const char* library, const char** version) {
  return guarded([&] {
    *version = libssl(library).version.c_str();
    return HVD_OK;
  });
}

hvd_status hvd_tls_open(const char* library, int listening, const uint8_t* key, hvd_tls** session) {
  return guarded([&] {
    using hvd::tls::Session;
    Session::Key bytes;
    static_assert(sizeof bytes == HVD_TLS_KEY_BYTES);
    std::memcpy(bytes.data(), key, sizeof bytes);
    const Session::Role role = listening != 0 ? Session::Role::kListening : Session::Role::kConnecting;
    *session = new hvd_tls{std::make_shared<Session>(libssl(library), role, bytes)};
    explicit_bzero(bytes.data(), sizeof bytes);
    return HVD_OK;
  });
}

void hvd_tls_close(hvd_tls* session) { delete session; }

hvd_status hvd_tls_handshake(hvd_tls* session, int fd) {
  return guarded([&] { return session_of(session).handshake(fd) ? HVD_OK : HVD_PENDING; });
}

hvd_status hvd_tls_read(hvd_tls* session, int fd, void* into, size_t bytes, size_t* read) {
  return guarded([&] {
    const ssize_t n = session_of(session).read(fd, static_cast<std::byte*>(into), bytes);
    if (n < 0) return from_errno("the connection failed");
    *read = static_cast<size_t>(n);
    return HVD_OK;
  });
}

hvd_status hvd_tls_write(hvd_tls* session, int fd, const void* data, size_t bytes, size_t* written) {
  return guarded([&] {
    const iovec part{const_cast<void*>(data), bytes};
    const ssize_t n = session_of(session).write(fd, &part, 1);
    if (n < 0) return from_errno("the connection failed");
    *written = static_cast<size_t>(n);
    return HVD_OK;
  });
}

hvd_status hvd_tls_flush(hvd_tls* session, int fd) {
  return guarded([&] { return session_of(session).flush(fd) ? HVD_OK : from_errno("the connection failed"); });
}

int hvd_tls_has_output(const hvd_tls* session) { return session->session && session->session->has_output(); }
