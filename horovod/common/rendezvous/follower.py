"""The other ranks' side of a host's meeting; meeting.py has the protocol."""

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

from horovod import _core
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.descriptors import receive_some, send_descriptors
from horovod.common.rendezvous.door import peer_credentials
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.messages import (
    Kind,
    WiringNote,
    decode_accepted,
    decode_error,
    decode_flags,
    encode_error,
    encode_flags,
    encode_frame,
)
from horovod.common.rendezvous.proof import Claim, Purpose
from horovod.common.rendezvous.rank import Rank, describe_unseen
from horovod.common.rendezvous.server import lost
from horovod.common.rendezvous.table import Table
from horovod.common.rendezvous.times import GRACE_SECONDS, STEP_SECONDS, VERDICT_SECONDS
from horovod.common.rendezvous.wiring import Wiring


class Follower:
    """Follows the leader of the host from HELLO to DONE."""

    def __init__(self, rank: Rank) -> None:
        """Begins to connect."""
        self._rank, self._loop = rank, rank.loop
        self._connection: Connection | None = None
        self._leader = describe_unseen(0, rank.place)
        self._deadline = time.monotonic() + rank.timeout
        self._inbox: deque[tuple[Kind, bytes]] = deque()
        self._received: list[int] = []  # descriptors that nobody has taken yet
        self._verdict: Exception | None = None
        self._lost: str | None = None  # why the connection has ended
        self._caller = Caller(
            self._loop,
            [(socket.AF_UNIX, rank.local_address)],
            rank.local_key,
            claim=Claim(Purpose.LOCAL, 0, rank.place.rank, 0),
            first_frame=encode_frame(Kind.HELLO, rank.hello.encode()),
            on_answer=self._on_answer,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._caller.close()
        if self._connection is not None:
            self._connection.close()
        for fd in self._received:
            if fd >= 0:
                os.close(fd)
        self._received = []

    def introduce(self) -> None:
        """Returns when the leader has accepted us.

        Raises:
            HorovodInternalError: It was not there in time.
        """
        if not self._loop.run_until(lambda: self._connection is not None, self._deadline):
            raise HorovodInternalError(
                f"init: {self._leader} was not there for {self._rank.place} within {self._rank.timeout:g} s "
                f"({self._caller.trouble}). Did it start, and with the same HOROVOD_JOB_ID and HOROVOD_SECRET_KEY? If "
                "it needs longer, raise HOROVOD_START_TIMEOUT."
            )

    def take_wiring(self) -> Wiring:
        """Waits for all ranks, takes the descriptors of this host and shows that they are of use.

        Raises:
            HorovodInternalError, ValueError: The attempt has failed, here or elsewhere.
        """
        seconds = max(0.0, self._deadline - time.monotonic()) + STEP_SECONDS + 3 * GRACE_SECONDS
        table = Table.decode(self._expect(Kind.TABLE, seconds))
        note = WiringNote.decode(self._expect(Kind.WIRING, STEP_SECONDS + GRACE_SECONDS))
        wiring = Wiring(table, note.nonce)
        fds, self._received = self._received, []
        count = 1 + 2 * len(note.pids)
        pidfds = iter(fds[count:])
        wiring.segment_fd, wiring.doorbells = fds[0], fds[1:count]
        wiring.alive_fds = [next(pidfds) if exists else -1 for exists in note.watched]
        return wiring

    def show_ready(self, wiring: Wiring) -> None:
        """Says that this rank sees the memory of its host, and hands over its own.

        Raises:
            HorovodInternalError: It does not see it.
        """
        if _core.segment_probe(wiring.segment_fd) != (wiring.table.generation, wiring.nonce):
            raise HorovodInternalError(
                f"init: {self._rank.place} does not see the memory that {self._leader} made. Do both run on the same "
                "machine?"
            )
        arena = _core.arena_fd()
        self._say(Kind.READY, encode_flags([arena >= 0]))
        if arena >= 0:
            assert self._connection is not None
            try:
                send_descriptors(self._connection.sock, [arena], time.monotonic() + STEP_SECONDS)
            except ProtocolError as error:
                raise HorovodInternalError(lost(self._leader, str(error))) from None

    def await_go(self, wiring: Wiring) -> None:
        """Connects to the ranks of other hosts, and waits until everyone has."""
        if len(wiring.table.hosts) > 1:
            self._rank.link(wiring)
            self._say(Kind.LINKED)
        flags = decode_flags(self._expect(Kind.GO, STEP_SECONDS + 4 * GRACE_SECONDS), self._rank.place.local_size)
        assert len(flags) == len(self._received)
        wiring.arena_fds, self._received = self._received, []

    def confirm(self) -> None:
        """Says that this engine runs and waits for the others' to."""
        self._say(Kind.STARTED)
        self._expect(Kind.DONE, STEP_SECONDS + 4 * GRACE_SECONDS)

    def fail(self, error: BaseException) -> BaseException:
        """Says why this rank gives up.

        Returns:
            The reason that the leader has told to all, which is another one if another rank was quicker.
        """
        connection = self._connection
        if self._verdict is not None or connection is None or not connection.is_open():
            return error
        connection.on_closed = lambda _reason: None
        connection.on_frame = self._on_verdict
        connection.say(Kind.FAILED, encode_error(error, self._rank.place))
        if not isinstance(error, Exception):  # who presses Ctrl-C does not want to wait
            return error
        deadline = time.monotonic() + VERDICT_SECONDS + GRACE_SECONDS
        self._loop.run_until(lambda: self._verdict is not None or not connection.is_open(), deadline)
        return self._verdict or error

    def _say(self, kind: Kind, body: bytes = b"") -> None:
        assert self._connection is not None
        self._connection.say(kind, body)

    def _expect(self, kind: Kind, seconds: float) -> bytes:
        if not self._inbox and self._lost is not None:
            raise HorovodInternalError(lost(self._leader, self._lost))
        if not self._loop.run_until(lambda: bool(self._inbox), time.monotonic() + seconds):
            raise HorovodInternalError(lost(self._leader, "no answer in time"))
        heard, body = self._inbox.popleft()
        if heard is not kind:
            raise HorovodInternalError(lost(self._leader, f"expected {kind.name}, got {heard.name}"))
        return body

    def _on_answer(self, connection: Connection, kind: Kind, body: bytes) -> None:
        self._connection = connection
        connection.on_frame = self._on_frame
        connection.on_closed = self._on_closed
        pid, _uid = peer_credentials(connection.sock)
        if kind is not Kind.ACCEPTED:
            self._on_frame(kind, body)
            return
        seconds, leader = decode_accepted(body)
        place = self._rank.place
        self._leader = f"rank {leader} (local rank 0 of {place.local_size} on host {place.host}), pid {pid}"
        self._deadline = time.monotonic() + seconds

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        assert self._connection is not None
        if kind is Kind.FAILED:
            self._verdict = decode_error(body)
            raise self._verdict
        if kind is Kind.WIRING:
            note = WiringNote.decode(body)
            if len(note.pids) != self._rank.place.local_size:
                raise ProtocolError(f"expected the wiring of {self._rank.place.local_size} ranks")
            self._receive([True] * (1 + 2 * len(note.pids)) + [exists for exists in note.watched if exists])
        elif kind is Kind.GO:
            self._receive(decode_flags(body, self._rank.place.local_size))
        self._inbox.append((kind, body))

    def _receive(self, exists: list[bool]) -> None:
        """Takes the descriptors that follow a frame; -1 where there is none."""
        assert self._connection is not None
        try:
            self._received += receive_some(self._connection.sock, exists, time.monotonic() + STEP_SECONDS)
        except ProtocolError as error:
            raise HorovodInternalError(f"init: {self._rank.place}: {error}.") from None

    def _on_verdict(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.FAILED:
            self._verdict = decode_error(body)

    def _on_closed(self, reason: str) -> None:
        self._lost = reason
        if not self._inbox:  # what was said before is still good
            raise HorovodInternalError(lost(self._leader, reason))


@contextlib.contextmanager
def follow(rank: Rank) -> Iterator[tuple[Wiring, Callable[[], None]]]:
    """Lets the leader bring this rank to GO; see meeting.meet."""
    with contextlib.ExitStack() as resources:
        follower = Follower(rank)
        resources.callback(follower.close)
        try:
            follower.introduce()
            wiring = follower.take_wiring()
            resources.callback(wiring.close)
            follower.show_ready(wiring)
            follower.await_go(wiring)
            yield wiring, follower.confirm
        except BaseException as error:
            final = follower.fail(error)
            if final is error:
                raise
            raise final from None
