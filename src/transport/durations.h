// Durations in words, and as whole numbers.
#ifndef HOROVOD_TRANSPORT_DURATIONS_H_
#define HOROVOD_TRANSPORT_DURATIONS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace hvd {

// "30 s", "0.25 s": whole seconds from 100 on, three digits below.
inline std::string seconds_text(double seconds) {
  std::array<char, 400> text{};  // the largest double has 309 digits
  std::snprintf(text.data(), text.size(), seconds < 100 ? "%.3g s" : "%.0f s", seconds);
  return text.data();
}

// The same for a time that was measured: nobody wants to know whether a minute was 60.2 s.
inline std::string measured_seconds_text(double seconds) {
  return seconds_text(seconds < 1 ? seconds : std::floor(seconds));
}

// A user's seconds. Whoever wants to wait for ever may say so by any number, and in 30 years the job has ended.
inline uint64_t nanoseconds_of(double seconds) { return static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9); }

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_DURATIONS_H_
