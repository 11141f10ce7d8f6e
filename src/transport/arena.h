// Memory for hvd_alloc: pages of one sparse memfd per process, which the ranks of a host can map.
//
// It belongs to the process, not to an engine: tensors live in it, so neither shutdown nor a lost peer unmaps it. Whole
// pages are handed out, first fit; freed pages go back to the system at once.
#ifndef HOROVOD_TRANSPORT_ARENA_H_
#define HOROVOD_TRANSPORT_ARENA_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace hvd {

class Arena {
 public:
  // The one of this process, made at its first use. Throws SystemError.
  static Arena& of_process();

  // Throws SystemError if there is no memory.
  void* allocate(size_t bytes);
  void free(void* pointer);

  // Where a range lies in the arena, or nothing if it is not inside one allocation.
  std::optional<size_t> offset_of(const void* pointer, size_t bytes) const;
  int fd() const { return fd_; }
  size_t size() const { return size_; }
  size_t allocated() const;

 private:
  Arena();

  int fd_ = -1;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> used_;  // offset to bytes
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_ARENA_H_
