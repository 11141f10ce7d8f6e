// The shared-memory segment of one host and one generation.
//
// One sealed memfd holds everything that the ranks of a host share. It has no name, so nothing can be left behind, and
// it is not bound by the size of /dev/shm. What is in it, in this order:
//
//   header            written once by local rank 0 before anyone else maps the segment
//   rank lines        per local rank: its state, doorbell and log cursor
//   departures        per rank of the job: what local rank 0 has heard of those on other hosts that are gone
//   sequences         per local rank: how much of each sequence it has submitted (see engine/sequences.h)
//   slots             per cached name id: who has submitted it (see engine/coordinator.h)
//   ready ring        ids that are complete on this host, in the order in which they became so
//   request rings     per local rank: full requests on their way to the coordinator
//   log               what the coordinator decided, read by every rank
//   tray heads        per local rank: flags and tiny letters of standing orders (see transport/trays.h)
//   channels          per lane: flags and chunk buffers of the collectives (see transport/channel.h)
//   trays             per standing order: the larger letters
//
// Rules that keep it safe:
//   - Every word that two ranks touch is a Flag: a lock-free atomic, accessed with sequential consistency. (Waking
//     relies on it: see transport/doorbell.h.) Payload is written before the flag that announces it and read after.
//   - A line has one writer, except slots and doorbells, whose words are only changed by read-modify-write.
//   - A generation never reuses a segment: a stopped process that continues can't reach the ranks of the next one.
#ifndef HOROVOD_TRANSPORT_SEGMENT_H_
#define HOROVOD_TRANSPORT_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace hvd {

inline constexpr size_t kLine = 128;  // two cache lines: the adjacent-line prefetcher pairs them
inline constexpr size_t kPage = 4096;

using Flag = std::atomic<uint64_t>;
static_assert(Flag::is_always_lock_free && sizeof(Flag) == 8);

// RankLine::state
enum RankState : uint64_t {
  kAbsent = 0,
  kAlive = 1,
  kDeparted = 2,  // shut down in order; everything it owed to operations that it completed is in the segment
  kBroken = 3,    // gave up because of RankLine::cause
  // Never said by a rank itself:
  kEnded = 4,   // its process has ended, or its connection
  kSilent = 5,  // it has shown no heartbeat
};

struct RankLine {
  // Written by the rank.
  alignas(kLine) Flag state;
  Flag cause;  // rank
  Flag heartbeat;
  alignas(kLine) Flag log_read;  // bytes of the log that this rank has applied
  // See transport/doorbell.h.
  alignas(kLine) Flag armed;
};

// What is known of a rank on another host that is gone. Written by local rank 0; `state` last.
struct Departure {
  Flag state;  // kAbsent while it is there; kDeparted or kBroken if it said so; else kEnded or kSilent
  Flag cause;  // rank; of kBroken
};

// Who has submitted a cached name. Counters only grow until the coordinator recycles the id.
struct Slot {
  Flag arrived;    // submissions so far; a round is complete at each multiple of the number of members
  Flag wanted;     // the newest round that a rank waits for
  Flag present[];  // a bit per local rank that toggles with each of its submissions
};

// How far a rank is in one sequence: its number in the high bits, a count of submissions in the low ones.
struct SequenceWords {
  Flag submitted;
  Flag wanted;  // the first submission that a thread of the rank waits for and that has not been run, counted from 1
};

struct ReadyCell {
  Flag sequence;  // ticket + 1 once the cell is filled
  uint64_t id;
};

// The mailbox of the rank that speaks for the host, besides the request rings.
struct CoordinatorLine {
  alignas(kLine) Flag ready_tail;   // tickets given out
  alignas(kLine) Flag wake_ticket;  // filling this ticket or a later one is worth waking the coordinator
  Flag want_epoch;                  // grows when a rank begins to wait for a name that was already complete
  alignas(kLine) Flag departures;   // how many ranks of other hosts are gone
};

// A ring of bytes with one writer; positions grow for ever and are taken modulo the size.
struct ByteRingLines {
  alignas(kLine) Flag written;
  alignas(kLine) Flag read;  // request rings; the log has one in every RankLine instead
};

// The cores that this process may run on.
int available_cores();

class Segment {
 public:
  static constexpr size_t kRequestRingBytes = 128 << 10;
  static constexpr size_t kLogBytes = 256 << 10;
  static constexpr int kMaxSets = 256;
  // A lane for each process set, and one for each standing order that needs one (engine/standing_orders.h).
  static constexpr int kOrderLanes = 16;
  static constexpr int kLanes = kMaxSets + kOrderLanes;
  static constexpr int kMaxSequences = 16;

  // Returns the descriptor of a new, formatted and sealed segment. Throws SystemError.
  static int create(int local_size, int size, int cache_capacity, uint64_t generation, uint64_t nonce,
                    int cores = available_cores());
  // Maps a segment; the descriptor stays the caller's. Throws SystemError, or InvalidError if it is not a segment of
  // this version.
  static std::shared_ptr<Segment> map(int fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint64_t generation() const;
  uint64_t nonce() const;
  int local_size() const { return local_size_; }
  int size() const { return size_; }
  int cache_capacity() const { return cache_capacity_; }
  // Whether the host has more ranks than cores, as local rank 0 saw it: the same answer for everyone.
  bool crowded() const;

  RankLine& rank(int local_rank) const;
  Departure& departure(int of_rank) const;
  // The words of a local rank in the sequence that has this place; only the rank itself writes there.
  SequenceWords& sequence(int place, int local_rank) const;
  // When all members have submitted so much of that sequence, the coordinator is worth waking. It and who waits write.
  Flag& sequence_wake(int place) const;
  Slot& slot(int id) const;
  int present_words() const { return (local_size_ + 63) / 64; }
  CoordinatorLine& coordinator() const;
  ReadyCell& ready_cell(uint64_t ticket) const;
  ByteRingLines& request_lines(int local_rank) const;
  std::byte* request_bytes(int local_rank) const;
  ByteRingLines& log_lines() const;
  std::byte* log_bytes() const;
  // The part of a lane's channel that belongs to one local rank.
  std::byte* channel(int lane, int local_rank) const;
  // Makes sure that memory for that part exists, so that touching it can't raise SIGBUS. Returns 0, or why not (errno).
  [[nodiscard]] int reserve_channel(int lane, int local_rank) const;
  // The heads of a local rank's letters in all trays, and the first of its larger ones in one tray.
  std::byte* tray_heads(int local_rank) const;
  std::byte* tray(int tray, int local_rank) const;
  // Makes sure of memory for two letters of this many bytes there. False: there is none.
  bool reserve_tray(int tray, int local_rank, size_t bytes) const;
  int fd() const { return fd_; }

 private:
  struct Header;
  struct Layout;
  Segment(int fd, std::byte* base, size_t bytes);

  const int fd_;
  std::byte* base_;
  size_t bytes_;
  int local_size_, size_;
  int cache_capacity_;
  std::unique_ptr<Layout> layout_;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_SEGMENT_H_
