"""The listening side of connections: lets in who proves the key, encrypts, and says its first frame in time.

Strangers cost nobody anything: no call blocks, a connection that has proved nothing is dropped after a few seconds, and
there are never more than some hundred of them: beyond that the oldest goes.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.encryption import PLAIN, Encryption
from horovod.common.rendezvous.loop import READ, Loop, Timer
from horovod.common.rendezvous.messages import Kind
from horovod.common.rendezvous.proof import OPENING_SIZE, PROOF_SIZE, Claim, Key, decode_opening, new_challenge

AUTHENTICATION_SECONDS = 5.0
MAX_STRANGERS = 256
_ACCEPTS_AT_ONCE = 64
# How long to leave the door shut when the system has no descriptor for another connection.
_PAUSE_SECONDS = 0.1


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The pid and uid of the other side of a Unix socket, as the kernel knows them."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


@dataclass(eq=False)
class _Stranger:
    """A connection on its way from the first byte to its first frame."""

    connection: Connection
    timer: Timer
    peer: str
    own_challenge: bytes = field(default_factory=new_challenge)
    challenge: bytes = b""
    claim: Claim | None = None


class Door:
    """A listening socket in a loop."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        key: Key,
        *,
        admits: Callable[[Claim], bool],
        on_guest: Callable[[Connection, Claim, Kind, bytes], object],
        on_refused: Callable[[str, str], object] = lambda _peer, _reason: None,
        max_strangers: int = MAX_STRANGERS,
        encryption: Encryption = PLAIN,
    ) -> None:
        """Takes over a socket that listens.

        Args:
            loop: Where everything is watched.
            listener: The socket.
            key: What has to be proved.
            admits: Whether a claim makes sense here.
            on_guest: Called with every connection that has proved its claim, and its first frame. A ProtocolError
                that it raises sends the guest away.
            on_refused: Called with the peer and the reason when a connection failed to prove the key.
            max_strangers: How many unproved connections are kept.
            encryption: Which connections are to be encrypted. A guest that differs is let in, in clear: whoever
                decides about it has to look at its claim.
        """
        self.trouble = ""  # why connections could not be accepted
        listener.setblocking(False)
        self._loop, self._listener, self._key = loop, listener, key
        self._admits, self._on_guest, self._on_refused = admits, on_guest, on_refused
        self._max_strangers = max_strangers
        self._encryption = encryption
        self._strangers: dict[Connection, _Stranger] = {}  # oldest first
        self._pause: Timer | None = None
        self._listen()

    def close(self) -> None:
        """Stops listening and drops everyone who has proved nothing."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self.trouble = f"connections could not be accepted: {error.strerror}"
                self._loop.forget(self._listener.fileno())
                self._pause = self._loop.at(time.monotonic() + _PAUSE_SECONDS, self._listen)
                return
            try:
                self._meet(sock, address)
            except OSError:  # it has gone already
                sock.close()

    def _meet(self, sock: socket.socket, address: object) -> None:
        if sock.family == socket.AF_UNIX:
            pid, uid = peer_credentials(sock)
            if uid != os.getuid():
                sock.close()
                return
            peer = f"pid {pid}"
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = str(address[0]) if isinstance(address, tuple) else str(address)
        while len(self._strangers) >= self._max_strangers:
            self._drop(next(iter(self._strangers.values())))
        connection = Connection(sock, self._loop, lambda reason: self._refuse(stranger, reason))
        timer = self._loop.at(time.monotonic() + AUTHENTICATION_SECONDS, lambda: self._drop(stranger))
        stranger = _Stranger(connection, timer, peer)
        self._strangers[connection] = stranger
        connection.expect(OPENING_SIZE, lambda data: self._opening(stranger, data))

    def _opening(self, stranger: _Stranger, data: bytes) -> None:
        claim, stranger.challenge = decode_opening(data)
        if not self._admits(claim):
            raise ProtocolError(f"nobody is awaited for {claim}")
        stranger.claim = claim
        encrypts = self._encryption.covers(claim.purpose)
        stranger.connection.send(self._key.answer(claim, stranger.challenge, stranger.own_challenge, encrypts))
        stranger.connection.expect(PROOF_SIZE, lambda proof: self._proof(stranger, claim, proof))

    def _proof(self, stranger: _Stranger, claim: Claim, proof: bytes) -> None:
        encrypts = self._encryption.covers(claim.purpose)
        self._key.check_proof(claim, proof, stranger.challenge, stranger.own_challenge, encrypts)
        if not (encrypts and claim.encrypts):
            self._await_frame(stranger, claim)
            return
        key = self._key.session_key(claim, stranger.challenge, stranger.own_challenge)
        session = self._encryption.open_session(key, listening=True)
        stranger.connection.encrypt(session, lambda: self._await_frame(stranger, claim))

    def _await_frame(self, stranger: _Stranger, claim: Claim) -> None:
        stranger.connection.expect_frames(lambda kind, body: self._first_frame(stranger, claim, kind, body))

    def _first_frame(self, stranger: _Stranger, claim: Claim, kind: Kind, body: bytes) -> None:
        self._on_guest(stranger.connection, claim, kind, body)
        stranger.timer.cancel()
        self._strangers.pop(stranger.connection, None)

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        self._drop(stranger)
        self._on_refused(stranger.peer, reason)

    def _drop(self, stranger: _Stranger) -> None:
        stranger.timer.cancel()
        self._strangers.pop(stranger.connection, None)
        stranger.connection.close()
