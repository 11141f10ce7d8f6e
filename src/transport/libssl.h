// OpenSSL's libssl, found at run time: nothing of it is needed to build or to install, and a machine without it can do
// all but encrypt. These are the functions that are used, declared as OpenSSL 3 has them; their names are OpenSSL's.
#ifndef HOROVOD_TRANSPORT_LIBSSL_H_
#define HOROVOD_TRANSPORT_LIBSSL_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/errors.h"

namespace hvd::tls {

struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct SSL_CIPHER;
struct BIO;
struct BIO_METHOD;
struct OPENSSL_INIT_SETTINGS;

using PskClientCallback = unsigned (*)(SSL*, const char* hint, char* identity, unsigned identity_bytes,
                                       unsigned char* key, unsigned key_bytes);
using PskServerCallback = unsigned (*)(SSL*, const char* identity, unsigned char* key, unsigned key_bytes);
using BioWrite = int (*)(BIO*, const char* data, size_t bytes, size_t* written);
using BioRead = int (*)(BIO*, char* into, size_t bytes, size_t* read);
using BioControl = long (*)(BIO*, int command, long number, void* pointer);

// X(result, name, arguments)
#define HVD_LIBSSL_FUNCTIONS(X)                                           \
  X(int, OPENSSL_init_ssl, (uint64_t, const OPENSSL_INIT_SETTINGS*))      \
  X(const char*, OpenSSL_version, (int))                                  \
  X(void, ERR_clear_error, ())                                            \
  X(unsigned long, ERR_peek_last_error, ())                               \
  X(const char*, ERR_reason_error_string, (unsigned long))                \
  X(BIO_METHOD*, BIO_meth_new, (int, const char*))                        \
  X(int, BIO_meth_set_write_ex, (BIO_METHOD*, BioWrite))                  \
  X(int, BIO_meth_set_read_ex, (BIO_METHOD*, BioRead))                    \
  X(int, BIO_meth_set_ctrl, (BIO_METHOD*, BioControl))                    \
  X(BIO*, BIO_new, (const BIO_METHOD*))                                   \
  X(void, BIO_set_init, (BIO*, int))                                      \
  X(void, BIO_set_flags, (BIO*, int))                                     \
  X(void, BIO_clear_flags, (BIO*, int))                                   \
  X(const SSL_METHOD*, TLS_method, ())                                    \
  X(SSL_CTX*, SSL_CTX_new, (const SSL_METHOD*))                           \
  X(long, SSL_CTX_ctrl, (SSL_CTX*, int, long, void*))                     \
  X(uint64_t, SSL_CTX_set_options, (SSL_CTX*, uint64_t))                  \
  X(int, SSL_CTX_set_ciphersuites, (SSL_CTX*, const char*))               \
  X(int, SSL_CTX_set_num_tickets, (SSL_CTX*, size_t))                     \
  X(void, SSL_set_verify, (SSL*, int, void*))                             \
  X(void, SSL_CTX_set_psk_client_callback, (SSL_CTX*, PskClientCallback)) \
  X(void, SSL_CTX_set_psk_server_callback, (SSL_CTX*, PskServerCallback)) \
  X(SSL*, SSL_new, (SSL_CTX*))                                            \
  X(void, SSL_free, (SSL*))                                               \
  X(void, SSL_set_bio, (SSL*, BIO*, BIO*))                                \
  X(void, SSL_set_connect_state, (SSL*))                                  \
  X(void, SSL_set_accept_state, (SSL*))                                   \
  X(int, SSL_do_handshake, (SSL*))                                        \
  X(int, SSL_session_reused, (const SSL*))                                \
  X(const SSL_CIPHER*, SSL_get_current_cipher, (const SSL*))              \
  X(const char*, SSL_CIPHER_get_name, (const SSL_CIPHER*))                \
  X(const char*, SSL_get_version, (const SSL*))                           \
  X(int, SSL_read_ex, (SSL*, void*, size_t, size_t*))                     \
  X(int, SSL_write_ex, (SSL*, const void*, size_t, size_t*))              \
  X(int, SSL_get_error, (const SSL*, int))                                \
  X(int, SSL_key_update, (SSL*, int))                                     \
  X(int, SSL_shutdown, (SSL*))

struct Libssl {
#define HVD_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
  HVD_LIBSSL_FUNCTIONS(HVD_DECLARE)
#undef HVD_DECLARE

  // Made once, for sessions of either role: TLS 1.3 only, by a key that both sides know, without certificates.
  SSL_CTX* context = nullptr;
  BIO_METHOD* method = nullptr;  // see tls.cc
  std::string version;           // in OpenSSL's words

  static constexpr const char* kDefaultName = "libssl.so.3";
  // The library of that name or path; stays loaded for the life of the process. Throws Error, which tells why there is
  // none.
  static const Libssl& load(const std::string& name);

  // Why the last call on this thread failed, in OpenSSL's words.
  std::string reason() const;
};

}  // namespace hvd::tls
#endif  // HOROVOD_TRANSPORT_LIBSSL_H_
