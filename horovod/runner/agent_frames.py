"""What a launcher and the agent that it has on a host say to each other, over the two pipes of ssh.

    launcher                                 agent
                                        <--  MARK, HELLO      who it is, and its addresses
    PROBE     key and interfaces        -->
                                        <--  LISTENING        where the other hosts may try to reach it
    REACH     where the others listen   -->
                                        <--  REACHED          whom it has reached, and whom not; several times
    SERVE     at this address           -->                   only to the host of rank 0
                                        <--  SERVING          at this port
    PAYLOAD, START                      -->
                                        <--  STARTED          one for each worker
    SIGNAL, PAUSE                       -->
                                        <--  OUTPUT, CLOSED, ENDED, WORD
    END, KILL                           -->
                                        <--  DONE             nothing is left there

The part from PROBE to SERVING is for several hosts. At any time the agent may say TROUBLE, and both say ALIVE so often
that silence means that the other is gone. Whoever finds the connection closed ends what it has.

ssh has authenticated and encrypted all of it; the key of the job and the workers' environment take no other way. A
login shell may write whatever it likes before the agent's MARK. After that come frames: a kind, a length, and a body,
which is JSON but for OUTPUT, CLOSED and PAYLOAD.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.loop import READ, WRITE, Loop
from horovod.runner.crew import Stream

MARK = b"\0HOROVOD AGENT\0"
MAX_BODY = 64 << 20
PAYLOAD_BYTES = 1 << 20
# What a login shell wrote is kept, to be shown if no agent comes, but not all of it.
MAX_NOISE = 4 << 10
_HEADER = struct.Struct(">BI")
_SOURCE = struct.Struct(">IB")
_READ_BYTES = _WRITE_BYTES = 256 << 10


class Kind(enum.IntEnum):
    """What a frame is."""

    PROBE = 1
    REACH = 2
    SERVE = 3
    PAYLOAD = 4
    START = 5
    SIGNAL = 6
    PAUSE = 7
    END = 8
    KILL = 9
    ALIVE = 10
    HELLO = 32
    LISTENING = 33
    REACHED = 34
    SERVING = 35
    STARTED = 36
    OUTPUT = 37
    CLOSED = 38
    ENDED = 39
    WORD = 40
    TROUBLE = 41
    DONE = 42


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """Makes a frame."""
    return _HEADER.pack(kind, len(body)) + body


def encode_fields(**fields: Any) -> bytes:
    """Makes a body of JSON. Texts may hold bytes that are not UTF-8, as Python has them in an environment."""
    return json.dumps(fields).encode("ascii")


class Fields:
    """A body of JSON, read with every type checked."""

    def __init__(self, body: bytes) -> None:
        """Reads it.

        Raises:
            ProtocolError: It is something else.
        """
        try:
            self._fields = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError("a body is not JSON") from None
        if not isinstance(self._fields, dict):
            raise ProtocolError("a body is no JSON object")

    def get(self, name: str, kind: type) -> Any:
        """A field of a type.

        Raises:
            ProtocolError: There is none.
        """
        value = self._fields.get(name)
        if type(value) is not kind:
            raise ProtocolError(f"field {name}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        return _all_of(str, name, self.get(name, list))

    def text_map(self, name: str) -> dict[str, str]:
        """Texts by name."""
        values: dict[str, str] = self.get(name, dict)
        _all_of(str, name, list(values.values()))
        return values

    def rows(self, name: str, *kinds: type) -> list[tuple[Any, ...]]:
        """A list of lists, each with one value of every type."""
        rows = []
        for row in _all_of(list, name, self.get(name, list)):
            if [type(value) for value in row] != list(kinds):
                raise ProtocolError(f"field {name}: a row has other types than expected")
            rows.append(tuple(row))
        return rows


def _all_of(kind: type, name: str, values: list[Any]) -> list[Any]:
    if any(type(value) is not kind for value in values):
        raise ProtocolError(f"field {name}: expected only {kind.__name__}")
    return values


def encode_output(rank: int, stream: Stream, data: bytes = b"") -> bytes:
    """Makes the body of OUTPUT or CLOSED."""
    return _SOURCE.pack(rank, stream) + data


def decode_output(body: bytes) -> tuple[int, Stream, bytes]:
    """Reads the body of OUTPUT or CLOSED.

    Raises:
        ProtocolError: It is something else.
    """
    if len(body) < _SOURCE.size:
        raise ProtocolError("output without a source")
    rank, stream = _SOURCE.unpack_from(body)
    if stream not in Stream.__members__.values():
        raise ProtocolError(f"output of an unknown stream, {stream}")
    return rank, Stream(stream), body[_SOURCE.size :]


class FrameParser:
    """Bytes in, frames out."""

    def __init__(self, after_mark: bool) -> None:
        """`after_mark`: frames begin behind MARK."""
        self._noise = b""  # What came before it; its end, if it is long.
        self._awaits_mark = after_mark
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Takes bytes and gives the frames that they complete.

        Raises:
            ProtocolError: They are no frames.
        """
        self._data += data
        if self._awaits_mark:
            before, mark, after = self._data.partition(MARK)
            if not mark:
                kept = max(0, len(self._data) - len(MARK) + 1)
                self._hear_noise(bytes(self._data[:kept]))
                del self._data[:kept]
                return
            self._hear_noise(bytes(before))
            self._data = after
            self._awaits_mark = False
        at = 0
        try:
            while len(self._data) - at >= _HEADER.size:
                kind, length = _HEADER.unpack_from(self._data, at)
                if kind not in Kind.__members__.values() or length > MAX_BODY:
                    raise ProtocolError(f"a frame of kind {kind} and {length} bytes")
                end = at + _HEADER.size + length
                if end > len(self._data):
                    return
                body = bytes(self._data[at + _HEADER.size : end])
                at = end
                yield Kind(kind), body
        finally:
            del self._data[:at]

    def noise(self) -> bytes:
        """What came before the frames; the end of it, if it is long."""
        return self._noise + (bytes(self._data) if self._awaits_mark else b"")

    def _hear_noise(self, data: bytes) -> None:
        self._noise = (self._noise + data)[-MAX_NOISE:]


