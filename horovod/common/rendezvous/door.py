"""The listening side of connections: lets in who proves the key, encrypts, and says its first frame in time.

Strangers cost nobody anything: no call blocks, a connection that has proved nothing is dropped after a few seconds, and
gate.py bounds how many of them there are.
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
from horovod.common.rendezvous.gate import MAX_STRANGERS, Crowd, Gate
from horovod.common.rendezvous.loop import Loop, Timer
from horovod.common.rendezvous.messages import Kind
from horovod.common.rendezvous.proof import OPENING_SIZE, PROOF_SIZE, Claim, Key, decode_opening, new_challenge

AUTHENTICATION_SECONDS = 5.0


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
            on_refused: Called with who it was and the reason when a connection failed to prove the key.
            max_strangers: How many unproved connections are kept.
            encryption: Which connections are to be encrypted. A guest that differs is let in, in clear: whoever
                decides about it has to look at its claim.
        """
        self._loop, self._key = loop, key
        self._admits, self._on_guest, self._on_refused = admits, on_guest, on_refused
        self._encryption = encryption
        self._strangers: dict[Connection, _Stranger] = {}
        self._crowd: Crowd[Connection] = Crowd(max_strangers)
        self._gate = Gate(loop, listener, self._crowd, self._meet, on_refused)

    @property
    def trouble(self) -> str:
        """Why connections could not be accepted."""
        return self._gate.trouble

    def close(self) -> None:
        """Stops listening and drops everyone who has proved nothing."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._gate.close()

    def _meet(self, sock: socket.socket, address: str) -> None:
        peer = address
        if sock.family == socket.AF_UNIX:
            pid, uid = peer_credentials(sock)
            peer = f"pid {pid}, uid {uid}"
            if uid != os.getuid():
                sock.close()
                self._on_refused(peer, "it is another user's")
                return
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, self._loop, lambda reason: self._refuse(stranger, reason))
        stranger = _Stranger(connection, self._in_time(lambda: stranger, "it proved nothing"), peer)
        self._strangers[connection] = stranger
        crowded_out = self._crowd.add(connection, address)
        if crowded_out is not None:
            self._refuse(self._strangers[crowded_out], "it proved nothing, and too many others came")
        connection.expect(OPENING_SIZE, lambda data: self._opening(stranger, data))

    def _in_time(self, who: Callable[[], _Stranger], what: str) -> Timer:
        """Turns one away who does not go on within some seconds."""
        reason = f"{what} within {AUTHENTICATION_SECONDS:g} s"
        return self._loop.at(time.monotonic() + AUTHENTICATION_SECONDS, lambda: self._refuse(who(), reason))

    def _opening(self, stranger: _Stranger, data: bytes) -> None:
        claim, stranger.challenge = decode_opening(data)
        if not self._admits(claim):
            raise ProtocolError(f"it comes for {claim}, which is not awaited")
        encrypts = self._encryption.covers(claim.purpose)
        stranger.connection.send(self._key.answer(claim, stranger.challenge, stranger.own_challenge, encrypts))
        stranger.connection.expect(PROOF_SIZE, lambda proof: self._proof(stranger, claim, proof))

    def _proof(self, stranger: _Stranger, claim: Claim, proof: bytes) -> None:
        encrypts = self._encryption.covers(claim.purpose)
        self._key.check_proof(claim, proof, stranger.challenge, stranger.own_challenge, encrypts)
        # No stranger any more. Where a thousand hosts come at once, their handshakes take a while.
        self._crowd.remove(stranger.connection, proved=True)
        stranger.timer.cancel()
        stranger.timer = self._in_time(lambda: stranger, "it proved the key and said nothing")
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
        self._crowd.remove(stranger.connection)
        stranger.connection.close()
