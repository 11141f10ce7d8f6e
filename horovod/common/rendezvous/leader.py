"""The leader's side of a host's meeting: meeting.py has the protocol within the host, server.py that between hosts.

One loop watches the listening socket, every follower's connection and pidfd and the connection to the server, in every
wait: a stranger that says nothing holds up nobody, and the first thing that goes wrong is heard at once.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from horovod import _core
from horovod.common.environment import UNTOLD
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous import tree
from horovod.common.rendezvous.addresses import listen_locally
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.descriptors import open_pidfd, receive_some, send_descriptors
from horovod.common.rendezvous.door import Door, peer_credentials
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.latecomers import Latecomers, ignore
from horovod.common.rendezvous.loop import READ, Loop
from horovod.common.rendezvous.messages import (
    NOWHERE,
    Hello,
    Kind,
    Member,
    Report,
    Source,
    decode_error,
    decode_flags,
    encode_accepted,
    encode_error,
    encode_flags,
    read_version,
)
from horovod.common.rendezvous.proof import Claim, Purpose
from horovod.common.rendezvous.rank import Rank, describe_unseen
from horovod.common.rendezvous.server import lost
from horovod.common.rendezvous.server_line import ServerLine
from horovod.common.rendezvous.table import Table, check_ascending, check_configuration, check_version
from horovod.common.rendezvous.times import GRACE_SECONDS, STEP_SECONDS
from horovod.common.rendezvous.wiring import Wiring


@dataclass(eq=False)
class _Follower:
    """A rank that has arrived."""

    hello: Hello
    connection: Connection
    pid: int
    pidfd: int = -1
    may_say: list[Kind] = field(default_factory=list)  # in this order
    said: set[Kind] = field(default_factory=set)
    arena: int = -1  # came with READY

    def __str__(self) -> str:
        return f"{self.hello.place}, pid {self.pid}"


class Leader:
    """Leads the ranks of a host from HELLO to DONE."""

    def __init__(self, rank: Rank) -> None:
        """Begins to listen."""
        self._rank = rank
        self._line: ServerLine | None = None  # if there are other hosts
        self._loop: Loop = rank.loop
        self._deadline = time.monotonic() + rank.timeout
        self._followers: dict[int, _Follower] = {}  # by local rank
        self._left: dict[int, _Follower] = {}  # those that closed their connection; their pidfds are still watched
        self._gathering = True
        self._failing = False
        self._latecomers = Latecomers()
        self._sent_away = 0  # ranks that contradicted us
        # One failed or died: then whoever has started it will end the others, or start them anew.
        self._has_lost_a_rank = False
        self._door: Door | None = None
        if rank.place.local_size > 1:
            listener = listen_locally(rank.local_address, self._deadline, rank.place)
            self._door = Door(
                self._loop,
                listener,
                rank.local_key,
                admits=_is_local,
                on_guest=self._on_hello,
                on_refused=rank.refusals.add,
            )

    def close(self) -> None:
        """Closes every connection."""
        if self._door is not None:
            self._door.close()
        for follower in (*self._followers.values(), *self._left.values()):
            self._forget(follower)
        self._latecomers.close()
        if self._line is not None:
            self._line.close()

    def call(self, call_server: Callable[[], ServerLine]) -> None:
        """Begins to connect to the server; what has gone wrong if that can't be is told to the followers too."""
        self._line = call_server()

    # ---- Gathering ---------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Returns when all ranks of the host have arrived.

        Raises:
            HorovodInternalError: A rank did not come in time, died, or is there twice.
            ValueError: A rank has another idea of the job.
        """
        count = self._rank.place.local_size - 1
        if not self._loop.run_until(lambda: len(self._followers) == count, self._deadline):
            raise HorovodInternalError(self._who_is_missing())
        self._gathering = False
        for follower in self._left.values():
            self._forget(follower)
        self._left.clear()
        if self._door is not None:
            self._door.close()
        if (self._rank.place.cross_rank, self._rank.place.cross_size) == UNTOLD:
            self._count_by_rank()

    def _count_by_rank(self) -> None:
        """Gives followers their local ranks: those that a launcher has told need not ascend with the ranks."""
        by_rank = sorted(self._followers.values(), key=lambda follower: follower.hello.place.rank)
        self._followers = dict(enumerate(by_rank, 1))
        for local_rank, follower in self._followers.items():
            follower.hello = replace(follower.hello, place=replace(follower.hello.place, local_rank=local_rank))

    def _on_hello(self, connection: Connection, _claim: Claim, kind: Kind, body: bytes) -> None:
        """Takes in a rank that has proved the key and says who it is."""
        if kind is not Kind.HELLO:
            raise ProtocolError(f"expected HELLO, got {kind.name}")
        if self._failing:
            self._latecomers.add(connection)
            return
        pid, _uid = peer_credentials(connection.sock)
        try:
            check_version(f"pid {pid}", read_version(body), self._rank.place, self._rank.hello.version)
            hello = Hello.decode(body)
            self._check_place(hello, pid)
            self._replace(self._followers.get(hello.place.local_rank), pid)
        except (ValueError, HorovodInternalError) as error:
            connection.say(Kind.FAILED, encode_error(error, self._rank.place))
            self._sent_away += 1
            raise
        returned = self._left.pop(hello.place.local_rank, None)
        if returned is not None:
            self._forget(returned)
        follower = _Follower(hello, connection, pid, open_pidfd(pid))
        self._followers[hello.place.local_rank] = follower
        connection.on_frame = lambda kind, body: self._on_frame(follower, kind, body)
        connection.on_closed = lambda reason: self._on_closed(follower, reason)
        if follower.pidfd >= 0:
            self._loop.watch(follower.pidfd, READ, lambda _events: self._on_death(follower))
        connection.say(
            Kind.ACCEPTED, encode_accepted(max(0.0, self._deadline - time.monotonic()), self._rank.place.rank)
        )

    def _check_place(self, hello: Hello, pid: int) -> None:
        mine, theirs = self._rank.place, hello.place
        for name in ("size", "local_size"):
            if getattr(theirs, name) != getattr(mine, name):
                raise ValueError(
                    f"init: HOROVOD_{name.upper()} is {getattr(theirs, name)} on rank {theirs.rank} (pid {pid}) and "
                    f"{getattr(mine, name)} on rank {mine.rank}; all ranks of a host need the same."
                )
        if not 0 < theirs.local_rank < mine.local_size or not 0 < theirs.rank < mine.size:
            raise ValueError(
                f"init: pid {pid} says that it is {theirs} of {theirs.size} ranks, and {mine}, pid {os.getpid()}, "
                "leads that host; expected local ranks and ranks from 1."
            )

    def _replace(self, former: _Follower | None, pid: int) -> None:
        """Lets a rank come again, once its first connection is of no use."""
        if former is None:
            return
        if former.pid != pid and not _is_closed(former.connection):
            raise HorovodInternalError(
                f"init: {former.hello.place} is there twice: pid {former.pid} and pid {pid}. Each rank must be started "
                "once."
            )
        self._forget(self._followers.pop(former.hello.place.local_rank))

    def _forget(self, follower: _Follower) -> None:
        follower.connection.close()
        if follower.pidfd >= 0:
            self._loop.forget(follower.pidfd)
            os.close(follower.pidfd)
            follower.pidfd = -1
        if follower.arena >= 0:
            os.close(follower.arena)
            follower.arena = -1

    def _who_is_missing(self) -> str:
        place = self._rank.place
        missing = [local_rank for local_rank in range(1, place.local_size) if local_rank not in self._followers]
        shown = ", ".join(describe_unseen(local_rank, place) for local_rank in missing[:6])
        arrived = sorted([place.rank, *(follower.hello.place.rank for follower in self._followers.values())])
        text = f"init: {shown}{', ...' if len(missing) > 6 else ''} did not arrive within {self._rank.timeout:g} s; "
        text += f"arrived: {', '.join(map(str, arrived))}"
        for _, follower in sorted(self._left.items()):
            text += f"; rank {follower.hello.place.rank} (pid {follower.pid}) came and gave up"
        if self._door is not None and self._door.trouble:
            text += f"; {self._door.trouble}"
        return text + ". If they only need longer, raise HOROVOD_START_TIMEOUT."

    # ---- What followers say ------------------------------------------------------------------------------------------

    def _on_frame(self, follower: _Follower, kind: Kind, body: bytes) -> None:
        if kind is Kind.FAILED:
            self._has_lost_a_rank = True
            raise decode_error(body)
        if follower.may_say[:1] != [kind]:
            wanted = follower.may_say[0].name if follower.may_say else "nothing"
            raise HorovodInternalError(f"init: {follower}, said {kind.name}, expected {wanted}.")
        if kind is Kind.READY:
            deadline = time.monotonic() + STEP_SECONDS
            (follower.arena,) = receive_some(follower.connection.sock, decode_flags(body, 1), deadline)
        follower.said.add(follower.may_say.pop(0))

    def _on_closed(self, follower: _Follower, reason: str) -> None:
        if not self._gathering:
            raise HorovodInternalError(lost(follower, reason))
        # It may come again, or be about to die: a process's connections are closed before its pidfd says so.
        local_rank = follower.hello.place.local_rank
        if self._followers.get(local_rank) is follower:
            self._left[local_rank] = self._followers.pop(local_rank)

    def _on_death(self, follower: _Follower) -> None:
        if self._gathering:
            self._has_lost_a_rank = True
            raise HorovodInternalError(f"init: {follower}, died before all ranks had arrived; see its output.")
        raise HorovodInternalError(lost(follower, "it died"))

    def _hear(self, followers: Iterable[_Follower], kind: Kind) -> None:
        """Waits until some followers have said something."""
        awaited = list(followers)

        def is_over() -> bool:
            return all(kind in follower.said for follower in awaited)

        if not self._loop.run_until(is_over, time.monotonic() + STEP_SECONDS + GRACE_SECONDS):
            late = [str(follower) for follower in awaited if kind not in follower.said]
            raise HorovodInternalError(
                f"init: {', '.join(late[:6])} did not say {kind.name} in time. It was most likely stopped; see its "
                "output."
            )

    # ---- The steps ---------------------------------------------------------------------------------------------------

    def agree(self) -> Table:
        """Compares the ranks of the host, and has the server compare the hosts.

        Raises:
            ValueError: They contradict each other.
            HorovodInternalError: A host did not come, or can't encrypt.
        """
        place, own = self._rank.place, self._rank.hello
        self._rank.encryption.check(place)
        hellos = [own, *(follower.hello for _, follower in sorted(self._followers.items()))]
        check_ascending([hello.place.rank for hello in hellos], place.host)
        for hello in hellos[1:]:
            check_configuration(place.rank, own.configuration, hello.place.rank, hello.configuration)
        pids = [os.getpid(), *(follower.pid for _, follower in sorted(self._followers.items()))]
        last = max(hello.last_generation for hello in hellos)
        if self._line is None:
            size = len(hellos)
            return Table(last + 1, [place.host], [0] * size, pids, [NOWHERE] * size)
        members = [
            Member(hello.place.rank, hello.place.cross_rank, hello.place.cross_size, pid, hello.endpoint)
            for hello, pid in zip(hellos, pids, strict=True)
        ]
        self._line.say(Kind.REPORT, Report(own.configuration, last, members).encode())
        seconds = self._line.seconds_left() + 2 * GRACE_SECONDS
        kind, body = self._line.expect_one_of((Kind.TABLE, Kind.SOURCE), seconds)
        if kind is Kind.SOURCE:
            body = tree.fetch(self._loop, Source.decode(body), place, self._rank.host_key, self._rank.encryption)
        table = Table.decode(body)
        self._rank.listen(table)
        return table

    def hand_over(self, wiring: Wiring, host: int) -> None:
        """Gives every follower the descriptors, one after the other, so that few are under way at a time."""
        table, note = wiring.table.encode(), wiring.note(host).encode()
        for local_rank, follower in sorted(self._followers.items()):
            # It connects to other hosts without being told so again, and may be quicker than we are.
            follower.may_say = [Kind.READY] if self._line is None else [Kind.READY, Kind.LINKED]
            follower.connection.say(Kind.TABLE, table)
            self._hand(follower, Kind.WIRING, note, wiring.descriptors())
            self._hear([follower], Kind.READY)
            wiring.arena_fds[local_rank], follower.arena = follower.arena, -1

    def link(self, wiring: Wiring) -> None:
        """Connects this rank to those of the other hosts, while the followers do the same."""
        if self._line is None:
            return
        self._rank.link(wiring)
        self._hear(self._followers.values(), Kind.LINKED)
        self._line.say(Kind.LINKED)
        self._line.expect(Kind.GO, STEP_SECONDS + 3 * GRACE_SECONDS)

    def go(self, wiring: Wiring) -> None:
        """Tells every follower to start, with the arenas of all."""
        own = _core.arena_fd()
        wiring.arena_fds[0] = os.dup(own) if own >= 0 else -1
        flags = encode_flags([fd >= 0 for fd in wiring.arena_fds])
        for follower in self._followers.values():
            follower.may_say = [Kind.STARTED]
            self._hand(follower, Kind.GO, flags, wiring.arenas())

    def confirm(self) -> None:
        """Waits until every engine runs, and says so to the followers."""
        self._hear(self._followers.values(), Kind.STARTED)
        if self._line is not None:
            self._line.say(Kind.STARTED)
            self._line.expect(Kind.DONE, STEP_SECONDS + 3 * GRACE_SECONDS)
        for follower in self._followers.values():
            follower.connection.say(Kind.DONE)

    def _hand(self, follower: _Follower, kind: Kind, body: bytes, fds: list[int]) -> None:
        follower.connection.say(kind, body)
        deadline = time.monotonic() + STEP_SECONDS
        sent = self._loop.run_until(follower.connection.has_sent_all, deadline)
        try:
            if not sent:
                raise ProtocolError("no answer in time")
            send_descriptors(follower.connection.sock, fds, deadline)
        except ProtocolError as error:
            raise HorovodInternalError(lost(follower, str(error))) from None

    # ---- The end of an attempt ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> BaseException:
        """Tells the reason to all others.

        Returns:
            The error to raise: what all ranks raise, if another one was quicker.
        """
        self._be_deaf()
        if self._line is not None:
            error = self._line.fail(error)
        reason = encode_error(error, self._rank.place)
        for follower in self._followers.values():
            if follower.connection.is_open():
                follower.connection.say(Kind.FAILED, reason)
        # Who presses Ctrl-C does not want to wait.
        if self._gathering and isinstance(error, Exception) and not self._has_lost_a_rank:
            missing = self._rank.place.local_size - 1 - len(self._followers) - self._sent_away
            self._latecomers.tell(self._loop, reason, missing, self._deadline)
        return error

    def _be_deaf(self) -> None:
        """Whatever else goes wrong now is a consequence."""
        self._failing = True
        for follower in (*self._followers.values(), *self._left.values()):
            ignore(follower.connection)
            if follower.pidfd >= 0:
                self._loop.forget(follower.pidfd)


@contextlib.contextmanager
def lead(rank: Rank, call_server: Callable[[], ServerLine] | None) -> Iterator[tuple[Wiring, Callable[[], None]]]:
    """Waits for the other ranks and brings them to GO; see meeting.meet.

    Args:
        rank: This one.
        call_server: Begins to connect to the server, if there are other hosts.
    """
    with contextlib.ExitStack() as resources:
        leader = Leader(rank)
        resources.callback(leader.close)
        try:
            if call_server is not None:
                leader.call(call_server)
            leader.gather()
            table = leader.agree()
            host = table.host_of[rank.place.rank]
            wiring = Wiring.make(table, host, rank.hello.configuration.cache_capacity)
            resources.callback(wiring.close)
            leader.hand_over(wiring, host)
            leader.link(wiring)
            leader.go(wiring)
            yield wiring, leader.confirm
        except BaseException as error:
            final = leader.fail(error)
            if final is error:
                raise
            raise final from None


def _is_closed(connection: Connection) -> bool:
    """Whether the other side has gone away."""
    if not connection.is_open():
        return True
    try:
        return not connection.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_local(claim: Claim) -> bool:
    return claim.purpose is Purpose.LOCAL
