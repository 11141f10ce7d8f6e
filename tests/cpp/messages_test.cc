// Messages between ranks: what is written is read back, and no bytes whatsoever do harm.
#include "engine/messages.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "transport/byte_ring.h"

using namespace hvd;

namespace {

Meta some_meta() {
  Meta meta;
  meta.op = HVD_BROADCAST;
  meta.dtype = HVD_COMPLEX128;
  meta.reduce_op = HVD_MAX;
  meta.root = 3;
  meta.prescale = 0.5;
  meta.postscale = -2.25;
  meta.shape = {kAnyRows, 0, 1LL << 40};
  return meta;
}

std::vector<Bytes> some_log() {
  const Key key{2, "a name"};
  const Meta meta = some_meta();
  return {encode(LogEntry(Define{7, key, meta})),
          encode(LogEntry(Run{{1, 2, 3, 70000}})),
          encode(LogEntry(Evict{9})),
          encode(LogEntry(Refuse{{0, ""}, "a text"})),
          encode(LogEntry(Stop{HVD_STALLED, "why"})),
          encode(LogEntry(AddSet{4, {0, 2, 5}})),
          encode(LogEntry(RemoveSet{4})),
          encode(LogEntry(RemoveEnd{4})),
          encode(LogEntry(JoinEnd{6}))};
}

std::vector<Bytes> some_requests() {
  const Key key{1, "x"};
  const Meta meta = some_meta();
  return {encode(ToCoordinator(Submit{key, meta, true})), encode(ToCoordinator(Want{key})),
          encode(ToCoordinator(Closed{5}))};
}

// Decoding either throws BadMessage or gives something that encodes again.
template <typename Decode>
void feed(const Bytes& bytes, Decode decode) {
  try {
    (void)encode(decode(bytes));
  } catch (const BadMessage&) {
  }
}

template <typename Decode>
void feed_damaged(const std::vector<Bytes>& messages, Decode decode) {
  std::mt19937_64 random(11);
  for (const Bytes& message : messages) {
    for (size_t length = 0; length < message.size(); ++length)
      feed(Bytes(message.begin(), message.begin() + static_cast<ptrdiff_t>(length)), decode);
    for (int i = 0; i < 20000; ++i) {
      Bytes damaged = message;
      const size_t changes = 1 + random() % 4;
      for (size_t c = 0; c < changes; ++c) damaged[random() % damaged.size()] = static_cast<std::byte>(random());
      if (random() % 4 == 0) damaged.resize(random() % 64);
      feed(damaged, decode);
    }
  }
}

}  // namespace

TEST_CASE("what is encoded is decoded the same") {
  for (const Bytes& bytes : some_log()) CHECK(encode(decode_log_entry(bytes)) == bytes);
  for (const Bytes& bytes : some_requests()) CHECK(encode(decode_to_coordinator(bytes)) == bytes);
  const auto define = std::get<Define>(decode_log_entry(some_log()[0]));
  CHECK(define.id == 7);
  CHECK(define.key == Key{2, "a name"});
  CHECK(define.meta == some_meta());
}

TEST_CASE("cut and damaged messages are refused or harmless") {
  feed_damaged(some_log(), decode_log_entry);
  feed_damaged(some_requests(), decode_to_coordinator);
}

TEST_CASE("a ring passes records of every length, and stops at one that makes no sense") {
  Flag written{0}, read{0};
  std::vector<std::byte> data(256);
  RingWriter writer(written, data.data(), data.size());
  RingReader reader(written, read, data.data(), data.size());
  std::mt19937_64 random(5);
  for (int i = 0; i < 10000; ++i) {
    Bytes record(random() % 100, static_cast<std::byte>(i));
    const bool fits = writer.write(record, read.load());
    if (!fits) {
      CHECK_FALSE(reader.empty());
      while (reader.next([](BytesView) {})) {
      }
      REQUIRE(writer.write(record, read.load()));
    }
    if (random() % 3 == 0) continue;
    Bytes last;
    while (reader.next([&last](BytesView bytes) { last.assign(bytes.begin(), bytes.end()); })) {
    }
    CHECK(last == record);
  }
  while (reader.next([](BytesView) {})) {
  }
  const size_t too_long = data.size() + 1 + random() % 64;
  for (size_t ahead = 0; ahead < 4 * data.size(); ahead += 8)  // also to a reader that is where it can't be
    CHECK_FALSE(writer.write(Bytes(too_long), read.load() + ahead));
  REQUIRE(writer.write(Bytes(8), read.load()));
  for (size_t at = 0; at < data.size(); at += 8) std::memset(data.data() + at, 0x7f, 8);  // every length is now absurd
  CHECK_FALSE(reader.next([](BytesView) {}));
  CHECK(reader.broken());
}
