// What the handle of a TLS session is.
#ifndef HOROVOD_API_TLS_H_
#define HOROVOD_API_TLS_H_

#include <memory>

#include "api/horovod.h"
#include "transport/tls.h"

struct hvd_tls {
  std::shared_ptr<hvd::tls::Session> session;  // none: hvd_init has it
};

#endif  // HOROVOD_API_TLS_H_
