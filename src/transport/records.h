// A control connection to another host: whole records, in order, in both directions.
//
// A record is a 32-bit length and that many bytes. Records wait in memory until the socket takes them. Used by the
// driver alone.
#ifndef HOROVOD_TRANSPORT_RECORDS_H_
#define HOROVOD_TRANSPORT_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/counters.h"

namespace hvd {

// Cuts a stream of bytes into records.
class RecordCutter {
 public:
  static constexpr uint32_t kMostBytes = 16 << 20;

  void add(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  // The next whole record, valid until the next call; false if there is none yet. Throws BadFrame.
  bool next(std::span<const std::byte>& record);

 private:
  std::vector<std::byte> bytes_;
  size_t begin_ = 0;
};

class Records {
 public:
  // Duplicates the descriptor. Throws SystemError.
  Records(int fd, Counters& counters);
  ~Records();
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  void send(std::span<const std::byte> record);
  // The next record that has come, valid until the next call; false if there is none. Throws BadFrame.
  bool next(std::span<const std::byte>& record) { return cutter_.next(record); }

  // Move what the socket takes or has. True if anything moved.
  bool write();
  bool read();
  bool has_output() const { return written_ < output_.size() && !lost_; }
  // Says that nothing more will come from here, as soon as what was sent is out.
  void end_writing();

  bool lost() const { return lost_; }
  int fd() const { return fd_; }

 private:
  const int fd_;
  Counters& counters_;
  std::vector<std::byte> output_;
  size_t written_ = 0;
  RecordCutter cutter_;
  std::vector<std::byte> staging_;
  bool lost_ = false;    // nothing more comes, and all that came has been read
  bool ending_ = false;  // nothing more is to be sent
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_RECORDS_H_
