"""Noticing that the other side of a connection is gone without a word.

Both sides say ALIVE several times within the time limit. Silence is counted only while we run ourselves: a process
that was stopped, or whose machine slept, has not listened.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod.common.rendezvous.loop import Loop, Timer

_BEATS = 10  # Within the time limit.


class Heartbeat:
    """Beats, and hears whether the other side does."""

    def __init__(
        self, loop: Loop, limit: float, beat: Callable[[], object], on_silence: Callable[[float], object]
    ) -> None:
        """Begins.

        Args:
            loop: Whose clock is used.
            limit: How many seconds of silence are too many.
            beat: Says something to the other side.
            on_silence: Called once, with the limit, when they have passed.
        """
        self._loop, self._limit, self._beat, self._on_silence = loop, limit, beat, on_silence
        self._interval = limit / _BEATS
        self._silent = 0.0
        self._last = time.monotonic()
        self._timer: Timer | None = None
        self._tick()

    def heard(self) -> None:
        """The other side lives."""
        self._silent = 0.0

    def stop(self) -> None:
        """Beats no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now = time.monotonic()
        self._silent += min(now - self._last, 2 * self._interval)
        self._last = now
        if self._silent >= self._limit:
            self._on_silence(self._limit)
            return
        self._beat()
        self._timer = self._loop.at(now + self._interval, self._tick)
