#include "transport/segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <string>

#include "transport/channel.h"
#include "transport/errors.h"
#include "transport/reserve.h"
#include "transport/trays.h"

namespace hvd {
namespace {

constexpr uint64_t kMagic = 0x31444F564F524F48;  // "HOROVOD1"
constexpr uint64_t kVersion = 6;

constexpr size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Of one rank's words in all sequences.
constexpr size_t kSequenceStride = round_up(Segment::kMaxSequences * sizeof(SequenceWords), kLine);

template <typename T>
T& at(std::byte* base, size_t offset) {
  return *reinterpret_cast<T*>(base + offset);
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

struct Segment::Header {
  uint64_t magic, version, generation, nonce, local_size, size, cache_capacity, cores;
};

struct Segment::Layout {
  size_t ranks, departures, sequences, sequence_wakes, slots, slot_stride, coordinator, ready, ready_cells, requests,
      request_stride, log, tray_heads, channels, channel_stride, trays, tray_stride, total;

  Layout(int local_size, int size, int cache_capacity) {
    const auto n = static_cast<size_t>(local_size);
    const auto capacity = static_cast<size_t>(cache_capacity);
    size_t end = kPage;
    const auto place = [&end](size_t bytes, size_t align) {
      const size_t begin = round_up(end, align);
      end = begin + bytes;
      return begin;
    };
    ranks = place(n * sizeof(RankLine), kLine);
    departures = place(static_cast<size_t>(size) * sizeof(Departure), kLine);
    sequences = place(n * kSequenceStride, kLine);
    sequence_wakes = place(kMaxSequences * sizeof(Flag), kLine);
    slot_stride = round_up(sizeof(Slot) + (n + 63) / 64 * sizeof(Flag), 64);
    slots = place(capacity * slot_stride, kLine);
    coordinator = place(sizeof(CoordinatorLine), kLine);
    // Each id is in the ring at most twice, once of them from before it was withdrawn, so this never overflows.
    ready_cells = std::bit_ceil(std::max<size_t>(2 * capacity, 1));
    ready = place(ready_cells * sizeof(ReadyCell), kLine);
    request_stride = sizeof(ByteRingLines) + kRequestRingBytes;
    requests = place(n * request_stride, kLine);
    log = place(sizeof(ByteRingLines) + kLogBytes, kLine);
    tray_heads = place(n * Trays::kHeadBytesPerRank, kPage);
    channels = round_up(end, kPage);
    channel_stride = Channel::kBytesPerRank * n;
    trays = channels + kLanes * channel_stride;
    tray_stride = Trays::kBytesPerRank * n;
    total = trays + Trays::kTrays * tray_stride;
  }
};

int Segment::create(int local_size, int size, int cache_capacity, uint64_t generation, uint64_t nonce, int cores) {
  if (local_size < 1) throw InvalidError("a segment needs at least one rank, not " + std::to_string(local_size));
  if (size < local_size) {
    throw InvalidError(std::to_string(local_size) + " ranks on one host of a job of " + std::to_string(size));
  }
  if (cache_capacity < 0) throw InvalidError("the cache capacity can't be negative: " + std::to_string(cache_capacity));
  const Layout layout(local_size, size, cache_capacity);
  const int fd = memfd_create("horovod", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw SystemError("can't create the shared-memory segment (memfd_create)");
  try {
    if (ftruncate(fd, static_cast<off_t>(layout.total)) != 0) {
      throw SystemError("can't size the shared-memory segment to " + std::to_string(layout.total) + " bytes");
    }
    // Reserve what every job uses. The file is otherwise sparse: the channels of unused lanes and unused trays cost
    // nothing.
    if (const int code = reserve(fd, 0, layout.channels); code != 0) {
      throw SystemError("no memory for the shared-memory segment of " + std::to_string(layout.channels) + " bytes",
                        code);
    }
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) throw SystemError("can't map the shared-memory segment");
    Header& header = *static_cast<Header*>(page);
    header.magic = kMagic;
    header.version = kVersion;
    header.generation = generation;
    header.nonce = nonce;
    header.local_size = static_cast<uint64_t>(local_size);
    header.size = static_cast<uint64_t>(size);
    header.cache_capacity = static_cast<uint64_t>(cache_capacity);
    header.cores = static_cast<uint64_t>(cores);
    munmap(page, kPage);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw SystemError("can't seal the shared-memory segment");
    }
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

std::shared_ptr<Segment> Segment::map(int fd) {
  // A file that its owner could shrink would kill us by SIGBUS, so an unsealed one is refused.
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat status;
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &status) != 0 ||
      status.st_size < static_cast<off_t>(kPage)) {
    throw InvalidError("descriptor " + std::to_string(fd) + " is not a Horovod segment (not a sealed memfd)");
  }
  const auto bytes = static_cast<size_t>(status.st_size);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    throw SystemError("can't map the shared-memory segment of " + std::to_string(bytes) + " bytes");
  }
  // A forked child must not reach the segment: it would write into its parent's collectives.
  madvise(base, bytes, MADV_DONTFORK);
  madvise(base, bytes, MADV_DONTDUMP);
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) {
    SystemError error("can't keep the descriptor of the shared-memory segment");
    munmap(base, bytes);
    throw error;
  }
  return std::shared_ptr<Segment>(new Segment(copy, static_cast<std::byte*>(base), bytes));
}

