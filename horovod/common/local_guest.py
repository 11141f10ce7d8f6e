"""A connection to the leader before it is known whose it is; see local_rendezvous.py."""

import hmac
import os
import socket
import time

from horovod.common.local_channel import (
    HEADER_SIZE,
    MAGIC,
    OPENING_SIZE,
    PROOF_SIZE,
    Channel,
    ChannelError,
    Kind,
    decode_body,
    decode_header,
    new_challenge,
    prove,
)
from horovod.common.local_rendezvous import AUTHENTICATION_SECONDS, Hello


class Guest:
    """A connection on its way from the first byte to HELLO.

    It says how many bytes it needs next; `feed` takes exactly those. Nothing is parsed before the proof was right.
    """

    def __init__(self, channel: Channel, key: bytes, name: bytes) -> None:
        """Takes over a connection that the listening socket has accepted, non-blocking."""
        self.channel = channel
        self.deadline = time.monotonic() + AUTHENTICATION_SECONDS
        self.hello: Hello | None = None
        self.pidfd = -1
        self._key, self._name = key, name
        self._own_challenge = new_challenge()
        self._challenge = b""
        self._needed = OPENING_SIZE
        self._received = b""
        self._step = self._opening

    def read(self) -> None:
        """Takes what has come, up to the HELLO.

        Raises:
            ChannelError: It is not one of ours, or it is gone.
        """
        while self.hello is None:
            try:
                part = self.channel.sock.recv(self._needed - len(self._received))
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelError(str(error)) from None
            if not part:
                raise ChannelError("the connection was closed")
            self._received += part
            if len(self._received) == self._needed:
                data, self._received = self._received, b""
                self._step(data)

    def is_closed(self) -> bool:
        """Whether the other side has gone away since its HELLO."""
        try:
            return not self.channel.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the connection and the pidfd."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def reply(self, data: bytes) -> None:
        """Sends a few bytes; a connection that has not even room for them is of no use."""
        try:
            if self.channel.sock.send(data) != len(data):
                raise ChannelError("it does not read")
        except OSError as error:
            raise ChannelError(str(error)) from None

    def _opening(self, data: bytes) -> None:
        if not data.startswith(MAGIC):
            raise ChannelError("it does not speak this protocol")
        self._challenge = data[len(MAGIC) :]
        proof = prove(self._key, b"listening", self._challenge, self._own_challenge, self._name)
        self.reply(self._own_challenge + proof)
        self._needed, self._step = PROOF_SIZE, self._proof

    def _proof(self, data: bytes) -> None:
        expected = prove(self._key, b"connecting", self._own_challenge, self._challenge, self._name)
        if not hmac.compare_digest(data, expected):
            raise ChannelError("it does not know the key")
        self._needed, self._step = HEADER_SIZE, self._header

    def _header(self, data: bytes) -> None:
        kind, length = decode_header(data)
        if kind is not Kind.HELLO:
            raise ChannelError(f"expected HELLO, got {kind.name}")
        self._needed, self._step = length, self._body

    def _body(self, data: bytes) -> None:
        self.hello = Hello.decode(decode_body(data))
