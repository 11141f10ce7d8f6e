// Records between the ranks of a host: what they ask of the coordinator, and the log.
#include "../cpp/sample_messages.h"
#include "round_trip.h"

using namespace hvd;

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> all = testing::some_log();
  for (Input& request : testing::some_requests()) all.push_back(std::move(request));
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::expect_round_trip(fuzz::as_bytes(data, size), decode_log_entry);
  fuzz::expect_round_trip(fuzz::as_bytes(data, size), decode_to_coordinator);
  return 0;
}
