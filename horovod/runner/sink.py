"""Writing to a launcher stream that may be slow or gone.

The stream is shared with other processes, so it can't be made non-blocking; a thread does the blocking writes, and
the job's loop goes on watching workers and signals whatever the reader does. What is queued is bounded: when a sink
is full, the loop stops reading the workers' output, and they wait as they would for any slow pipe. A reader that has
gone (`horovodrun ... | head`) is not an error: what follows is thrown away, and the job goes on. It also goes on if the
disk is full; what finds no room is lost, and that is to be told.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable

QUEUE_BYTES = 4 << 20
WRITE_BYTES = 64 << 10


class Sink:
    """A queue of bytes for one file descriptor, written by a thread of its own.

    Attributes:
        loss: Why something could not be written, though nobody has gone; `wake` is called when it is set.
    """

    def __init__(self, fd: int, wake: Callable[[], None]) -> None:
        """Write to `fd`; `wake` is called from the thread once a full or awaited queue has emptied."""
        self.loss = ""
        self._fd = fd
        self._wake = wake
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._gone = False
        self._awaited = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Queue bytes; never blocks."""
        with self._changed:
            if self._gone or not data:
                return
            self._chunks.append(data)
            self._size += len(data)
            self._changed.notify()
        if self._thread is None:  # Not before it is needed: the workers are forked while there is one thread.
            self._thread = threading.Thread(target=self._write_all, name=f"sink-{self._fd}", daemon=True)
            self._thread.start()

    def is_full(self) -> bool:
        """Whether to queue no more for now; `wake` is called when there is room again."""
        with self._changed:
            self._awaited = self._awaited or self._size > QUEUE_BYTES
            return self._size > QUEUE_BYTES

    def is_empty(self) -> bool:
        """Whether all has been written (or the reader has gone); otherwise `wake` is called when it has."""
        with self._changed:
            self._awaited = self._size > 0
            return self._size == 0

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._chunks:
                    self._changed.wait()
                batch = [self._chunks.popleft()]
                size = len(batch[0])
                while self._chunks and size < WRITE_BYTES:
                    batch.append(self._chunks.popleft())
                    size += len(batch[-1])
            written = self._write_one(memoryview(b"".join(batch)))
            with self._changed:
                self._size -= size
                if not written:
                    self._gone = True
                    self._chunks.clear()
                    self._size = 0
                wanted = self._awaited and self._size == 0
                if wanted:
                    self._awaited = False
            if wanted:
                self._wake()

    def _write_one(self, data: memoryview) -> bool:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # Somebody else made the stream non-blocking.
                _wait_until_writable(self._fd)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    return False
                self.loss = error.strerror or str(error)
                self._wake()
                return True  # There may be room again for what comes later.
        return True


def _wait_until_writable(fd: int) -> None:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