class FramePipe:
    """Frames over two descriptors in a loop."""

    def __init__(
        self,
        loop: Loop,
        read_fd: int,
        write_fd: int,
        on_frame: Callable[[Kind, bytes], object],
        on_closed: Callable[[str], object],
        *,
        after_mark: bool,
    ) -> None:
        """Takes the descriptors over.

        Args:
            loop: Where they are watched.
            read_fd: Frames come from here.
            write_fd: And go there.
            on_frame: Called with every frame.
            on_closed: Called once, with the reason, when nothing more comes.
            after_mark: Frames begin behind MARK.
        """
        self._loop, self._read_fd, self._write_fd = loop, read_fd, write_fd
        self._on_frame, self._on_closed = on_frame, on_closed
        self._parser = FrameParser(after_mark)
        # What is to be sent. Small pieces are put together; large ones are kept as they are, since the launcher sends
        # the same payload to every agent.
        self._outgoing: deque[bytes | bytearray] = deque()
        self._sent = 0  # Of the first.
        self._unsent = 0  # Of all.
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        loop.watch(read_fd, READ, lambda _events: self.read())

    def noise(self) -> str:
        """What came before the frames."""
        return self._parser.noise().decode("utf-8", "replace").strip()

    def say(self, kind: Kind, body: bytes = b"") -> None:
        """Sends a frame when there is room. An other side that is gone is noticed by reading."""
        self.send(encode_frame(kind, body))

    def send(self, data: bytes) -> None:
        """Sends bytes when there is room."""
        if self._write_fd < 0:
            return
        last = self._outgoing[-1] if self._outgoing else b""
        if isinstance(last, bytearray) and len(last) + len(data) <= _WRITE_BYTES:
            last += data
        else:
            self._outgoing.append(bytearray(data) if len(data) < _WRITE_BYTES else data)
        self._unsent += len(data)
        self._flush()

    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return self._unsent

    def read(self) -> None:
        """Reads what there is."""
        while self._read_fd >= 0:
            try:
                data = os.read(self._read_fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            if not data:
                self._lose("it was closed")
                return
            try:
                for kind, body in self._parser.feed(data):
                    self._on_frame(kind, body)
                    if self._read_fd < 0:
                        return
            except ProtocolError as error:
                self._lose(f"what came is not of this protocol: {error}")
            if len(data) < _READ_BYTES:
                return

    def close(self) -> None:
        """Closes both; nobody is called back."""
        self._forget_outgoing()
        for fd in {self._read_fd, self._write_fd} - {-1}:
            self._loop.forget(fd)
            with contextlib.suppress(OSError):
                os.close(fd)
        self._read_fd = self._write_fd = -1

    def _lose(self, reason: str) -> None:
        self.close()
        self._on_closed(reason)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                first = self._outgoing[0]
                with memoryview(first) as view, view[self._sent : self._sent + _WRITE_BYTES] as piece:
                    written = os.write(self._write_fd, piece)
                self._sent += written
                self._unsent -= written
                if self._sent == len(first):
                    self._outgoing.popleft()
                    self._sent = 0
        except BlockingIOError:
            self._loop.watch(self._write_fd, WRITE, lambda _events: self._flush())
            return
        except OSError:
            self._forget_outgoing()
        self._loop.forget(self._write_fd)

    def _forget_outgoing(self) -> None:
        self._outgoing.clear()
        self._sent = self._unsent = 0
