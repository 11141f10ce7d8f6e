// Durations in words, and as whole numbers.
#include "transport/durations.h"

#include <doctest/doctest.h>

#include <limits>

namespace hvd {

TEST_CASE("durations are told in as many digits as matter") {
  CHECK(seconds_text(30) == "30 s");
  CHECK(seconds_text(0.25) == "0.25 s");
  CHECK(seconds_text(1.5) == "1.5 s");
  CHECK(seconds_text(0.001) == "0.001 s");
  CHECK(seconds_text(604800) == "604800 s");
  CHECK(seconds_text(1e300).size() == 303);
  CHECK(measured_seconds_text(0.5) == "0.5 s");
  CHECK(measured_seconds_text(1.97) == "1 s");
  CHECK(measured_seconds_text(60.2) == "60 s");
}

TEST_CASE("seconds become nanoseconds, however many they are") {
  CHECK(nanoseconds_of(0.25) == 250'000'000);
  CHECK(nanoseconds_of(30) == 30'000'000'000);
  for (const double long_time : {1e9, 3e10, 1e300, std::numeric_limits<double>::infinity()}) {
    CHECK(nanoseconds_of(long_time) == 1'000'000'000'000'000'000);
  }
}

}  // namespace hvd
