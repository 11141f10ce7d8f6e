"""All ranks of a job in one process, a thread for each: they meet by the very code that `hvd.init()` runs.

Real are the rendezvous server and its connections, the table and how hosts pass it on, the meeting within each host
with its Unix socket, shared memory and descriptors, rank 0's control connections, all proofs and all encryption. Left
out is

  - the engine: a rank confirms that it runs where `init` would have started it, and has no memory for tensors to share,
    of which there is one a process.
  - most connections for data: every pair of ranks on different hosts has one, for 1,000 ranks half a million. Here only
    the leaders have them that get the table from each other, since a leader passes it on until those who ask are linked
    to it (`_few_ends`). The server has nothing to do with them but to wait for the word that they are there.

Threads instead of processes make two differences that are made up for:

  - A process has a table of descriptors, and a limit for it, of its own; so has each thread here (`_own_descriptors`).
  - A leader has a core. Here all share one, and the interpreter's lock, so none could do what it must in the seconds
    that it has: their clock goes as much slower as there are more of them (`one_core`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

from horovod import _core
from horovod.common.environment import read_identity, read_network, read_tunables
from horovod.common.rendezvous import mesh, tree
from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.hosting import THREAD_NAME, serving
from horovod.common.rendezvous.meeting import meet
from horovod.common.rendezvous.proof import Purpose
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.common.rendezvous.table import Table

SECRET, JOB = "the key", "the job"
KEY = host_key(SECRET.encode(), JOB)
_START_TIMEOUT = 120.0
_CACHE_CAPACITY = 16  # names of tensors: their shared memory is not used here

# The ranks that one core plays in time; with more of them the clock goes slower.
_RANKS_IN_TIME = 50
# A thread that waits for the interpreter's lock asks for it so often; a thousand of them would do little else.
_SWITCH_SECONDS = 0.5
# Files beside those of ranks; and of a rank, beside those for each rank of its host (two doorbells and a pidfd).
_MORE_FILES, _FILES_OF_A_RANK = 1000, 16
_CLONE_FILES = 0x400
_STANDARD_DESCRIPTORS = 3

# In Linux's struct tcp_info (<linux/tcp.h>): bytes that the other side has acknowledged, and that it has sent.
_TCP_INFO = struct.Struct("=120x2Q")


@dataclass
class Traffic:
    """What came to a listening socket.

    Attributes:
        connections: That were accepted.
        most_open: Of these, at the same time.
        bytes_sent: Over those that are closed, as TCP counts them: all of proofs, encryption and messages, without the
            headers of packets.
        bytes_received: The same in the other direction.
    """

    connections: int = 0
    most_open: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    _open: set[socket.socket] = field(default_factory=set)

    def begin(self, connection: socket.socket) -> None:
        """One was accepted."""
        self._open.add(connection)
        self.connections += 1
        self.most_open = max(self.most_open, len(self._open))

    def end(self, connection: socket.socket) -> None:
        """One is about to be closed."""
        self._open.remove(connection)
        sent, received = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        self.bytes_sent += sent
        self.bytes_received += received


class CountingListener(socket.socket):
    """A TCP socket that listens, and counts what comes of it."""

    traffic: Traffic

    @classmethod
    def on(cls, listener: socket.socket) -> Self:
        """Takes a listening socket over."""
        counting = cls(fileno=listener.detach())
        counting.traffic = Traffic()
        return counting

    def accept(self) -> tuple[socket.socket, Any]:
        """As that of a socket."""
        plain, address = super().accept()
        connection = _Counted(fileno=plain.detach())
        connection.traffic = self.traffic
        self.traffic.begin(connection)
        return connection, address


class _Counted(socket.socket):
    traffic: Traffic

    def close(self) -> None:
        if self.fileno() >= 0:
            self.traffic.end(self)
        super().close()


@dataclass
class Outcome:
    """How a job met.

    Attributes:
        tables: What each rank got, by rank.
        errors: What ranks have raised instead.
        seconds: From the start of the first one until the end of the last one.
    """

    tables: dict[int, Table] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    seconds: float = 0.0


def hosts_of_ranks(hosts: int, local_size: int) -> list[str]:
    """The host of each rank, where all hosts have equally many."""
    return [f"host{rank // local_size}" for rank in range(hosts * local_size)]


def processor_time_of_server() -> float:
    """The seconds that the server's thread has had a core, while it serves."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == THREAD_NAME)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@contextlib.contextmanager
