#include "transport/records.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/errors.h"

namespace hvd {

bool RecordCutter::next(std::span<const std::byte>& record) {
  uint32_t length = 0;
  if (begin_ == bytes_.size() || (begin_ > bytes_.size() / 2 && begin_ > (64 << 10))) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(begin_));
    begin_ = 0;
  }
  if (bytes_.size() - begin_ < sizeof length) return false;
  std::memcpy(&length, bytes_.data() + begin_, sizeof length);
  if (length == 0 || length > kMostBytes) throw BadFrame("a record of " + std::to_string(length) + " bytes");
  if (bytes_.size() - begin_ - sizeof length < length) return false;
  record = {bytes_.data() + begin_ + sizeof length, length};
  begin_ += sizeof length + length;
  return true;
}

Records::Records(const Connected& connected, const std::string& who, Counters& counters)
    : wire_(connected, who), counters_(counters), staging_(64 << 10) {}

void Records::send(std::span<const std::byte> record) {
  if (lost_ || ending_) return;
  counters_.control_records.add();
  const auto length = static_cast<uint32_t>(record.size());
  const auto* head = reinterpret_cast<const std::byte*>(&length);
  output_.insert(output_.end(), head, head + sizeof length);
  output_.insert(output_.end(), record.begin(), record.end());
}

bool Records::write() {
  bool moved = false;
  bool failed = false;
  while (has_output() && !failed) {
    iovec rest{output_.data() + written_, output_.size() - written_};
    const ssize_t n = rest.iov_len > 0 ? wire_.write(&rest, 1) : wire_.flush() ? 0 : -1;
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return moved;
      failed = true;
      continue;
    }
    moved = true;
    written_ += static_cast<size_t>(n);
    counters_.control_bytes.add(static_cast<uint64_t>(n));
  }
  output_.clear();
  written_ = 0;
  if (failed) {
    // What the other end had sent before still counts: read() comes to the end of it.
    wire_.cut();
    ending_ = ended_ = true;
  } else if (ending_ && !std::exchange(ended_, true)) {
    wire_.end_writing();
  }
  return moved;
}

bool Records::read() {
  bool moved = false;
  while (!lost_) {
    const ssize_t n = wire_.read(staging_.data(), staging_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return moved;
    moved = true;
    if (n <= 0) {
      lost_ = true;
      break;
    }
    cutter_.add({staging_.data(), static_cast<size_t>(n)});
    if (static_cast<size_t>(n) < staging_.size() && !wire_.has_input()) break;
  }
  return moved;
}

void Records::end_writing() {
  ending_ = true;
  (void)write();
}

}  // namespace hvd
