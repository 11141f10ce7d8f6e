"""One selector with callbacks and times. Every wait of a meeting runs in one of these, so that none can be deaf."""

import heapq
import itertools
import selectors
import time
from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
# The kernel takes no time that is longer than some weeks. Who waits longer looks again.
LONGEST_WAIT = 24 * 3600.0


class Timer:
    """A callback that is due at some time, unless it is cancelled."""

    def __init__(self, callback: Callable[[], object]) -> None:
        """Made by Loop.at."""
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Has it not be called any more."""
        self.callback = None


class Loop:
    """Watches descriptors and the clock. What a callback raises comes out of `step`."""

    def __init__(self) -> None:
        """Begins with nothing to watch."""
        self._selector = selectors.EpollSelector()
        self._callbacks: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def fileno(self) -> int:
        """A descriptor that is readable when one of the watched ones is ready: for a loop around this one."""
        return self._selector.fileno()

    def watch(self, fd: int, events: int, callback: Callable[[int], object]) -> None:
        """Calls back, with the events, whenever the descriptor is ready; in place of an earlier callback."""
        if fd in self._callbacks:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Watches a descriptor no more; to be called before it is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._selector.unregister(fd)

    def at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Calls back at a time of the monotonic clock."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def next_time(self) -> float | None:
        """When the next callback is due."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def step(self, deadline: float | None) -> None:
        """Waits for something to happen, at most until the deadline, and calls back."""
        times = [when for when in (deadline, self.next_time()) if when is not None]
        timeout = min(max(0.0, min(times) - time.monotonic()), LONGEST_WAIT) if times else None
        ready = [(key.fd, self._callbacks[key.fd], events) for key, events in self._selector.select(timeout)]
        for fd, callback, events in ready:
            if self._callbacks.get(fd) is callback:  # an earlier callback may have closed this one
                callback(events)
        now = time.monotonic()
        while (due := self.next_time()) is not None and due <= now:
            timer = heapq.heappop(self._timers)[2]
            assert timer.callback is not None
            timer.callback()

    def run_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Goes on until the condition holds; False if it did not before the deadline."""
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self.step(deadline)
        return True

    def close(self) -> None:
        """Closes the selector, not what it watched."""
        self._callbacks.clear()
        self._timers.clear()
        self._selector.close()