Segment::Segment(int fd, std::byte* base, size_t bytes) : fd_(fd), base_(base), bytes_(bytes) {
  const auto& header = at<Header>(base_, 0);
  constexpr uint64_t kMost = 1 << 20;
  const bool ours = header.magic == kMagic && header.version == kVersion && header.local_size >= 1 &&
                    header.local_size <= header.size && header.size <= kMost && header.cache_capacity <= kMost;
  local_size_ = static_cast<int>(header.local_size);
  size_ = static_cast<int>(header.size);
  cache_capacity_ = static_cast<int>(header.cache_capacity);
  if (ours) layout_ = std::make_unique<Layout>(local_size_, size_, cache_capacity_);
  if (!ours || layout_->total != bytes) {
    munmap(base_, bytes_);
    close(fd_);
    throw InvalidError("the shared memory is not a Horovod segment of this version");
  }
}

Segment::~Segment() {
  munmap(base_, bytes_);
  close(fd_);
}

uint64_t Segment::generation() const { return at<Header>(base_, 0).generation; }
bool Segment::crowded() const { return at<Header>(base_, 0).cores < static_cast<uint64_t>(local_size_); }
uint64_t Segment::nonce() const { return at<Header>(base_, 0).nonce; }

RankLine& Segment::rank(int local_rank) const {
  return at<RankLine>(base_, layout_->ranks + static_cast<size_t>(local_rank) * sizeof(RankLine));
}
Departure& Segment::departure(int of_rank) const {
  return at<Departure>(base_, layout_->departures + static_cast<size_t>(of_rank) * sizeof(Departure));
}
SequenceWords& Segment::sequence(int place, int local_rank) const {
  return at<SequenceWords>(base_, layout_->sequences + static_cast<size_t>(local_rank) * kSequenceStride +
                                      static_cast<size_t>(place) * sizeof(SequenceWords));
}
Flag& Segment::sequence_wake(int place) const {
  return at<Flag>(base_, layout_->sequence_wakes + static_cast<size_t>(place) * sizeof(Flag));
}
Slot& Segment::slot(int id) const {
  return at<Slot>(base_, layout_->slots + static_cast<size_t>(id) * layout_->slot_stride);
}
CoordinatorLine& Segment::coordinator() const { return at<CoordinatorLine>(base_, layout_->coordinator); }
ReadyCell& Segment::ready_cell(uint64_t ticket) const {
  return at<ReadyCell>(base_, layout_->ready + (ticket & (layout_->ready_cells - 1)) * sizeof(ReadyCell));
}
ByteRingLines& Segment::request_lines(int local_rank) const {
  return at<ByteRingLines>(base_, layout_->requests + static_cast<size_t>(local_rank) * layout_->request_stride);
}
std::byte* Segment::request_bytes(int local_rank) const {
  return base_ + layout_->requests + static_cast<size_t>(local_rank) * layout_->request_stride + sizeof(ByteRingLines);
}
ByteRingLines& Segment::log_lines() const { return at<ByteRingLines>(base_, layout_->log); }
std::byte* Segment::log_bytes() const { return base_ + layout_->log + sizeof(ByteRingLines); }

std::byte* Segment::channel(int lane, int local_rank) const {
  return base_ + layout_->channels + static_cast<size_t>(lane) * layout_->channel_stride +
         static_cast<size_t>(local_rank) * Channel::kBytesPerRank;
}

int Segment::reserve_channel(int lane, int local_rank) const {
  return reserve(fd_, static_cast<size_t>(channel(lane, local_rank) - base_), Channel::kBytesPerRank);
}

std::byte* Segment::tray_heads(int local_rank) const {
  return base_ + layout_->tray_heads + static_cast<size_t>(local_rank) * Trays::kHeadBytesPerRank;
}

std::byte* Segment::tray(int tray, int local_rank) const {
  return base_ + layout_->trays + static_cast<size_t>(tray) * layout_->tray_stride +
         static_cast<size_t>(local_rank) * Trays::kBytesPerRank;
}

bool Segment::reserve_tray(int tray, int local_rank, size_t bytes) const {
  if (bytes <= Trays::kInlineBytes) return true;
  const auto offset = static_cast<size_t>(this->tray(tray, local_rank) - base_);
  return reserve(fd_, offset, bytes) == 0 && reserve(fd_, offset + Trays::kMostBytes, bytes) == 0;
}

}  // namespace hvd
