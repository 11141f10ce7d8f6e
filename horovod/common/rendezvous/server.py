"""How the hosts of a job meet: the rendezvous server.

It runs in the launcher, or in rank 0's process where there is no launcher (hosting.py). Only the leader of each host
(its local rank 0) talks to it, so it has as many connections as there are hosts; followers talk to their leader
(leader.py). The table of all ranks goes to a few hosts, which pass it on (tree.py). One attempt:

    leader                              server
    HELLO (its place, its time)    -->  at once, while it still waits for the ranks of its host
                                   <--  ACCEPTED (seconds that the server will still wait)
    REPORT (all ranks of the host) -->  until every rank is there, once, or the time is over
                                   <--  TABLE (generation, hosts, ranks, where each listens), or SOURCE (who has it)
    its ranks connect to all others
    LINKED                         -->  all linked
                                   <--  GO
    its ranks start their engines
    STARTED                        -->  all started
                                   <--  DONE

State: an attempt begins with the first HELLO after the end of the one before it, and is *gathering*, *linking* or
*starting*, which is what all its leaders are asked for next. It ends with DONE or FAILED, said to all its leaders at
once.

What keeps it safe
  - Who is to be heard has proved the key (door.py), and is heard by nobody else where libssl is (encryption.py); its
    place in the job must be in no other's way.
  - The first reason to fail, from whichever side, ends the attempt, and all leaders get that one reason in the same
    words, also the one who gave it: so all ranks raise the same error. A leader that closes its connection has died.
  - Every state has a deadline. Leaders have earlier ones for what they wait for, and know more about it: so the
    server's strike only if a leader does not answer at all.
  - A leader whose attempt has ended has nothing to do with the next one: its connection belonged to that attempt.
  - The generation is greater than any that a rank has ever taken part in.
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous import tree
from horovod.common.rendezvous.addresses import endpoint_of
from horovod.common.rendezvous.attempt import STEPS, Attempt, Leader, State
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.door import Door
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.encryption import Encryption, check_alike, find_encryption
from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import (
    HostHello,
    Kind,
    Report,
    decode_error,
    encode_accepted,
    encode_error,
    read_version,
)
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.refusals import Refusals
from horovod.common.rendezvous.table import Host, check_host, check_members, check_version, make_table
from horovod.common.rendezvous.times import GRACE_SECONDS, STEP_SECONDS

# How long a leader may take to hear the end of an attempt.
_GOODBYE_SECONDS = 5.0


class RendezvousServer:
    """The server of one job, for as many attempts as it makes.

    Attributes:
        loop: In which it runs.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        host_of_rank: Sequence[str] = (),
        tell: Callable[[str], object] = lambda _text: None,
        *,
        once: bool = False,
        encryption: Encryption | None = None,
    ) -> None:
        """Serves at a socket that listens, which it takes over.

        Args:
            listener: The socket.
            key: What leaders have to prove; see `host_key`.
            host_of_rank: The hosts by rank, if they are known: to say what is missing.
            tell: Called with what an administrator should know.
            once: To serve one attempt only. Who comes after it finds nobody, and tries again until the next server is
                there.
            encryption: How its connections are encrypted; by default as its environment allows.
        """
        self.loop = Loop()
        self._once = once
        self._encryption = find_encryption() if encryption is None else encryption
        self._host_of_rank = host_of_rank
        self._where = endpoint_of(listener) if listener.family != socket.AF_UNIX else "its address"
        self._attempt: Attempt | None = None
        self._last_failure = ""
        self._goodbyes: list[Connection] = []
        self._door = Door(
            self.loop,
            listener,
            key,
            admits=_is_for_host,
            on_guest=self._on_hello,
            on_refused=Refusals("rendezvous", tell).add,
            max_strangers=max(MAX_STRANGERS, 2 * len(set(host_of_rank))),
            encryption=self._encryption,
        )

    def fileno(self) -> int:
        """Readable when `step` has something to do, besides what is due at `next_time`."""
        return self.loop.fileno()

    def next_time(self) -> float | None:
        """When `step` has to be called next, if nothing happens before."""
        return self.loop.next_time()

    def step(self, deadline: float | None = 0.0) -> None:
        """Does what there is to do, after waiting for it until the deadline: by default not at all."""
        self.loop.step(deadline)

    def is_idle(self) -> bool:
        """Whether no attempt is under way and everyone has heard the end of the last one."""
        self._goodbyes = [connection for connection in self._goodbyes if connection.is_open()]
        return self._attempt is None and not self._goodbyes

    def give_up(self, reason: str) -> None:
        """Ends an attempt that is under way."""
        self._fail_with(HorovodInternalError(reason))

    def close(self) -> None:
        """Stops serving; who is connected loses the connection."""
        self._door.close()
        for leader in self._attempt.leaders.values() if self._attempt else ():
            leader.connection.close()
        for connection in self._goodbyes:
            connection.close()
        self.loop.close()

    # ---- What comes in -----------------------------------------------------------------------------------------------

    def _on_hello(self, connection: Connection, claim: Claim, kind: Kind, body: bytes) -> None:
        if kind is not Kind.HELLO:
            raise ProtocolError(f"expected HELLO, got {kind.name}")
        attempt = self._attempt
        first = attempt.first().hello if attempt else None
        try:
            if first is not None:
                check_version(f"rank {claim.sender}", read_version(body), first.place, first.version)
            hello = HostHello.decode(body)
            own = self._encryption.covers(claim.purpose)
            check_alike(hello.place, claim.encrypts, "the rendezvous server", own)
            if hello.place.rank != claim.sender:
                raise ProtocolError(f"rank {claim.sender} says that it is rank {hello.place.rank}")
            former = attempt.leaders.get(hello.place.rank) if attempt else None
            if former is not None and (former.hello.pid, former.hello.place) == (hello.pid, hello.place):
                # The same process has come again, before we noticed that its earlier connection is lost.
                self._on_lost(former, "it has begun again")
            self._check_newcomer(hello)
        except (ValueError, HorovodInternalError) as error:
            # It takes no part in the attempt, but the contradiction is the end of it.
            self._say_goodbye([connection], Kind.FAILED, encode_error(error, "the server"))
            self._fail_with(error)
            return
        attempt = self._attempt_or_new(hello)
        leader = Leader(hello, connection)
        attempt.add(leader)
        connection.on_frame = lambda kind, body: self._on_frame(leader, kind, body)
        connection.on_closed = lambda reason: self._on_lost(leader, reason)
        leader.connection.say(Kind.ACCEPTED, encode_accepted(max(0.0, attempt.deadline - time.monotonic())))

    def _check_newcomer(self, hello: HostHello) -> None:
        attempt = self._attempt
        check_host(hello, attempt.in_the_way(hello) if attempt else [])
        if attempt is not None and attempt.state is not State.GATHERING:
            raise HorovodInternalError(
                f"init: {hello.place}, pid {hello.pid}, came when all ranks were there already. Each rank must be "
                "started once."
            )

    def _attempt_or_new(self, hello: HostHello) -> Attempt:
        if self._attempt is None:
            self._attempt = Attempt(hello.timeout)
            self._set_deadline(self._attempt, hello.timeout + GRACE_SECONDS)
        return self._attempt

    def _on_frame(self, leader: Leader, kind: Kind, body: bytes) -> None:
        attempt = self._attempt
        assert attempt is not None
        if kind is Kind.FAILED:
            decode_error(body)  # a reason that can't be read is none
            self._fail(body)
            return
        if leader.has_said_it or kind is not STEPS[attempt.state][0]:
            raise ProtocolError(f"it said {kind.name} when the job was {attempt.state.value}")
        if kind is Kind.REPORT:
            report = Report.decode(body)
            holders = {attempt.holders.get(member.rank) for member in report.members}
            others = [Host(other.hello, other.report) for other in holders if other and other.report]
            if not self._check(lambda: check_members(Host(leader.hello, report), others)):
                return
            leader.report = report
            attempt.holders.update((member.rank, leader) for member in report.members)
        leader.has_said_it = True
        self._go_on(attempt)

    def _on_lost(self, leader: Leader, reason: str) -> None:
        self._fail_with(HorovodInternalError(lost(leader, reason)))

    # ---- What becomes of it ------------------------------------------------------------------------------------------

    def _go_on(self, attempt: Attempt) -> None:
        """Takes the next step if everyone has said what it needs."""
        if not all(leader.has_said_it for leader in attempt.leaders.values()):
            return
        _, answer, following = STEPS[attempt.state]
        if following is None:
            self._end(answer, b"")
            return
        leaders = [leader for _, leader in sorted(attempt.leaders.items())]
        answers: Sequence[tuple[Kind, bytes]] = [(answer, b"")] * len(leaders)
        if attempt.state is State.GATHERING:
            if not attempt.is_everyone_there():
                return
            try:
                answers = tree.messages_for_hosts(make_table(attempt.hosts()))
            except (ValueError, HorovodInternalError) as error:
                self._fail_with(error)
                return
        attempt.state = following
        for leader, (kind, body) in zip(leaders, answers, strict=True):
            leader.has_said_it = False
            leader.connection.say(kind, body)
        self._set_deadline(attempt, STEP_SECONDS + 2 * GRACE_SECONDS)

    def _check(self, check: Callable[[], None]) -> bool:
        """Runs a check; what it finds ends the attempt."""
        try:
            check()
        except (ValueError, HorovodInternalError) as error:
            self._fail_with(error)
            return False
        return True

    def _set_deadline(self, attempt: Attempt, seconds: float) -> None:
        if attempt.timer is not None:
            attempt.timer.cancel()
        attempt.timer = self.loop.at(time.monotonic() + seconds, lambda: self._give_up_on_late(attempt))

    def _give_up_on_late(self, attempt: Attempt) -> None:
        text = attempt.who_is_late(self._host_of_rank, self._where)
        if self._last_failure:
            text += f" The attempt before ended with: {self._last_failure}"
        self._fail_with(HorovodInternalError(text))

    def _fail_with(self, error: Exception) -> None:
        self._fail(encode_error(error, "the server"))

    def _fail(self, reason: bytes) -> None:
        """Ends the attempt for everyone who takes part in it."""
        self._last_failure = str(decode_error(reason))
        self._end(Kind.FAILED, reason)

    def _end(self, kind: Kind, body: bytes) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.timer is not None:
            attempt.timer.cancel()
        if kind is Kind.DONE:
            self._last_failure = ""
        if self._once:
            self._door.close()
        self._say_goodbye([leader.connection for leader in attempt.leaders.values()], kind, body)

    def _say_goodbye(self, connections: Iterable[Connection], kind: Kind, body: bytes) -> None:
        self._goodbyes = [connection for connection in self._goodbyes if connection.is_open()]
        for connection in connections:
            connection.end_after(kind, body, _GOODBYE_SECONDS)
            self._goodbyes.append(connection)


def host_key(secret: bytes, job_id: str) -> Key:
    """What leaders and the server prove to each other, and ranks of different hosts."""
    return Key(secret, b"host rendezvous\0" + job_id.encode())


def lost(who: object, reason: str) -> str:
    """The words for a process whose connection has ended: the same wherever it is noticed."""
    return f"init: lost {who}: {reason}. It most likely died or was stopped; see its output."


def _is_for_host(claim: Claim) -> bool:
    return claim.purpose is Purpose.HOST
