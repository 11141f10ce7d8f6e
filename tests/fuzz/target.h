// What a fuzz target consists of: some inputs to begin with, and a function that is given any input.
//
// A target is one file here. libFuzzer calls LLVMFuzzerTestOneInput with what it makes of the inputs that it knows; the
// sanitizers, and EXPECT, end the process where a promise is broken. Call it with a directory: the seeds are written
// there first, and what libFuzzer finds interesting is added. With a file it runs that one input.
#ifndef HOROVOD_FUZZ_TARGET_H_
#define HOROVOD_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

namespace hvd::fuzz {

using Input = std::vector<std::byte>;

// Defined by every target.
std::vector<Input> seeds();

inline std::span<const std::byte> as_bytes(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const std::byte*>(data), size};
}

}  // namespace hvd::fuzz

// Ends the process unless the condition holds.
#define EXPECT(condition)                                                                \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: expected that %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // HOROVOD_FUZZ_TARGET_H_
