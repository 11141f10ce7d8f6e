// Errors on their way to TensorFlow: its status objects, and which of its codes each of ours becomes.
#ifndef HOROVOD_SHIMS_TENSORFLOW_STATUS_H_
#define HOROVOD_SHIMS_TENSORFLOW_STATUS_H_

#include <memory>
#include <stdexcept>
#include <string>

#include "api/horovod.h"
#include "shims/tensorflow/api.h"

namespace hvd::tensorflow {

struct Failure : std::runtime_error {
  Failure(Code of, const std::string& text) : std::runtime_error(text), code(of) {}
  Code code;
};

// A TF_Status that is deleted. check() throws what TensorFlow has said.
class Status {
 public:
  Status() : status_(api().NewStatus(), [](TF_Status* old) { api().DeleteStatus(old); }) {}
  Status(Code code, const std::string& text) : Status() { api().SetStatus(status_.get(), code, text.c_str()); }
  operator TF_Status*() const { return status_.get(); }
  void check() const {
    const Code code = api().GetCode(status_.get());
    if (code != kOk) throw Failure(code, api().Message(status_.get()));
  }

 private:
  std::unique_ptr<TF_Status, void (*)(TF_Status*)> status_;
};

// The codes are those of the existing Horovod: TensorFlow's Python makes an exception of each.
inline Code code_of(hvd_status status) {
  switch (status) {
    case HVD_INVALID:
      return kInvalidArgument;
    case HVD_NOT_INITIALIZED:
    case HVD_MISMATCH:
    case HVD_FORKED:
      return kFailedPrecondition;
    case HVD_SYSTEM:
      return kAborted;
    default:  // shut down, a peer lost, given up
      return kUnknown;
  }
}

}  // namespace hvd::tensorflow
#endif  // HOROVOD_SHIMS_TENSORFLOW_STATUS_H_
