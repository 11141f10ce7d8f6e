#include "transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "transport/errors.h"
#include "transport/reserve.h"
#include "transport/segment.h"

namespace hvd {
namespace {

size_t pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

}  // namespace

Arena& Arena::of_process() {
  static Arena* const arena = new Arena();  // never destroyed: tensors may outlive everything
  return *arena;
}

Arena::Arena() {
  // Address space, not memory: as much as the machine has, but so that the arenas of many ranks can be mapped by all.
  constexpr size_t kMost = size_t{256} << 30;
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_ = pages(std::min(memory, kMost));
  fd_ = memfd_create("horovod-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) throw SystemError("can't create shared pages (memfd_create)");
  if (ftruncate(fd_, static_cast<off_t>(size_)) != 0 ||
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    SystemError error("can't size the shared pages");
    close(fd_);
    throw error;
  }
  void* base = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (base == MAP_FAILED) {
    SystemError error("can't map the shared pages");
    close(fd_);
    throw error;
  }
  madvise(base, size_, MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(base);
}

void* Arena::allocate(size_t bytes) {
  if (bytes > size_) throw SystemError("no shared pages for " + std::to_string(bytes) + " bytes", ENOMEM);
  const size_t need = pages(bytes);
  const std::lock_guard lock(mutex_);
  size_t begin = 0;
  for (const auto& [offset, length] : used_) {
    if (offset - begin >= need) break;
    begin = offset + length;
  }
  if (size_ - begin < need) throw SystemError("no shared pages for " + std::to_string(bytes) + " bytes", ENOMEM);
  // Now, as an error, rather than later, as SIGBUS.
  if (const int code = reserve(fd_, begin, need); code != 0) {
    throw SystemError("no memory for " + std::to_string(bytes) + " bytes of shared pages", code);
  }
  used_[begin] = need;
  return base_ + begin;
}

void Arena::free(void* pointer) {
  if (pointer == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(static_cast<std::byte*>(pointer) - base_));
  if (found == used_.end()) return;
  (void)!fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(found->first),
                   static_cast<off_t>(found->second));
  used_.erase(found);
}

std::optional<size_t> Arena::offset_of(const void* pointer, size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(pointer);
  if (first < base_ || first >= base_ + size_) return std::nullopt;
  const auto offset = static_cast<size_t>(first - base_);
  const std::lock_guard lock(mutex_);
  auto found = used_.upper_bound(offset);
  if (found == used_.begin()) return std::nullopt;
  --found;
  if (offset + bytes > found->first + found->second) return std::nullopt;
  return offset;
}

PeerArenas::PeerArenas(const int* fds, int local_size, int me) : me_(me) {
  mappings_.resize(static_cast<size_t>(local_size));
  fds_.assign(static_cast<size_t>(local_size), -1);
  for (int r = 0; fds != nullptr && r < local_size; ++r) {
    if (r == me_ || fds[r] < 0) continue;
    fds_[static_cast<size_t>(r)] = fcntl(fds[r], F_DUPFD_CLOEXEC, 3);
    if (fds_[static_cast<size_t>(r)] >= 0) continue;
    SystemError error("can't keep the shared pages of local rank " + std::to_string(r));
    for (const int fd : fds_) {
      if (fd >= 0) close(fd);
    }
    throw error;
  }
}

PeerArenas::~PeerArenas() {
  for (const Mapping& mapping : mappings_) {
    if (mapping.base != nullptr) munmap(const_cast<std::byte*>(mapping.base), mapping.size);
  }
  for (const int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

std::optional<size_t> PeerArenas::offset_of(const void* pointer, size_t bytes, const std::vector<int>& peers) {
  for (const int peer : peers) {
    if (peer != me_ && !map(peer)) return std::nullopt;
  }
  return Arena::of_process().offset_of(pointer, bytes);
}

const std::byte* PeerArenas::at(int peer, size_t offset, size_t bytes) const {
  const Mapping& mapping = mappings_[static_cast<size_t>(peer)];
  if (mapping.base == nullptr || offset > mapping.size || bytes > mapping.size - offset) return nullptr;
  return mapping.base + offset;
}

// Maps a peer's arena at its first use: most jobs never need it.
bool PeerArenas::map(int peer) {
  Mapping& mapping = mappings_[static_cast<size_t>(peer)];
  if (mapping.tried) return mapping.base != nullptr;
  mapping.tried = true;
  const int fd = fds_[static_cast<size_t>(peer)];
  struct stat status;
  // As for the segment: what its owner could shrink would kill us by SIGBUS.
  if (fd < 0 || (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0 || fstat(fd, &status) != 0) return false;
  const auto size = static_cast<size_t>(status.st_size);
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) return false;
  madvise(base, size, MADV_DONTFORK);
  madvise(base, size, MADV_DONTDUMP);
  mapping.base = static_cast<const std::byte*>(base);
  mapping.size = size;
  return true;
}

}  // namespace hvd
