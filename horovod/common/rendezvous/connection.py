"""A connection in a loop: exact reads, frames, and writes that never block.

It never takes more bytes from the socket than it was told to expect: descriptors may follow a frame (descriptors.py),
and a connection between hosts is handed to the engine after its last frame. An encrypted one may, but keeps them in its
session, which is handed over too.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.loop import READ, WRITE, Loop, Timer
from horovod.common.rendezvous.messages import HEADER_SIZE, Kind, decode_header, encode_frame

if TYPE_CHECKING:
    from horovod._core import TlsSession

_CHUNK = 256 << 10
# The words for a connection that the other side has ended.
CLOSED = "the connection was closed"


class Connection:
    """A socket whose other side is talked to by callbacks.

    Attributes:
        on_frame: Called with every frame.
        on_closed: Called with the reason once the connection is of no use; it has been closed then.
        session: What encrypts it, if it is encrypted.
    """

    def __init__(self, sock: socket.socket, loop: Loop, on_closed: Callable[[str], object]) -> None:
        """Takes over a socket; waits for nothing before `expect` or `expect_frames`."""
        self.on_frame: Callable[[Kind, bytes], object] = _nobody_listens
        self.on_closed = on_closed
        sock.setblocking(False)
        self.session: TlsSession | None = None
        self._shaking_hands = False
        self._sock: socket.socket | None = sock
        self._loop = loop
        self._needed = 0
        self._received = bytearray()
        self._then: Callable[[bytes], object] | None = None
        self._outgoing = bytearray()
        self._is_deaf = False  # the other side: nothing more can be sent
        self._ending = False
        self._end_timer: Timer | None = None

    @property
    def sock(self) -> socket.socket:
        """The socket, while it is open."""
        assert self._sock is not None
        return self._sock

    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._sock is not None

    def expect(self, size: int, then: Callable[[bytes], object]) -> None:
        """Calls back, once, with the next `size` bytes."""
        self._needed, self._then = size, then
        self._watch()

    def expect_frames(self, on_frame: Callable[[Kind, bytes], object]) -> None:
        """Calls back with every frame from now on."""
        self.on_frame = on_frame
        self.expect(HEADER_SIZE, self._header)

    def encrypt(self, session: TlsSession, then: Callable[[], object]) -> None:
        """Encrypts all that follows, and calls back when both sides have shown that they know the session's key."""
        if self._outgoing:  # a few bytes on a new connection: there is room, or it is of no use
            raise ProtocolError("it does not read")
        self.session, self._shaking_hands = session, True
        self.expect(0, lambda _nothing: then())

    def send(self, data: bytes) -> None:
        """Sends when there is room. A connection that is gone is noticed by reading."""
        if self._sock is None or self._ending or self._is_deaf:
            return
        self._outgoing += data
        self._flush()

    def say(self, kind: Kind, body: bytes = b"") -> None:
        """Sends a frame."""
        self.send(encode_frame(kind, body))

    def has_sent_all(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._is_deaf or not (self._outgoing or (self.session and self.session.has_output()))

    def close(self) -> None:
        """Closes the connection; nobody is called back."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    def detach(self) -> socket.socket | None:
        """Gives the socket away, if it is open; an encrypted one is of no use without its session."""
        sock, self._sock, self._then = self._sock, None, None
        if self._end_timer is not None:
            self._end_timer.cancel()
        if sock is not None:
            self._loop.forget(sock.fileno())
        return sock

    def end_after(self, kind: Kind, body: bytes, seconds: float) -> None:
        """Says a last thing, and closes when the other side has, which shows that it was heard, or after some time."""
        if self._sock is None or self._ending:
            return
        self.say(kind, body)
        self._ending = True
        self.on_closed = lambda _reason: None
        self.on_frame = lambda _kind, _body: None
        self._end_timer = self._loop.at(time.monotonic() + seconds, self.close)
        self._flush()

    def _watch(self) -> None:
        if self._sock is None:
            return
        events = (READ if self._then is not None else 0) | (0 if self.has_sent_all() else WRITE)
        if events:
            self._loop.watch(self._sock.fileno(), events, self._on_ready)
        else:
            self._loop.forget(self._sock.fileno())

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ:
            self._read()
            self._watch()

    def _flush(self) -> None:
        if self._sock is None:
            return
        try:
            while self._outgoing:
                del self._outgoing[: self._send(self._sock, self._outgoing[:_CHUNK])]
            if self.session is not None:
                self.session.flush(self._sock.fileno())
        except BlockingIOError:
            pass
        except (OSError, HorovodInternalError):
            self._outgoing.clear()
            self._is_deaf = True
        if self._ending and self.has_sent_all():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        self._watch()

    def _send(self, sock: socket.socket, data: bytearray) -> int:
        """As send of a socket."""
        if self.session is None:
            return sock.send(data)
        taken = self.session.write(sock.fileno(), bytes(data))
        if taken == 0:
            raise BlockingIOError
        return taken

    def _recv(self, sock: socket.socket, most: int) -> bytes:
        """As recv of a socket."""
        if self.session is None:
            return sock.recv(most)
        data = self.session.read(sock.fileno(), most)
        if data is None:
            raise BlockingIOError
        return data

    def _read(self) -> None:
        while self._sock is not None and self._then is not None:
            try:
                if self._shaking_hands and self.session is not None:
                    if not self.session.handshake(self._sock.fileno()):
                        return
                    self._shaking_hands = False
                part = b""
                missing = self._needed - len(self._received)
                if missing > 0:
                    part = self._recv(self._sock, min(missing, _CHUNK))
            except BlockingIOError:
                return
            except ConnectionError:  # a process that dies with something unread
                self._lose(CLOSED)
                return
            except OSError as error:
                self._lose(f"the connection failed: {error.strerror or error}")
                return
            except HorovodInternalError as error:
                self._lose(str(error))
                return
            if missing > 0:
                if not part:
                    self._lose(CLOSED)
                    return
                self._received += part
                continue
            data, self._received = bytes(self._received), bytearray()
            then, self._then = self._then, None
            try:
                then(data)
            except ProtocolError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.close()
        self.on_closed(reason)

    def _header(self, data: bytes) -> None:
        kind, length = decode_header(data)
        self.expect(length, lambda body: self._frame(kind, body))

    def _frame(self, kind: Kind, body: bytes) -> None:
        try:
            self.on_frame(kind, body)
        finally:  # what it raises ends an attempt, and the other side's word about that is to be heard
            if self._sock is not None and self._then is None:
                self.expect(HEADER_SIZE, self._header)


def _nobody_listens(kind: Kind, _body: bytes) -> None:
    raise ProtocolError(f"expected nothing, got {kind.name}")
