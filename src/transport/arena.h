// Memory for hvd_alloc: pages of one sparse memfd per process, which the ranks of a host read from each other.
//
// It belongs to the process, not to an engine: tensors live in it, so neither shutdown nor a lost peer unmaps it. Whole
// pages are handed out, first fit; freed pages go back to the system at once. Peers map it read-only: nothing that a
// stopped or broken peer does can change it.
#ifndef HOROVOD_TRANSPORT_ARENA_H_
#define HOROVOD_TRANSPORT_ARENA_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

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

 private:
  Arena();

  int fd_ = -1;
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> used_;  // offset to bytes
};

// The arenas of the ranks of this host, as an engine sees them. Used by the driver alone.
class PeerArenas {
 public:
  // By local rank; -1 where a rank has none to share. Duplicates the descriptors. Null: nobody shares. Throws
  // SystemError.
  PeerArenas(const int* fds, int local_size, int me);
  ~PeerArenas();
  PeerArenas(const PeerArenas&) = delete;
  PeerArenas& operator=(const PeerArenas&) = delete;

  // Where a range of ours lies for the others, or nothing: it is not in our arena, or these peers' can't be read here.
  std::optional<size_t> offset_of(const void* pointer, size_t bytes, const std::vector<int>& peers);
  // A peer's range, or null if that peer has no such range. Only after offset_of() has answered for this peer.
  const std::byte* at(int peer, size_t offset, size_t bytes) const;

  const std::vector<int>& descriptors() const { return fds_; }

 private:
  struct Mapping {
    const std::byte* base = nullptr;
    size_t size = 0;
    bool tried = false;
  };
  bool map(int peer);

  const int me_;
  std::vector<int> fds_;
  std::vector<Mapping> mappings_;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_ARENA_H_
