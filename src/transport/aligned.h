// Memory that sockets read into and write from, at the beginning of a page.
//
// Where it begins matters. Kernels copy by `rep movsb`, and on some processors (an AMD EPYC with avx2 and fsrm was
// measured) that takes twenty times as long where the target lies less than 32 bytes behind the source, modulo 4096. A
// kernel puts the bytes that it is to send into pages, one behind the other. If everything that is sent has a multiple
// of 64 bytes (see FrameHeader) they are at multiples of 64 there, and copying from and to memory at multiples of 64 is
// never that slow; nor, but for one payload in 64, with memory 16 bytes behind them, where malloc puts large blocks.
#ifndef HOROVOD_TRANSPORT_ALIGNED_H_
#define HOROVOD_TRANSPORT_ALIGNED_H_

#include <cstddef>
#include <memory>
#include <new>

#include "transport/segment.h"

namespace hvd {

struct DeleteAligned {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{kPage}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], DeleteAligned>;

// Not cleared.
inline AlignedBytes make_aligned(size_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kPage})));
}

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_ALIGNED_H_
