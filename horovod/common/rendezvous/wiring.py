"""What the engine of a rank needs to reach the others."""

import os
from dataclasses import dataclass, field

from horovod import _core
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.descriptors import open_pidfd
from horovod.common.rendezvous.messages import WiringNote
from horovod.common.rendezvous.table import Table


@dataclass
class Wiring:
    """Everything that a meeting makes; the descriptors are closed with the meeting.

    Attributes:
        table: All hosts and ranks.
        nonce: A number that the segment holds, to know it by.
        segment_fd: The memory that the ranks of this host share.
        alive_fds: By local rank, a pidfd; -1 where there is none.
        doorbells: Two for each local rank.
        arena_fds: By local rank, memory that the others may read; -1 where there is none.
        links: By rank, a connected socket, non-blocking; -1 for ranks of this host.
        controls: By host, on rank 0 a connection to the local rank 0 of each other host; on those, at index 0, to rank
            0; otherwise -1.
        sessions: By descriptor, what encrypts those of these connections that are encrypted.
    """

    table: Table
    nonce: int
    segment_fd: int = -1
    alive_fds: list[int] = field(default_factory=list)
    doorbells: list[int] = field(default_factory=list)
    arena_fds: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    controls: list[int] = field(default_factory=list)
    sessions: dict[int, _core.TlsSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begins without connections."""
        self.links = self.links or [-1] * self.table.size
        self.controls = self.controls or [-1] * len(self.table.hosts)

    @classmethod
    def make(cls, table: Table, host: int, cache_capacity: int) -> "Wiring":
        """Makes the segment of a host and the descriptors around it.

        Raises:
            HorovodInternalError: The system refused.
        """
        pids = [table.pids[rank] for rank in table.ranks_of(host)]
        wiring = cls(table, int.from_bytes(os.urandom(8), "little"), arena_fds=[-1] * len(pids))
        try:
            wiring.segment_fd = _core.segment_create(
                len(pids), table.size, cache_capacity, table.generation, wiring.nonce
            )
            for _ in range(2 * len(pids)):
                wiring.doorbells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            wiring.alive_fds.extend(open_pidfd(pid) for pid in pids)
        except OSError as error:
            wiring.close()
            raise HorovodInternalError(
                f"init: can't make the descriptors for {len(pids)} ranks: {error.strerror}. "
                "If it is the limit of open files, raise it (ulimit -n)."
            ) from None
        except BaseException:
            wiring.close()
            raise
        return wiring

    def take(self, links: list[int], controls: list[int], sessions: dict[int, _core.TlsSession]) -> None:
        """Takes over the connections with other hosts."""
        self.links, self.controls, self.sessions = links, controls, sessions

    def sessions_of(self, fds: list[int]) -> list[_core.TlsSession | None]:
        """What encrypts some connections; None where nothing does."""
        return [self.sessions.get(fd) for fd in fds]

    def note(self, host: int) -> WiringNote:
        """What is said of the descriptors when they are handed over."""
        pids = [self.table.pids[rank] for rank in self.table.ranks_of(host)]
        return WiringNote(self.table.generation, self.nonce, pids, [fd >= 0 for fd in self.alive_fds])

    def descriptors(self) -> list[int]:
        """What WIRING hands over: segment, doorbells, then the pidfds that exist."""
        return [fd for fd in (self.segment_fd, *self.doorbells, *self.alive_fds) if fd >= 0]

    def arenas(self) -> list[int]:
        """What GO hands over: the arenas that exist."""
        return [fd for fd in self.arena_fds if fd >= 0]

    def close(self) -> None:
        """Closes all descriptors."""
        connections = [fd for fd in (*self.links, *self.controls) if fd >= 0]
        for fd in self.descriptors() + self.arenas() + connections:
            os.close(fd)
        self.segment_fd, self.doorbells, self.alive_fds, self.arena_fds = -1, [], [], []
        self.links, self.controls, self.sessions = [], [], {}
