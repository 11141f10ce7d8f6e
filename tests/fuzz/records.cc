// A stream of records that is cut anywhere: the same records come out, whole and in order, up to the first length that
// makes no sense, which is a BadFrame. By the cutter alone, and over a socket.
#include "transport/records.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "target.h"
#include "transport/errors.h"

using namespace hvd;

namespace {

using Stream = std::vector<std::byte>;

// What the cutter must make of a stream, in the plainest way.
struct Expected {
  explicit Expected(const Stream& stream) {
    size_t at = 0;
    uint32_t length = 0;
    while (stream.size() - at >= sizeof length) {
      std::memcpy(&length, stream.data() + at, sizeof length);
      makes_no_sense = length == 0 || length > RecordCutter::kMostBytes;
      at += sizeof length;
      if (makes_no_sense || stream.size() - at < length) return;
      const auto begin = stream.begin() + static_cast<ptrdiff_t>(at);
      records.emplace_back(begin, begin + length);
      at += length;
    }
  }
  std::vector<Stream> records;
  bool makes_no_sense = false;
};

void append(Stream& stream, uint32_t length, uint8_t fill) {
  const auto* head = reinterpret_cast<const std::byte*>(&length);
  stream.insert(stream.end(), head, head + sizeof length);
  stream.insert(stream.end(), length, std::byte{fill});
}

Stream make_stream(FuzzedDataProvider& input) {
  Stream stream;
  while (input.remaining_bytes() > 0 && stream.size() < (512 << 10)) {
    switch (input.ConsumeIntegralInRange(0, 3)) {
      case 0:
        append(stream, input.ConsumeIntegralInRange<uint32_t>(1, 64), input.ConsumeIntegral<uint8_t>());
        break;
      case 1:  // large: the cutter makes room only then
        append(stream, input.ConsumeIntegralInRange<uint32_t>(1, 100000), input.ConsumeIntegral<uint8_t>());
        break;
      default: {
        const std::vector<uint8_t> raw = input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(1, 12));
        const auto bytes = fuzz::as_bytes(raw.data(), raw.size());
        stream.insert(stream.end(), bytes.begin(), bytes.end());
      }
    }
  }
  return stream;
}

// Feeds the stream in pieces of these sizes, over and over, and checks what `next` gives between them.
template <typename Add, typename Next>
void check(const Stream& stream, const Expected& expected, const std::vector<size_t>& pieces, Add add, Next next) {
  size_t found = 0;
  bool bad = false;
  for (size_t at = 0, turn = 0; at < stream.size() && !bad; ++turn) {
    const size_t piece = std::min(pieces[turn % pieces.size()], stream.size() - at);
    add(std::span(stream).subspan(at, piece));
    at += piece;
    try {
      std::span<const std::byte> record;
      while (next(record)) {
        EXPECT(found < expected.records.size());
        const Stream& wanted = expected.records[found++];
        EXPECT(std::equal(record.begin(), record.end(), wanted.begin(), wanted.end()));
      }
    } catch (const BadFrame&) {
      bad = true;
    }
  }
  EXPECT(bad == expected.makes_no_sense);
  EXPECT(found == expected.records.size());
}

}  // namespace

std::vector<fuzz::Input> fuzz::seeds() {
  std::vector<Input> all;
  for (uint8_t i = 1; i < 8; ++i) all.emplace_back(16 * i, std::byte{i});
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  std::vector<size_t> pieces(input.ConsumeIntegralInRange<size_t>(1, 4));
  for (size_t& piece : pieces) {
    piece = input.ConsumeBool() ? input.ConsumeIntegralInRange<size_t>(1, 16)
                                : input.ConsumeIntegralInRange<size_t>(1, 100000);
  }
  const Stream stream = make_stream(input);
  // Many tiny pieces of much take long, and show nothing that fewer would not.
  for (size_t& piece : pieces) piece = std::max(piece, stream.size() / 128);
  const Expected expected(stream);

  RecordCutter cutter;
  check(
      stream, expected, pieces, [&](std::span<const std::byte> piece) { cutter.add(piece); },
      [&](std::span<const std::byte>& record) { return cutter.next(record); });

  int fds[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  {
    Counters counters;
    Records records({fds[0]}, "the other end", counters);
    check(
        stream, expected, pieces,
        [&](std::span<const std::byte> piece) {
          while (!piece.empty()) {
            const ssize_t sent = send(fds[1], piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent > 0) piece = piece.subspan(static_cast<size_t>(sent));
            EXPECT(records.read());
          }
        },
        [&](std::span<const std::byte>& record) { return records.next(record); });
    EXPECT(!records.lost());
  }
  close(fds[0]);
  close(fds[1]);
  return 0;
}
