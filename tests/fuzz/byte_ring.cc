// A ring in shared memory whose bytes and positions are anything: its reader stays inside, comes to an end, and never
// takes more than is said to be written; its writer stays inside wherever a reader claims to be.
#include "transport/byte_ring.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <memory>

#include "target.h"

using namespace hvd;

namespace {

// The bytes of a ring as a writer leaves them, and after them what makes the target read all of it.
fuzz::Input written_ring(const std::vector<size_t>& records) {
  Flag written{0};
  fuzz::Input ring(256);
  RingWriter writer(written, ring.data(), ring.size());
  for (const size_t bytes : records) (void)writer.write(fuzz::Input(bytes, std::byte{7}), 0);
  return ring;
}

void read_anything(FuzzedDataProvider& input) {
  const size_t size = 8 * input.ConsumeIntegralInRange<size_t>(1, 32);
  // Of exactly that size: the sanitizer sees the first byte beyond it.
  const auto data = std::make_unique<std::byte[]>(size);
  const std::vector<uint8_t> content = input.ConsumeBytes<uint8_t>(size);
  std::copy(content.begin(), content.end(), reinterpret_cast<uint8_t*>(data.get()));
  Flag written{0}, read{0};
  RingReader reader(written, read, data.get(), size);
  uint8_t sum = 0;
  for (int i = 0; i < 8; ++i) {
    written.store(input.ConsumeBool() ? input.ConsumeIntegral<uint64_t>()
                                      : written.load() + input.ConsumeIntegralInRange<uint64_t>(0, size));
    for (int records = 0; records < 1000; ++records) {
      const bool any = reader.next([&sum](std::span<const std::byte> record) {
        for (const std::byte byte : record) sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(byte));
      });
      if (!any) break;
      EXPECT(!reader.broken());
      EXPECT(reader.position() <= written.load());
      EXPECT(read.load() == reader.position());
    }
  }
}

void write_for_anyone(FuzzedDataProvider& input) {
  const size_t size = 8 * input.ConsumeIntegralInRange<size_t>(1, 32);
  const auto data = std::make_unique<std::byte[]>(size);
  Flag written{0};
  RingWriter writer(written, data.get(), size);
  for (int i = 0; i < 32 && input.remaining_bytes() > 0; ++i) {
    const fuzz::Input record(input.ConsumeIntegralInRange<size_t>(0, 2 * size), std::byte{9});
    const uint64_t before = writer.position();
    const uint64_t claimed = input.ConsumeBool()
                                 ? input.ConsumeIntegral<uint64_t>()
                                 : before - std::min<uint64_t>(before, input.ConsumeIntegral<uint8_t>());
    if (!writer.write(record, claimed)) {
      EXPECT(writer.position() == before);
      continue;
    }
    EXPECT(written.load() == writer.position());
    EXPECT(writer.position() - claimed <= size);  // it has overwritten nothing that is still needed
  }
}

}  // namespace

std::vector<fuzz::Input> fuzz::seeds() {
  return {written_ring({1, 2, 3}), written_ring({100, 100, 0}), written_ring({240}), Input(64)};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  if (input.ConsumeBool()) {
    read_anything(input);
  } else {
    write_for_anyone(input);
  }
  return 0;
}
