#include "transport/libssl.h"

#include <dlfcn.h>
#include <sys/auxv.h>

#include <map>
#include <memory>
#include <mutex>

#include "transport/tls.h"

namespace hvd::tls {
namespace {

// From OpenSSL's headers, which are not needed to build.
constexpr uint64_t kInitNoAtexit = 0x00080000;
constexpr int kCtrlSetSessionCacheMode = 44, kCtrlSetMinVersion = 123, kCtrlSetMaxVersion = 124;
constexpr long kTls13 = 0x0304;
constexpr long kNoSessionCache = 0;
constexpr uint64_t kOpNoTicket = 1 << 14, kOpNoCompression = 1 << 17, kOpNoRenegotiation = 1 << 30;

// AES is the faster one only where the processor has instructions for it. The connecting side's order counts.
bool has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") != 0;
#elif defined(__aarch64__)
  constexpr unsigned long kHwcapAes = 1 << 3;
  return (getauxval(AT_HWCAP) & kHwcapAes) != 0;
#else
  return false;
#endif
}

SSL_CTX* make_context(const Libssl& ssl) {
  SSL_CTX* const context = ssl.SSL_CTX_new(ssl.TLS_method());
  if (context == nullptr) throw Error(HVD_SYSTEM, "no TLS context: " + ssl.reason());
  const char* const ciphers = has_aes() ? "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
                                        : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
  if (ssl.SSL_CTX_ctrl(context, kCtrlSetMinVersion, kTls13, nullptr) != 1 ||
      ssl.SSL_CTX_ctrl(context, kCtrlSetMaxVersion, kTls13, nullptr) != 1 ||
      ssl.SSL_CTX_set_ciphersuites(context, ciphers) != 1 || ssl.SSL_CTX_set_num_tickets(context, 0) != 1) {
    throw Error(HVD_SYSTEM, "it can't do TLS 1.3: " + ssl.reason());
  }
  ssl.SSL_CTX_ctrl(context, kCtrlSetSessionCacheMode, kNoSessionCache, nullptr);
  ssl.SSL_CTX_set_options(context, kOpNoTicket | kOpNoCompression | kOpNoRenegotiation);
  ssl.SSL_CTX_set_psk_client_callback(context, Session::tell_key);
  ssl.SSL_CTX_set_psk_server_callback(context, Session::find_key);
  return context;
}

std::unique_ptr<Libssl> open_library(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Error(HVD_SYSTEM, dlerror());
  auto ssl = std::make_unique<Libssl>();
  // Those of libcrypto, on which libssl depends, are found by the same handle.
#define HVD_FIND(result, function, arguments)                                          \
  ssl->function = reinterpret_cast<decltype(ssl->function)>(dlsym(handle, #function)); \
  if (ssl->function == nullptr) throw Error(HVD_SYSTEM, name + " has no " #function ": not OpenSSL 3");
  HVD_LIBSSL_FUNCTIONS(HVD_FIND)
#undef HVD_FIND
  // At exit a thread may still use it.
  if (ssl->OPENSSL_init_ssl(kInitNoAtexit, nullptr) != 1) {
    throw Error(HVD_SYSTEM, name + " can't be initialized: " + ssl->reason());
  }
  ssl->version = ssl->OpenSSL_version(0);
  ssl->method = Session::make_method(*ssl);
  ssl->context = make_context(*ssl);
  return ssl;
}

}  // namespace

const Libssl& Libssl::load(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed: see `opened`
  static auto& opened = *new std::map<std::string, std::unique_ptr<Libssl>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Libssl>& found = opened[name];
  if (!found) found = open_library(name);
  return *found;
}

std::string Libssl::reason() const {
  const unsigned long code = ERR_peek_last_error();
  const char* const text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return text != nullptr ? text : "error " + std::to_string(code);
}

}  // namespace hvd::tls
