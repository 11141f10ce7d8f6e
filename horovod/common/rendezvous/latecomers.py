"""Ranks that come to a leader whose attempt has failed: they would wait for it in vain, and not know why."""

import time

from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import Kind
from horovod.common.rendezvous.times import VERDICT_SECONDS


class Latecomers:
    """Those who came too late, to be told the reason once it is known."""

    def __init__(self) -> None:
        """Begins with none."""
        self._connections: list[Connection] = []
        self._reason: bytes | None = None

    def add(self, connection: Connection) -> None:
        """One has come; whatever else it says does not matter."""
        ignore(connection)
        self._connections.append(connection)
        if self._reason is not None:
            connection.say(Kind.FAILED, self._reason)

    def tell(self, loop: Loop, reason: bytes, count: int, deadline: float) -> None:
        """Tells all who have come and, for some seconds, those who are still to come.

        Args:
            loop: Where they come.
            reason: The body of FAILED.
            count: How many may come.
            deadline: When they would give up by themselves.
        """
        self._reason = reason
        for connection in self._connections:
            connection.say(Kind.FAILED, reason)
        deadline = min(deadline, time.monotonic() + VERDICT_SECONDS)
        loop.run_until(lambda: len(self._connections) >= count, deadline)

    def close(self) -> None:
        """Closes their connections; what was said is still heard."""
        for connection in self._connections:
            connection.close()


def ignore(connection: Connection) -> None:
    """Has nothing come of what is said on a connection, and of its end."""
    connection.on_frame = lambda _kind, _body: None
    connection.on_closed = lambda _reason: None
