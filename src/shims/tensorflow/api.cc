#include "shims/tensorflow/api.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace hvd::tensorflow {
namespace {

constexpr const char* kLibrary = "libtensorflow_framework.so.2";

Api found;

void* find(void* library, const char* name) {
  void* const function = dlsym(library, name);
  if (function == nullptr) {
    throw std::runtime_error(std::string("this version of TensorFlow has no function ") + name +
                             " in its C interface; Horovod works with TensorFlow 2.16 and later");
  }
  return function;
}

}  // namespace

const Api& find_api() {
  // Only if it is loaded: another copy would have registries of its own, in which nobody looks.
  void* const library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    throw std::runtime_error(std::string(kLibrary) + " is not loaded; import tensorflow first");
  }
#define HVD_FIND(result, name, arguments) \
  found.name = reinterpret_cast<result(*) arguments>(find(library, "TF_" #name));
  HVD_TENSORFLOW_FUNCTIONS(HVD_FIND)
#undef HVD_FIND
  return found;
}

const Api& api() { return found; }

}  // namespace hvd::tensorflow
