"""The connecting side of connections: tries until the other side has accepted us.

A connection that fails before the first frame of the answer is bad luck (nobody listens yet, or a leader has just given
up an earlier attempt), and another one is made after a short pause. Who waits for it has the deadline, and finds the
last thing that went wrong in `trouble`.
"""

import dataclasses
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.door import AUTHENTICATION_SECONDS, peer_credentials
from horovod.common.rendezvous.encryption import PLAIN, Encryption
from horovod.common.rendezvous.loop import WRITE, Loop, Timer
from horovod.common.rendezvous.messages import Kind
from horovod.common.rendezvous.proof import ANSWER_SIZE, Claim, Key, encode_opening, listener_of, new_challenge

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
# What may be wrong. A connection that nothing answers, not even by refusing it, is most likely dropped by a firewall.
_SILENCE, _NOBODY = "nothing answers there", "nobody listens"

Address = tuple[socket.AddressFamily, Any]  # as the socket module has it


class Caller:
    """A connection to be, in a loop."""

    def __init__(
        self,
        loop: Loop,
        addresses: Sequence[Address],
        key: Key,
        *,
        claim: Claim,
        first_frame: bytes,
        on_answer: Callable[[Connection, Kind, bytes], object],
        encryption: Encryption = PLAIN,
    ) -> None:
        """Begins to connect.

        Args:
            loop: Where everything is watched.
            addresses: Where to; with several, each attempt takes the next one.
            key: What is proved.
            claim: Who we are and what for.
            first_frame: What we say first.
            on_answer: Called once, with the connection and the first frame of the answer; it sets the connection's
                on_frame and on_closed, or takes its socket.
            encryption: Whether the connection is to be encrypted. If the other side differs it is not, and the other
                side decides about it.
        """
        self.trouble = _SILENCE
        self._loop, self._key, self._encryption = loop, key, encryption
        self._claim = dataclasses.replace(claim, encrypts=encryption.covers(claim.purpose))
        self._addresses, self._first_frame, self._on_answer = addresses, first_frame, on_answer
        self._attempts = 0
        self._pause = _FIRST_PAUSE
        self._own_challenge = b""
        self._sock: socket.socket | None = None  # while it connects
        self._connection: Connection | None = None  # while the other side proves itself
        self._timer: Timer = loop.at(time.monotonic(), self._try)

    def close(self) -> None:
        """Gives up, unless the answer has come: the connection is the other's then."""
        self._timer.cancel()
        if self._sock is not None:
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            self._sock = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try(self) -> None:
        family, address = self._addresses[self._attempts % len(self._addresses)]
        self._attempts += 1
        self._timer = self._loop.at(time.monotonic() + AUTHENTICATION_SECONDS, self._give_up)
        try:
            self._sock = socket.socket(family, socket.SOCK_STREAM)
            self._sock.setblocking(False)
            code = self._sock.connect_ex(address)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if code == errno.EINPROGRESS:
            self._loop.watch(self._sock.fileno(), WRITE, self._connected)
        elif code != 0:
            self._fail(os.strerror(code))
        else:
            self._connected(WRITE)

    def _connected(self, _events: int) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self._fail(os.strerror(code))
            return
        self._loop.forget(self._sock.fileno())
        try:
            if self._sock.family == socket.AF_UNIX:
                _pid, uid = peer_credentials(self._sock)
                if uid != os.getuid():
                    self._fail(f"the socket of this job is held by another user, uid {uid}")
                    return
            else:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._connection, self._sock = Connection(self._sock, self._loop, self._fail), None
        self._own_challenge = new_challenge()
        self._connection.send(encode_opening(self._claim, self._own_challenge))
        self._connection.expect(ANSWER_SIZE, self._answered)

    def _answered(self, answer: bytes) -> None:
        assert self._connection is not None
        self._connection.send(self._key.check_answer(self._claim, answer, self._own_challenge))
        challenge, encrypts = listener_of(answer)
        if not (encrypts and self._claim.encrypts):
            self._introduce()
            return
        self._timer.cancel()
        self._timer = self._loop.at(time.monotonic() + AUTHENTICATION_SECONDS, lambda: self._fail("no answer in time"))
        key = self._key.session_key(self._claim, self._own_challenge, challenge)
        self._connection.encrypt(self._encryption.open_session(key, listening=False), self._introduce)

    def _introduce(self) -> None:
        assert self._connection is not None
        self._connection.send(self._first_frame)
        self._connection.expect_frames(self._accepted)

    def _accepted(self, kind: Kind, body: bytes) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        self._timer.cancel()
        connection.on_closed = _nobody_cares  # until the new owner says so
        self._on_answer(connection, kind, body)

    def _give_up(self) -> None:
        self._fail(_SILENCE if self._sock is not None else "no answer in time")

    def _fail(self, reason: str) -> None:
        self.close()
        # That nobody listens is what comes last when a process has gone; what came before it says more.
        if reason != os.strerror(errno.ECONNREFUSED):
            self.trouble = reason
        elif self.trouble == _SILENCE:
            self.trouble = _NOBODY
        self._timer = self._loop.at(time.monotonic() + self._pause, self._try)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _nobody_cares(_reason: str) -> None:
    pass
