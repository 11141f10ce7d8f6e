// Exceptions inside the engine. They end at the C interface, as a status and a text.
#ifndef HOROVOD_TRANSPORT_ERRORS_H_
#define HOROVOD_TRANSPORT_ERRORS_H_

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "api/horovod.h"

namespace hvd {

struct Error : std::runtime_error {
  Error(hvd_status s, const std::string& text) : std::runtime_error(text), status(s) {}
  hvd_status status;
};

// The operating system refused something.
struct SystemError : Error {
  explicit SystemError(const std::string& what, int code = errno)
      : Error(HVD_SYSTEM, what + ": " + std::strerror(code)) {}
};

// Bytes came over a connection that no rank of this version sends.
struct BadFrame : Error {
  explicit BadFrame(const std::string& what) : Error(HVD_SYSTEM, "a frame between hosts makes no sense: " + what) {}
};

// The caller's mistake.
struct InvalidError : Error {
  explicit InvalidError(const std::string& text) : Error(HVD_INVALID, text) {}
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_ERRORS_H_