def counted_server(host_of_rank: list[str]) -> Iterator[tuple[tuple[str, int], Traffic]]:
    """Serves the rendezvous; yields its address, and what will have been counted there at the end of the block."""
    listener = CountingListener.on(listen_at("127.0.0.1", 0))
    with serving(RendezvousServer(listener, KEY, host_of_rank)):
        yield listener.getsockname(), listener.traffic


def meet_all(hosts: int, local_size: int, server: tuple[str, int]) -> Outcome:
    """Has the ranks of a job meet, each host with equally many; returns when all have, or failed to."""
    outcome = Outcome()

    def take_part(rank: int) -> None:
        try:
            _own_descriptors()
            environ = _environment(rank, hosts, local_size, server)
            whole = read_identity(environ), read_network(environ), read_tunables(environ)
            with meet(*whole, process_sets=[], last_generation=0) as meeting:
                meeting.confirm()
                outcome.tables[rank] = meeting.wiring.table
        except BaseException as error:
            outcome.errors[rank] = error

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(hosts * local_size)]
    gc.disable()  # else a thread may close what another one has forgotten, by a number that means something else to it
    with contextlib.ExitStack() as changed:
        changed.callback(gc.enable)
        changed.enter_context(mock.patch.object(mesh, "ends_of", _few_ends))
        changed.enter_context(mock.patch.object(_core, "arena_fd", lambda: -1))
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outcome.seconds = time.perf_counter() - start
    return outcome


@contextlib.contextmanager
def one_core(ranks: int) -> Iterator[None]:
    """Lets one core play so many ranks, and their server."""
    real, begin, interval = time.monotonic, time.monotonic(), sys.getswitchinterval()
    slower = max(1.0, ranks / _RANKS_IN_TIME)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for the server
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with mock.patch.object(time, "monotonic", lambda: begin + (real() - begin) / slower):
            yield
    finally:
        sys.setswitchinterval(interval)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def _environment(rank: int, hosts: int, local_size: int, server: tuple[str, int]) -> dict[str, str]:
    """What the launcher would tell a rank."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(hosts * local_size),
        "HOROVOD_LOCAL_RANK": str(rank % local_size),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(rank // local_size),
        "HOROVOD_CROSS_SIZE": str(hosts),
        "HOROVOD_HOSTNAME": f"host{rank // local_size}",
        "HOROVOD_JOB_ID": JOB,
        "HOROVOD_SECRET_KEY": SECRET,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server[1]),
        "HOROVOD_RENDEZVOUS_SERVER": "launcher",
        "HOROVOD_START_TIMEOUT": str(_START_TIMEOUT),
        "HOROVOD_CACHE_CAPACITY": str(_CACHE_CAPACITY),
    }


def files_needed(hosts: int, local_size: int) -> int:
    """The limit of open files that such a job needs: for the server, or for all where threads share a table."""
    allowed: list[bool] = []
    thread = threading.Thread(target=lambda: allowed.append(_own_descriptors()))
    thread.start()
    thread.join()
    return _MORE_FILES + (hosts if allowed[0] else hosts * local_size * (3 * local_size + _FILES_OF_A_RANK))


def _own_descriptors() -> bool:
    """Gives the calling thread a table of descriptors of its own, with none but the standard ones.

    Returns:
        False where that is not allowed, as in some containers: then all share one, and its limit counts for all.
    """
    if ctypes.CDLL(None).unshare(_CLONE_FILES) != 0:
        return False
    os.closerange(_STANDARD_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return True


_all_ends = mesh.ends_of


def _few_ends(rank: int, table: Table) -> list[tuple[Purpose, int]]:
    """As mesh.ends_of, without the connections for data but those along which leaders get the table."""
    leaders, host = table.leaders(), table.host_of[rank]
    if leaders[host] != rank:
        return []
    related = [leaders[other] for other in tree.asked_by(host, len(leaders))]
    if (source := tree.source_of(host)) is not None:
        related.append(leaders[source])
    controls = [(purpose, peer) for purpose, peer in _all_ends(rank, table) if purpose is Purpose.CONTROL]
    return [(Purpose.DATA, peer) for peer in sorted(related)] + controls
