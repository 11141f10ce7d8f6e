// Where all exceptions end: every function of the C interface runs its body in guarded().
#ifndef HOROVOD_API_GUARDED_H_
#define HOROVOD_API_GUARDED_H_

#include <atomic>
#include <new>
#include <string>

#include "transport/errors.h"

namespace hvd::api {

extern thread_local std::string last_error;
extern std::atomic<bool> forked;  // this is a child of a process whose engine ran

inline hvd_status failed(hvd_status status, const std::string& text) {
  last_error = text;
  return status;
}

template <typename F>
hvd_status guarded(F&& body) noexcept {
  try {
    if (forked) {
      return failed(HVD_FORKED,
                    "Horovod can't be used in a process made by fork() after hvd.init() (a DataLoader worker, for "
                    "example). Use it in the process that called hvd.init(), or start this one by spawn.");
    }
    return body();
  } catch (const Error& error) {
    return failed(error.status, error.what());
  } catch (const std::bad_alloc&) {
    return failed(HVD_SYSTEM, "out of memory");
  } catch (const std::exception& error) {
    return failed(HVD_SYSTEM, error.what());
  }
}

}  // namespace hvd::api
#endif  // HOROVOD_API_GUARDED_H_
