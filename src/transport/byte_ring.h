// Records in a ring of bytes in shared memory: one writer, one or several readers at their own pace.
//
// A record is a 64-bit length followed by that many bytes, padded to eight; a record never wraps: the rest of the ring
// is skipped by a length of kSkip. Positions are counts of bytes since the beginning.
//
// The writer fills a record and then stores `written`; a reader loads `written`, reads the record in place, and only
// then stores its own position, which gives the space back.
#ifndef HOROVOD_TRANSPORT_BYTE_RING_H_
#define HOROVOD_TRANSPORT_BYTE_RING_H_

#include <cstring>
#include <span>

#include "transport/segment.h"

namespace hvd {

inline constexpr uint64_t kSkip = ~uint64_t{0};

inline size_t record_bytes(size_t payload) { return 8 + (payload + 7) / 8 * 8; }

class RingWriter {
 public:
  RingWriter(Flag& written, std::byte* data, size_t size) : written_(written), data_(data), size_(size) {}

  // Appends a record unless it would overwrite what a reader at read_position still needs.
  bool write(std::span<const std::byte> payload, uint64_t read_position) {
    const size_t need = record_bytes(payload.size());
    const size_t to_end = size_ - position_ % size_;
    const size_t skip = need > to_end ? to_end : 0;
    // The first also keeps a reader that claims to be ahead from having a record written past the end.
    if (need > size_ || position_ + skip + need - read_position > size_) return false;
    if (skip != 0) {
      std::memcpy(data_ + position_ % size_, &kSkip, sizeof kSkip);
      position_ += skip;
    }
    std::byte* record = data_ + position_ % size_;
    const uint64_t length = payload.size();
    std::memcpy(record, &length, sizeof length);
    if (!payload.empty()) std::memcpy(record + 8, payload.data(), payload.size());
    position_ += need;
    written_.store(position_);
    return true;
  }

  uint64_t position() const { return position_; }

 private:
  Flag& written_;
  std::byte* data_;
  const size_t size_;
  uint64_t position_ = 0;
};

class RingReader {
 public:
  RingReader(const Flag& written, Flag& read, const std::byte* data, size_t size)
      : written_(written), read_(read), data_(data), size_(size) {}

  bool empty() const { return written_.load() == position_; }

  // Hands the next record to f, in place, then frees it. False if there is none, or if the writer's bytes make no
  // sense (then broken() is true for ever).
  template <typename F>
  bool next(F&& f) {
    const uint64_t written = written_.load();
    if (written == position_ || broken_) return false;
    uint64_t length = length_here();
    if (length == kSkip) {
      position_ += size_ - position_ % size_;
      length = written == position_ ? kSkip : length_here();
    }
    const size_t to_end = size_ - position_ % size_;
    if (length > size_ || record_bytes(length) > to_end || position_ + record_bytes(length) > written) {
      broken_ = true;
      return false;
    }
    f(std::span<const std::byte>(data_ + position_ % size_ + 8, length));
    position_ += record_bytes(length);
    read_.store(position_);
    return true;
  }

  bool broken() const { return broken_; }
  uint64_t position() const { return position_; }

 private:
  uint64_t length_here() const {
    uint64_t length;
    std::memcpy(&length, data_ + position_ % size_, sizeof length);
    return length;
  }

  const Flag& written_;
  Flag& read_;
  const std::byte* data_;
  const size_t size_;
  uint64_t position_ = 0;
  bool broken_ = false;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_BYTE_RING_H_
