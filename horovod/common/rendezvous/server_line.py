"""A leader's connection to the rendezvous server; server.py has the protocol."""

import os
import time
from collections.abc import Collection, Sequence

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.caller import Address, Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.encryption import PLAIN, Encryption
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import (
    Hello,
    HostHello,
    Kind,
    decode_accepted,
    decode_error,
    encode_error,
    encode_frame,
)
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.server import lost
from horovod.common.rendezvous.times import VERDICT_SECONDS

# How long one who has failed waits for the connection that it needs to say so.
_CONNECTING_SECONDS = 1.0


class ServerLine:
    """Says what the host does, and hears what the others do. What goes wrong is raised from the loop."""

    def __init__(
        self,
        loop: Loop,
        hello: Hello,
        addresses: Sequence[Address],
        key: Key,
        *,
        timeout: float,
        encryption: Encryption = PLAIN,
        advice: str = "",
    ) -> None:
        """Begins to connect; if it does not come about in time, the loop raises that, with some advice."""
        self._loop, self._place, self._timeout, self._advice = loop, hello.place, timeout, advice
        self._server = f"the rendezvous at {addresses[0][1][0]} port {addresses[0][1][1]}"
        self._deadline = time.monotonic() + timeout
        self._connection: Connection | None = None
        self._asked_for: Collection[Kind] = ()
        self._heard: tuple[Kind, bytes] | None = None
        self._verdict: Exception | None = None
        self._failing = False
        self._lost: str | None = None  # why the connection has ended
        host_hello = HostHello(hello.version, hello.place, os.getpid(), timeout)
        self._caller = Caller(
            loop,
            addresses,
            key,
            claim=Claim(Purpose.HOST, 0, hello.place.rank, 0),
            first_frame=encode_frame(Kind.HELLO, host_hello.encode()),
            on_answer=self._on_answer,
            encryption=encryption,
        )
        self._timer = loop.at(self._deadline, self._give_up)

    def close(self) -> None:
        """Closes the connection."""
        self._timer.cancel()
        self._caller.close()
        if self._connection is not None:
            self._connection.close()

    def seconds_left(self) -> float:
        """How long the server still waits for hosts, as far as we know."""
        return max(0.0, self._deadline - time.monotonic())

    def say(self, kind: Kind, body: bytes = b"") -> None:
        """Says something, once there is a connection."""
        self._loop.run_until(lambda: self._connection is not None, self._deadline + 1)
        assert self._connection is not None  # or the time was over and the loop has raised
        self._connection.say(kind, body)

    def expect(self, kind: Kind, seconds: float) -> bytes:
        """Waits for what the server says next; see `expect_one_of`."""
        return self.expect_one_of((kind,), seconds)[1]

    def expect_one_of(self, kinds: Collection[Kind], seconds: float) -> tuple[Kind, bytes]:
        """Waits for what the server says next, and returns which it is.

        Raises:
            HorovodInternalError, ValueError: What went wrong instead, here or elsewhere.
        """
        if self._lost is not None:
            raise HorovodInternalError(lost(self._server, self._lost))
        self._asked_for, self._heard = kinds, None
        if not self._loop.run_until(lambda: self._heard is not None, time.monotonic() + seconds):
            names = " or ".join(kind.name for kind in kinds)
            raise HorovodInternalError(lost(self._server, f"no {names} in time"))
        heard, self._asked_for, self._heard = self._heard, (), None
        assert heard is not None
        return heard

    def fail(self, error: BaseException) -> BaseException:
        """Says why this host gives up.

        Returns:
            The reason that the server has told to all hosts, which is another one if another host was quicker.
        """
        self._failing = True
        self._timer.cancel()
        if self._verdict is None and self._connection is None:
            # The server may have heard our HELLO already, and would take a closed connection for our death.
            self._loop.run_until(lambda: self._connection is not None, time.monotonic() + _CONNECTING_SECONDS)
        if self._connection is not None:
            self._connection.on_closed = _nobody_cares
            self._connection.on_frame = self._on_verdict
        if self._verdict is not None or self._connection is None or not self._connection.is_open():
            return self._verdict or error
        self._connection.say(Kind.FAILED, encode_error(error, self._place))
        if not isinstance(error, Exception):  # who presses Ctrl-C does not want to wait
            return error
        connection = self._connection
        deadline = time.monotonic() + VERDICT_SECONDS
        self._loop.run_until(lambda: self._verdict is not None or not connection.is_open(), deadline)
        return self._verdict or error

    def _on_answer(self, connection: Connection, kind: Kind, body: bytes) -> None:
        self._timer.cancel()
        self._connection = connection
        connection.on_frame = self._on_verdict if self._failing else self._on_frame
        connection.on_closed = _nobody_cares if self._failing else self._on_closed
        if kind is not Kind.ACCEPTED:
            connection.on_frame(kind, body)
            return
        seconds, _ = decode_accepted(body)
        self._deadline = time.monotonic() + seconds

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.FAILED:
            self._verdict = decode_error(body)
            raise self._verdict
        if kind not in self._asked_for or self._heard is not None:
            raise HorovodInternalError(lost(self._server, f"it said {kind.name} unasked"))
        self._heard = kind, body

    def _on_verdict(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.FAILED:
            self._verdict = decode_error(body)

    def _on_closed(self, reason: str) -> None:
        self._lost = reason
        if self._heard is None:  # what was said before is still good
            raise HorovodInternalError(lost(self._server, reason))

    def _give_up(self) -> None:
        raise HorovodInternalError(
            f"init: {self._place} did not reach {self._server} within {self._timeout:g} s ({self._caller.trouble}). "
            "Does HOROVOD_GLOO_RENDEZVOUS_ADDR lead to it from this host, do firewalls let TCP through to this port, "
            f"and have all hosts the same HOROVOD_JOB_ID and HOROVOD_SECRET_KEY? {self._advice}".rstrip()
        )


def _nobody_cares(_reason: str) -> None:
    pass
