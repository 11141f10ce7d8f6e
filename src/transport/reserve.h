// Memory of a memfd, made sure of now: as an error here rather than as SIGBUS at its first use.
#ifndef HOROVOD_TRANSPORT_RESERVE_H_
#define HOROVOD_TRANSPORT_RESERVE_H_

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace hvd {

// Returns 0 or the error. In pieces, because a signal interrupts it and it then begins anew: a profiler's signals could
// otherwise keep a large one from ever ending.
inline int reserve(int fd, size_t offset, size_t bytes) {
  constexpr size_t kPiece = size_t{16} << 20;
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(kPiece, bytes - done);
    const int code = posix_fallocate(fd, static_cast<off_t>(offset + done), static_cast<off_t>(piece));
    if (code == EINTR) continue;
    if (code != 0) return code;
    done += piece;
  }
  return 0;
}

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_RESERVE_H_
