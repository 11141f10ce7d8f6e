// What a rank's engine has done: see hvd_counters, which has the same fields in the same order.
#ifndef HOROVOD_TRANSPORT_COUNTERS_H_
#define HOROVOD_TRANSPORT_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace hvd {

struct Counter {
  void add(uint64_t n = 1) { value.fetch_add(n, std::memory_order_relaxed); }
  uint64_t get() const { return value.load(std::memory_order_relaxed); }
  std::atomic<uint64_t> value{0};
};

struct Counters {
  Counter requests_submitted, requests_by_bit, request_messages;
  Counter log_entries, batches, tensors, bytes_in, chunks, bytes_placed;
  Counter doorbells, sleeps, role_changes;
  Counter log_bytes, cache_evictions, stall_warnings;
  Counter net_bytes_out, net_payload_out, net_frames_out, control_bytes, control_records;
  Counter requests_standing, requests_in_sequence;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_COUNTERS_H_
