"""One attempt of the hosts of a job to meet: who takes part, and how far they are. server.py has the protocol."""

import enum
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.loop import Timer
from horovod.common.rendezvous.messages import HostHello, Kind, Report
from horovod.common.rendezvous.table import Host


class State(enum.Enum):
    """What the leaders of an attempt do."""

    GATHERING = "gathering"
    LINKING = "linking"
    STARTING = "starting"


# What leaders are asked for in a state, what they get when all have said it, and what comes then.
STEPS = {
    State.GATHERING: (Kind.REPORT, Kind.TABLE, State.LINKING),
    State.LINKING: (Kind.LINKED, Kind.GO, State.STARTING),
    State.STARTING: (Kind.STARTED, Kind.DONE, None),
}


@dataclass(eq=False)
class Leader:
    """A leader that has arrived."""

    hello: HostHello
    connection: Connection
    report: Report | None = None
    has_said_it: bool = False  # what it is asked for in the present state

    def __str__(self) -> str:
        """Its rank and process in words."""
        return f"{self.hello.place}, pid {self.hello.pid}"


class Attempt:
    """Those who take part in an attempt, and how far they are."""

    def __init__(self, timeout: float) -> None:
        """Begins without anybody, who have so many seconds to come."""
        self.state = State.GATHERING
        self.leaders: dict[int, Leader] = {}  # by rank
        self.leader_of_host: dict[str, Leader] = {}
        self.holders: dict[int, Leader] = {}  # by rank, of all ranks that were reported
        self.timeout = timeout
        # Leaders give up after their own time, with what they know; the server after them.
        self.deadline = time.monotonic() + timeout
        self.timer: Timer | None = None

    def hosts(self) -> list[Host]:
        """Those whose ranks are all there, in the order of their ranks."""
        leaders = [leader for _, leader in sorted(self.leaders.items())]
        return [Host(leader.hello, leader.report) for leader in leaders if leader.report]

    def first(self) -> Leader:
        """The one that came first; there is always one."""
        return next(iter(self.leaders.values()))

    def add(self, leader: Leader) -> None:
        """Takes one in."""
        self.leaders[leader.hello.place.rank] = leader
        self.leader_of_host[leader.hello.place.host] = leader

    def in_the_way(self, hello: HostHello) -> list[HostHello]:
        """Those whom a newcomer may contradict: the first one, who stands for all, its namesake and its double."""
        candidates = (self.first(), self.leaders.get(hello.place.rank), self.leader_of_host.get(hello.place.host))
        return [leader.hello for leader in candidates if leader is not None]

    def is_everyone_there(self) -> bool:
        """Whether every rank of the job was reported."""
        return len(self.holders) == self.first().hello.place.size

    def who_is_late(self, host_of_rank: Sequence[str], where: object) -> str:
        """Who keeps the others waiting, in words.

        Args:
            host_of_rank: The hosts by rank, if they are known.
            where: The address at which leaders are awaited.
        """
        late = [str(leader) for leader in self.leaders.values() if not leader.has_said_it]
        if self.state is not State.GATHERING:
            return (
                f"init: {', '.join(late[:6])}{', ...' if len(late) > 6 else ''} did not get ready in time (the job was "
                f"{self.state.value}). It was most likely stopped; see its output."
            )
        if self.is_everyone_there():
            return f"init: {', '.join(late[:6])} did not report its ranks in time, and all ranks are there without it."
        arrived = [
            f"rank {ranks_in_words([member.rank for member in host.report.members])} of host {host.leader.host}"
            for host in self.hosts()
        ]
        alone = [leader for leader in self.leaders.values() if leader.report is None]
        arrived += [f"only {leader} of host {leader.hello.place.host}" for leader in alone]
        missing = _gaps(self.first().hello.place.size, self.holders)
        text = (
            f"init: {_with_hosts(missing, host_of_rank)} did not arrive within {self.timeout:g} s; arrived: "
            f"{'; '.join(arrived)}. If they only need longer, raise HOROVOD_START_TIMEOUT."
        )
        if sum(map(len, missing)) > sum(leader.hello.place.local_size for leader in alone):
            text += f" If they wait too, their hosts do not reach {where}: do firewalls let TCP through to it?"
        return text


def _gaps(size: int, ranks: Iterable[int]) -> list[range]:
    """The ranks below `size` that are not there. A size is a number that another host has said: it costs nothing."""
    gaps, begin = [], 0
    for rank in [*sorted(ranks), size]:
        if rank > begin:
            gaps.append(range(begin, rank))
        begin = rank + 1
    return gaps


def _with_hosts(gaps: Sequence[range], host_of_rank: Sequence[str]) -> str:
    if len(host_of_rank) < gaps[-1].stop:
        return f"rank {_ranges_in_words(gaps)}"
    by_host: dict[str, list[int]] = {}
    for rank in itertools.chain(*gaps):
        by_host.setdefault(host_of_rank[rank], []).append(rank)
    texts = [f"rank {ranks_in_words(its_ranks)} of host {host}" for host, its_ranks in by_host.items()]
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ascending ranks, such as "0-3, 7"."""
    ranges: list[range] = []
    for rank in ranks:
        if ranges and ranges[-1].stop == rank:
            ranges[-1] = range(ranges[-1].start, rank + 1)
        else:
            ranges.append(range(rank, rank + 1))
    return _ranges_in_words(ranges)


def _ranges_in_words(ranges: Iterable[range]) -> str:
    return ", ".join(str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}" for some in ranges)
