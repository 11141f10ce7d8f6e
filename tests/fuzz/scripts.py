"""What a target does step by step: read from the input, at a time of its own."""

import math
import struct
import time


class Clock:
    """The time that everything here sees from now on."""

    def __init__(self) -> None:
        self.now = 1000.0
        time.monotonic = lambda: self.now


CLOCK = Clock()


class Script:
    """The input, read from its beginning; after its end come zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def pick(self, count: int) -> int:
        """One of so many."""
        return int.from_bytes(self.take(1), "big") % count

    def number(self, usual: int, bits: int = 32) -> int:
        """Mostly what makes sense, sometimes anything."""
        return usual if self.pick(16) != 15 else int.from_bytes(self.take(bits // 8), "big")

    def seconds(self, usual: float) -> float:
        """As `number`; not a number that is no time."""
        if self.pick(16) != 15:
            return usual
        value: float = abs(struct.unpack(">d", self.take(8).ljust(8, b"\0"))[0])
        return value if math.isfinite(value) else usual
