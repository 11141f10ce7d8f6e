// The promise of every decoder of messages.
#ifndef HOROVOD_FUZZ_ROUND_TRIP_H_
#define HOROVOD_FUZZ_ROUND_TRIP_H_

#include <algorithm>

#include "engine/messages.h"
#include "target.h"

namespace hvd::fuzz {

// Any bytes are refused with BadMessage, or decode to what encodes to these bytes again.
template <typename Decode>
void expect_round_trip(BytesView bytes, Decode decode) {
  try {
    const Bytes again = encode(decode(bytes));
    EXPECT(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()));
  } catch (const BadMessage&) {
  }
}

}  // namespace hvd::fuzz
#endif  // HOROVOD_FUZZ_ROUND_TRIP_H_
