"""What the hosts of a job say of themselves -> the one table that all of them get, or their contradiction."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.common.environment import UNTOLD
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.encoding import ProtocolError, Reader, Writer
from horovod.common.rendezvous.encryption import check_alike
from horovod.common.rendezvous.messages import Configuration, Endpoint, HostHello, Member, Place, Report


@dataclass(frozen=True)
class Table:
    """All hosts and ranks of one generation. Hosts are in the order of their lowest rank, the rest is by rank."""

    generation: int
    hosts: list[str]
    host_of: list[int]
    pids: list[int]
    endpoints: list[Endpoint]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.host_of)

    def ranks_of(self, host: int) -> list[int]:
        """The ranks of a host, by local rank."""
        return [rank for rank, its_host in enumerate(self.host_of) if its_host == host]

    def leaders(self) -> list[int]:
        """The lowest rank of each host, which is its local rank 0."""
        lowest: dict[int, int] = {}
        for rank, host in enumerate(self.host_of):
            lowest.setdefault(host, rank)
        return list(lowest.values())  # hosts are in the order of these

    def local_rank_of(self, rank: int) -> int:
        """The local rank of a rank: its number among those of its host."""
        return self.ranks_of(self.host_of[rank]).index(rank)

    def cross_of(self, rank: int) -> tuple[int, int]:
        """The cross rank and size of a rank: its host's number among those with that local rank, and their number."""
        local_rank = self.local_rank_of(rank)
        hosts = [host for host, count in sorted(Counter(self.host_of).items()) if count > local_rank]
        return hosts.index(self.host_of[rank]), len(hosts)

    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len(set(Counter(self.host_of).values())) == 1

    def describe(self, rank: int) -> str:
        """A rank in words."""
        host = self.host_of[rank]
        ranks = self.ranks_of(host)
        return f"rank {rank} (local rank {ranks.index(rank)} of {len(ranks)} on host {self.hosts[host]})"

    def encode(self) -> bytes:
        """Makes the body of TABLE."""
        writer = Writer().number("Q", self.generation)
        writer.each(self.hosts, writer.text).numbers("I", self.host_of).numbers("I", self.pids)
        return writer.each(self.endpoints, lambda endpoint: endpoint.write(writer)).bytes()

    @classmethod
    def decode(cls, body: bytes) -> "Table":
        """Reads the body of TABLE.

        Raises:
            ProtocolError: It is not one, or contradicts itself.
        """
        reader = Reader(body)
        generation, hosts = reader.integer("Q"), reader.each(reader.text)
        host_of, pids = reader.numbers("I"), reader.numbers("I")
        endpoints = reader.each(lambda: Endpoint.read(reader))
        reader.end()
        if not len(host_of) == len(pids) == len(endpoints):
            raise ProtocolError(f"a table of {len(host_of)} ranks, {len(pids)} pids and {len(endpoints)} endpoints")
        if list(dict.fromkeys(host_of)) != list(range(len(hosts))):
            raise ProtocolError("a table whose hosts are not in the order of their lowest ranks")
        return cls(generation, hosts, host_of, pids, endpoints)


@dataclass(frozen=True)
class Host:
    """What a leader has said to the server."""

    hello: HostHello
    report: Report

    @property
    def leader(self) -> Place:
        """The place of its local rank 0."""
        return self.hello.place


def check_version(place: object, version: str, other: object, other_version: str) -> None:
    """Checks that two sides speak the same language.

    Raises:
        HorovodInternalError: They don't.
    """
    if version != other_version:
        raise HorovodInternalError(
            f"init: {place} runs Horovod {version}, {other} {other_version}. All ranks need the same version."
        )


def check_host(new: HostHello, others: Sequence[HostHello]) -> None:
    """Checks that a host that arrives does not contradict those that have arrived.

    Raises:
        HorovodInternalError, ValueError: It does.
    """
    place = new.place
    if place.local_rank != 0:
        raise ValueError(f"init: {place}, pid {new.pid}, reports for its host; expected its local rank 0.")
    if not place.rank < place.size or not 0 < place.local_size < place.size:
        raise ValueError(f"init: {place}, pid {new.pid}, can't be one of several hosts of {place.size} ranks.")
    for other in others:
        check_version(place, new.version, other.place, other.version)
        if place.size != other.place.size:
            raise ValueError(
                f"init: HOROVOD_SIZE is {place.size} on {place} and {other.place.size} on {other.place}; all ranks "
                "need the same."
            )
        if place.rank == other.place.rank:
            raise HorovodInternalError(
                f"init: rank {place.rank} is there twice: pid {other.pid} on host {other.place.host} and pid {new.pid} "
                f"on host {place.host}. Each rank must be started once."
            )
        if place.host == other.place.host:
            raise ValueError(
                f"init: rank {other.place.rank} (pid {other.pid}) and rank {place.rank} (pid {new.pid}) both are local "
                f"rank 0 of host {place.host}. Ranks of one host need different HOROVOD_LOCAL_RANK, different hosts "
                "different HOROVOD_HOSTNAME."
            )


