"""Numbers, texts and lists as bytes, and back with every length checked. Big-endian."""

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class ProtocolError(Exception):
    """What the other side said is not of this protocol, or the connection is of no use."""


class Writer:
    """Collects the bytes of a message."""

    def __init__(self) -> None:
        """Begins with none."""
        self._parts: list[bytes] = []

    def number(self, code: str, value: float) -> "Writer":
        """Adds a number; the code is one of the struct module."""
        self._parts.append(struct.pack(">" + code, value))
        return self

    def blob(self, value: bytes) -> "Writer":
        """Adds bytes, with their length."""
        self.number("I", len(value))
        self._parts.append(value)
        return self

    def text(self, value: str) -> "Writer":
        """Adds a text, with its length."""
        return self.blob(value.encode("utf-8", "replace"))

    def each(self, values: Sequence[_T], add: Callable[[_T], object]) -> "Writer":
        """Adds the number of values, and each of them."""
        self.number("I", len(values))
        for value in values:
            add(value)
        return self

    def numbers(self, code: str, values: Sequence[int]) -> "Writer":
        """Adds the number of values, and all of them."""
        self.number("I", len(values))
        self._parts.append(struct.pack(f">{len(values)}{code}", *values))
        return self

    def bytes(self) -> bytes:
        """All that was added."""
        return b"".join(self._parts)


class Reader:
    """Reads what a Writer wrote; whatever else it is given is a ProtocolError, at no more cost than its size."""

    def __init__(self, data: bytes) -> None:
        """Begins at the first byte."""
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ProtocolError(f"a message ends early: {size} more bytes expected at byte {self._at}")
        self._at += size
        return self._data[self._at - size : self._at]

    def integer(self, code: str) -> int:
        """Reads an integer."""
        value: int = struct.unpack(">" + code, self._take(struct.calcsize(">" + code)))[0]
        return value

    def real(self) -> float:
        """Reads a number that Writer.number wrote with the code d."""
        value: float = struct.unpack(">d", self._take(8))[0]
        return value

    def flag(self) -> bool:
        """Reads a number that is 0 or 1, written with the code B."""
        value = self.integer("B")
        if value > 1:
            raise ProtocolError(f"expected 0 or 1, got {value}")
        return value == 1

    def blob(self) -> bytes:
        """Reads bytes."""
        return self._take(self.integer("I"))

    def text(self) -> str:
        """Reads a text."""
        try:
            return self.blob().decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("a text is not UTF-8") from None

    def each(self, read: Callable[[], _T]) -> list[_T]:
        """Reads a list, each element by the given function, which must take at least a byte."""
        count = self.integer("I")
        if count > len(self._data) - self._at:
            raise ProtocolError(f"a list of {count} elements does not fit into its message")
        return [read() for _ in range(count)]

    def numbers(self, code: str) -> list[int]:
        """Reads a list of integers."""
        count = self.integer("I")
        size = count * struct.calcsize(">" + code)
        return list(struct.unpack(f">{count}{code}", self._take(size)))

    def end(self) -> None:
        """Checks that all was read."""
        if self._at != len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes follow the end of a message")
