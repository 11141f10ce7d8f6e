// Records between hosts.
#include "../cpp/sample_messages.h"
#include "round_trip.h"

using namespace hvd;

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> all = testing::some_from_host();
  for (Input& message : testing::some_to_host()) all.push_back(std::move(message));
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::expect_round_trip(fuzz::as_bytes(data, size), decode_from_host);
  fuzz::expect_round_trip(fuzz::as_bytes(data, size), decode_to_host);
  return 0;
}