def check_members(new: Host, others: Sequence[Host]) -> None:
    """Checks that the ranks of a host are such, and those of no other.

    Raises:
        HorovodInternalError, ValueError: They are not.
    """
    leader, ranks = new.leader, [member.rank for member in new.report.members]
    if len(ranks) != leader.local_size or ranks[0] != leader.rank or max(ranks) >= leader.size:
        raise ValueError(
            f"init: host {leader.host} reports the ranks {ranks}; expected {leader.local_size} ranks below "
            f"{leader.size}, first of all rank {leader.rank}, who reports."
        )
    check_ascending(ranks, leader.host)
    for other in others:
        twice = sorted(set(ranks) & {member.rank for member in other.report.members})
        if twice:
            raise HorovodInternalError(
                f"init: rank {twice[0]} is there twice: on host {other.leader.host} (ranks "
                f"{[member.rank for member in other.report.members]}) and on host {leader.host} (ranks {ranks}). "
                "Each rank must be started once."
            )


def check_ascending(ranks: Sequence[int], host: str) -> None:
    """Checks the ranks of a host, given in the order of their local ranks.

    Raises:
        ValueError: They are not in the order of their ranks.
    """
    for local_rank in range(1, len(ranks)):
        if ranks[local_rank] <= ranks[local_rank - 1]:
            raise ValueError(
                f"init: on host {host} local rank {local_rank - 1} is rank {ranks[local_rank - 1]} and local rank "
                f"{local_rank} is rank {ranks[local_rank]}: HOROVOD_LOCAL_RANK must ascend with HOROVOD_RANK."
            )


def check_configuration(rank: int, wanted: Configuration, other_rank: int, other: Configuration) -> None:
    """Checks that two ranks were configured alike.

    Raises:
        ValueError: They were not.
        HorovodInternalError: One of them can't encrypt.
    """
    if other.process_sets != wanted.process_sets:
        raise ValueError(
            "Attempted to register process set with mismatching size/values on different ranks: "
            f"rank {rank} gave {wanted.process_sets} to init, rank {other_rank} {other.process_sets}."
        )
    names = {False: "hierarchical", True: "ring"}
    for variable, value, other_value in (
        ("FUSION_THRESHOLD", wanted.fusion_threshold, other.fusion_threshold),
        ("CACHE_CAPACITY", wanted.cache_capacity, other.cache_capacity),
        ("ALLREDUCE", names[wanted.allreduce_ring], names[other.allreduce_ring]),
        ("ENCRYPT", int(wanted.encrypt), int(other.encrypt)),
    ):
        if value != other_value:
            raise ValueError(
                f"init: HOROVOD_{variable} is {value} on rank {rank} and {other_value} on rank {other_rank}; all "
                "ranks need the same."
            )
    check_alike(f"rank {rank}", wanted.can_encrypt, f"rank {other_rank}", other.can_encrypt)


def make_table(hosts: Sequence[Host]) -> Table:
    """Makes the table of hosts that have passed the checks above and hold every rank once.

    Raises:
        ValueError: They were configured differently, or count each other differently.
        HorovodInternalError: One of them can't encrypt.
    """
    ordered = sorted(hosts, key=lambda host: host.leader.rank)
    first = ordered[0]
    if first.leader.rank != 0:
        raise ValueError("init: rank 0 must be local rank 0 of its host.")
    for host in ordered[1:]:
        check_configuration(0, first.report.configuration, host.leader.rank, host.report.configuration)
    hosts_with = Counter(local_rank for host in ordered for local_rank in range(host.leader.local_size))
    hosts_before: Counter[int] = Counter()
    members: dict[int, tuple[int, Member]] = {}
    for index, host in enumerate(ordered):
        for local_rank, member in enumerate(host.report.members):
            _check_cross(host, local_rank, member, hosts_before[local_rank], hosts_with[local_rank])
            hosts_before[local_rank] += 1
            members[member.rank] = index, member
    by_rank = [members[rank] for rank in range(first.leader.size)]
    return Table(
        generation=1 + max(host.report.last_generation for host in ordered),
        hosts=[host.leader.host for host in ordered],
        host_of=[index for index, _ in by_rank],
        pids=[member.pid for _, member in by_rank],
        endpoints=[member.endpoint for _, member in by_rank],
    )


def _check_cross(host: Host, local_rank: int, member: Member, cross_rank: int, cross_size: int) -> None:
    if (member.cross_rank, member.cross_size) == UNTOLD:
        return  # The table tells it.
    for variable, value, expected in (
        ("CROSS_RANK", member.cross_rank, cross_rank),
        ("CROSS_SIZE", member.cross_size, cross_size),
    ):
        if value != expected:
            raise ValueError(
                f"init: HOROVOD_{variable} is {value} on rank {member.rank} (local rank {local_rank} on host "
                f"{host.leader.host}), expected {expected}: {cross_size} hosts have a local rank {local_rank}."
            )
