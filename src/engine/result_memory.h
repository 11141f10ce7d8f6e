// Memory for results that the engine allocates: those of allgather and alltoall, whose size nobody knows before.
//
// Touching new memory can take longer than moving the data. So the largest are made of huge pages where the system
// gives them, and blocks that were freed are kept for the next results: a training loop asks for the same sizes again
// and again. Those beyond what this process may have for itself are only *lent*: the kernel takes their pages when it
// needs memory (MADV_FREE), and until then they are as good as the others.
#ifndef HOROVOD_ENGINE_RESULT_MEMORY_H_
#define HOROVOD_ENGINE_RESULT_MEMORY_H_

#include <cstddef>
#include <memory>

namespace hvd {

// How much is kept at most, in a process, and how much more is lent to the kernel.
inline constexpr size_t kMostKeptBytes = size_t{48} << 20;
inline constexpr size_t kMostLentBytes = size_t{256} << 20;

// Aligned to a cache line, not zeroed; null if there is none. Also of 0 bytes.
void* allocate_result(size_t bytes) noexcept;
// Also of null. From any thread, also in a forked child.
void free_result(void* memory) noexcept;
// Gives back to the system what is kept.
void release_kept_results() noexcept;

struct KeptBytes {  // without those of less than 64 KiB, of which there is a MiB at most
  size_t own, lent;
};
KeptBytes kept_results() noexcept;

struct FreeResult {
  void operator()(void* memory) const { free_result(memory); }
};
using ResultMemory = std::unique_ptr<void, FreeResult>;

}  // namespace hvd
#endif  // HOROVOD_ENGINE_RESULT_MEMORY_H_
