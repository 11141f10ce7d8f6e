#include "engine/result_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace hvd {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = size_t{4} << 10;
constexpr size_t kMappedBytes = size_t{64} << 10;  // less comes from malloc
constexpr size_t kHugeBytes = 2 * kHugePage;
constexpr size_t kMostBlocks = 64;  // they are searched one by one
constexpr size_t kAlign = 64;
#ifdef __SANITIZE_ADDRESS__
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Lies before the memory that is handed out.
struct alignas(kAlign) Block {
  size_t mapped;       // bytes, this header included; 0: from malloc
  int size_class = 0;  // of those: it has 2 to the power of this many bytes
};

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

Block* map_block(size_t bytes) {
  const bool huge = bytes >= kHugeBytes;
  const size_t unit = huge ? kHugePage : kPage;
  bytes = round_up(bytes, unit);
  const size_t room = bytes + unit - kPage;  // so that a block of whole units fits into it
  void* const base = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(base);
  auto* const aligned =
      begin + (round_up(reinterpret_cast<uintptr_t>(begin), unit) - reinterpret_cast<uintptr_t>(begin));
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  if (const size_t rest = static_cast<size_t>(begin + room - (aligned + bytes)); rest > 0)
    munmap(aligned + bytes, rest);
  if (huge) (void)madvise(aligned, bytes, MADV_HUGEPAGE);  // a wish
  return new (aligned) Block{bytes};
}

// Blocks that were freed, the oldest first: those that are lent come before those that are our own. Never destroyed:
// results may be freed after everything else.
class Kept {
 public:
  // The smallest that is large enough, unless that would waste half of it.
  Block* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    size_t best = blocks_.size();
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const size_t mapped = blocks_[i].mapped;
      if (mapped >= bytes && mapped / 2 <= bytes && (best == blocks_.size() || mapped < blocks_[best].mapped)) best = i;
    }
    if (best == blocks_.size()) return nullptr;
    const Mapping block = remove(best);
    return new (block.memory) Block{block.mapped};
  }

  // False: it can't be kept.
  bool put(Block* block) {
    // In a forked child the lock may be held for ever, by a thread that is not there.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || block->mapped > kMostLentBytes) return false;
    try {
      blocks_.push_back({block, block->mapped});
    } catch (const std::bad_alloc&) {
      return false;
    }
    own_ += block->mapped;
    while (own_ > kMostKeptBytes) lend_oldest();
    while (blocks_.size() > kMostBlocks || lent_ > kMostLentBytes) drop_oldest();
    return true;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    while (!blocks_.empty()) drop_oldest();
  }

  KeptBytes bytes() {
    const std::lock_guard lock(mutex_);
    return {own_, lent_};
  }

 private:
  struct Mapping {
    void* memory;
    size_t mapped;  // here too: of a block that is lent the kernel may have taken the header
  };

  void lend_oldest() {
    const Mapping block = blocks_[n_lent_];
    own_ -= block.mapped;
    if (madvise(block.memory, block.mapped, MADV_FREE) == 0) {
      lent_ += block.mapped;
      ++n_lent_;
    } else {
      blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(n_lent_));
      munmap(block.memory, block.mapped);
    }
  }

  void drop_oldest() {
    const Mapping oldest = remove(0);
    munmap(oldest.memory, oldest.mapped);
  }

  Mapping remove(size_t index) {
    const Mapping block = blocks_[index];
    blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(index));
    if (index < n_lent_) {
      --n_lent_;
      lent_ -= block.mapped;
    } else {
      own_ -= block.mapped;
    }
    return block;
  }

  std::mutex mutex_;
  std::vector<Mapping> blocks_;
  size_t n_lent_ = 0;  // how many of them are
  size_t own_ = 0, lent_ = 0;
};

// A few small blocks of each size that were freed: malloc and free had an eighth of the samples of a small alltoall.
class KeptSmall {
 public:
  Block* take(int size_class) {
    const std::unique_lock lock(mutex_, std::try_to_lock);  // as in Kept::put
    Shelf& shelf = shelf_of(size_class);
    return lock && shelf.count > 0 ? shelf.blocks[--shelf.count] : nullptr;
  }

  bool put(Block* block) {
    if (kSanitized) return false;  // so that its use after this is found
    const std::unique_lock lock(mutex_, std::try_to_lock);
    Shelf& shelf = shelf_of(block->size_class);
    if (!lock || shelf.count == kMost) return false;
    shelf.blocks[shelf.count++] = block;
    return true;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    for (Shelf& shelf : shelves_) {
      while (shelf.count > 0) std::free(shelf.blocks[--shelf.count]);
    }
  }

  static constexpr int kLeastClass = 8, kMostClass = 16;
  static_assert(size_t{1} << kMostClass == kMappedBytes);

 private:
  static constexpr size_t kMost = 8;
  struct Shelf {
    std::array<Block*, kMost> blocks = {};
    size_t count = 0;
  };
  Shelf& shelf_of(int size_class) { return shelves_[static_cast<size_t>(size_class - kLeastClass)]; }

  std::mutex mutex_;
  std::array<Shelf, kMostClass - kLeastClass + 1> shelves_;
};

KeptSmall& kept_small() {
  static KeptSmall& instance = *new KeptSmall;
  return instance;
}

Block* small_block(size_t bytes) {
  const int size_class = std::max(static_cast<int>(std::bit_width(bytes - 1)), KeptSmall::kLeastClass);
  if (Block* const block = kept_small().take(size_class)) return block;
  void* const memory = std::aligned_alloc(kAlign, size_t{1} << size_class);
  return memory == nullptr ? nullptr : new (memory) Block{0, size_class};
}

Kept& kept() {
  static Kept& instance = *new Kept;
  return instance;
}

}  // namespace

void* allocate_result(size_t bytes) noexcept {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t needed = bytes + sizeof(Block);
  Block* block = nullptr;
  if (needed < kMappedBytes) {
    block = small_block(needed);
  } else {
    block = kept().take(needed);
    if (block == nullptr) block = map_block(needed);
  }
  return block == nullptr ? nullptr : block + 1;
}

void free_result(void* memory) noexcept {
  if (memory == nullptr) return;
  Block* const block = static_cast<Block*>(memory) - 1;
  if (block->mapped == 0) {
    if (!kept_small().put(block)) std::free(block);
  } else if (!kept().put(block)) {
    munmap(block, block->mapped);
  }
}

void release_kept_results() noexcept {
  kept_small().clear();
  kept().clear();
}
KeptBytes kept_results() noexcept { return kept().bytes(); }

}  // namespace hvd
