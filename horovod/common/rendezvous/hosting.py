"""The rendezvous server in a thread: of rank 0's process where there is no launcher, or of a test."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from horovod.common.rendezvous.loop import READ
from horovod.common.rendezvous.server import RendezvousServer

# How long the others may take to hear the end of the last attempt.
_DRAIN_SECONDS = 5.0
THREAD_NAME = "horovod-rendezvous"


@contextlib.contextmanager
def serving(server: RendezvousServer) -> Iterator[None]:
    """Serves for the time of a block, and until everyone has heard how the last attempt ended; then closes it."""
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    stop_at: list[float] = []

    def on_wake(_events: int) -> None:
        os.eventfd_read(wake)
        server.give_up("init: rank 0, who serves the rendezvous, gave up.")
        stop_at.append(time.monotonic() + _DRAIN_SECONDS)

    def serve() -> None:
        while not stop_at or (time.monotonic() < stop_at[0] and not server.is_idle()):
            server.step(stop_at[0] if stop_at else None)

    server.loop.watch(wake, READ, on_wake)
    thread = threading.Thread(target=serve, name=THREAD_NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(wake, 1)
        thread.join()
        server.close()
        os.close(wake)
