// Durations in words.
#include "transport/durations.h"

#include <doctest/doctest.h>

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

}  // namespace hvd
