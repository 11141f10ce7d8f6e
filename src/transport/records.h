// A control connection to another host: whole records, in order, in both directions; encrypted where libssl is found.
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
#include "transport/wire.h"

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
  // Duplicates the descriptor. `who`: the other end, for messages. Throws SystemError.
  Records(const Connected& connected, const std::string& who, Counters& counters);

  void send(std::span<const std::byte> record);
  // The next record that has come, valid until the next call; false if there is none. Throws BadFrame.
  bool next(std::span<const std::byte>& record) { return cutter_.next(record); }

  // Move what the socket takes or has. True if anything moved. Throw BadFrame.
  bool write();
  bool read();
  bool has_output() const { return (written_ < output_.size() || wire_.has_output()) && !lost_; }
  // Says that nothing more will come from here, as soon as what was sent is out.
  void end_writing();

  // The connection is not to be used any more.
  void lose() { lost_ = true; }
  bool lost() const { return lost_; }
  const Wire& wire() const { return wire_; }

 private:
  Wire wire_;
  Counters& counters_;
  std::vector<std::byte> output_;
  size_t written_ = 0;
  RecordCutter cutter_;
  std::vector<std::byte> staging_;
  bool lost_ = false;    // nothing more comes, and all that came has been read
  bool ending_ = false;  // nothing more is to be sent
  bool ended_ = false;   // and the other end is told so
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_RECORDS_H_
