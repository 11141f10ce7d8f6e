"""Communicators of mpi4py, as init and ProcessSet take them.

The ranks of the job are those of the communicator. Before they meet (rendezvous/meeting.py), MPI tells them what
otherwise the environment does: who shares a host, where rank 0's host is, a name for the job, a new key. That is all
that MPI is used for; the engine has its own connections.

No exchange blocks, and each is watched: of a rank that does not come the others say so after a while. They happen over
a duplicate, so that neither what the script has under way nor what is left of an attempt that failed gets in between.
"""

import errno
import hashlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from horovod.common import schedulers
from horovod.common.environment import read, read_secret_key
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.common.rendezvous import addresses

_POLL_SECONDS = 0.001
_PORTS_TO_TRY = 20
# What rank 0 tells all is much less than this, but what goes wrong there may be longer: up to 12 bytes a character.
_TOLD_BYTES, _TROUBLE_LENGTH = 4096, 300
# A rank's sets: how many, and whether one of them is a communicator; then of each the lowest member, and a digest of
# all members.
_SETS, _MEMBERS = struct.Struct("=i?"), struct.Struct("=i32s")
_GIVEN_AS_LIST, _OUTSIDE, _NO_MEMBER = -1, -2, -3

# What belongs to exchanges that were given up: MPI may still write to their memory.
_given_up: list[Any] = []
# Duplicates that not all ranks have come to make yet: a communicator, what becomes its duplicate, and the request.
_unfinished: list[tuple[Any, Any, Any]] = []


class World:
    """The communicator whose ranks are those of the job, for the time of a block that all of them enter.

    Attributes:
        rank: This process's rank.
        size: The number of processes.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        """Checks the communicator.

        Args:
            comm: The communicator.
            timeout: How long to wait for the others, in seconds.

        Raises:
            ValueError: It can't be used.
        """
        from mpi4py import MPI

        if not MPI.Is_initialized():
            raise ValueError("init: MPI has not been initialized, which is needed for its communicators: MPI.Init().")
        if MPI.Is_finalized():
            raise ValueError("init: MPI has been finalized; its communicators can't be used any more.")
        if comm == MPI.COMM_NULL:
            raise ValueError("init: comm is MPI.COMM_NULL: this process is in none of the communicators.")
        if comm.Is_inter():
            raise ValueError("init: comm is an intercommunicator; its two groups have ranks of their own.")
        self._mpi = MPI
        self._given = comm
        self._timeout = timeout
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def __enter__(self) -> Self:
        """Begins. Raises HorovodInternalError if not all ranks come."""
        self._comm = self._duplicate()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends. After a failure the others may still be at it, so nothing is freed then."""
        if kind is None:
            self._comm.Free()
        else:
            _given_up.append(self._comm)

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The environment with those HOROVOD_* variables that follow from the communicator. All ranks must call it.

        HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT and a key of one's own are rank 0's to set.

        Raises:
            ValueError: MPI does not know the processes that were started.
            HorovodInternalError: Not all ranks came, or rank 0 can't be reached.
        """
        # Only who seems to be alone needs to know what another launcher has started.
        started = schedulers.complete(environ) if self._mpi.COMM_WORLD.Get_size() == 1 else {}
        if (read("HOROVOD_SIZE", started) or 1) > 1:
            raise ValueError(
                f"init(comm=...): {read('HOROVOD_SIZE', started)} processes were started, but MPI knows of one, this. "
                "Start the script with mpirun, or leave comm out: horovodrun needs no MPI."
            )
        hosts = self._gather(_host_digest(environ))
        own_host = hosts[self.rank]
        local_size = hosts.count(own_host)
        told = self._tell(_invitation(environ, local_size == self.size) if self.rank == 0 else None)
        completed = {
            **environ,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(hosts[: self.rank].count(own_host)),
            "HOROVOD_LOCAL_SIZE": str(local_size),
            # To be found out when the ranks meet.
            "HOROVOD_CROSS_RANK": "",
            "HOROVOD_CROSS_SIZE": "",
            "HOROVOD_RENDEZVOUS_SERVER": "rank0",
            **told,
        }
        if "HOROVOD_SECRET_KEY" in told:
            completed["HOROVOD_SECRET_KEY_FILE"] = ""
        return completed

    def sets_of_all(self, own: Sequence[ProcessSet]) -> list[ProcessSet]:
        """The process sets of all ranks, in the same order everywhere. All ranks must call it.

        Where the ranks give a list of ranks, that is one set. Where they give communicators, which mostly are the parts
        of a split one, each of these is a set: this rank's object stands for its own.

        Raises:
            ValueError: The ranks' sets do not go together.
            HorovodInternalError: Not all ranks came.
        """
        counts = [
            _SETS.unpack(said)
            for said in self._gather(_SETS.pack(len(own), any(entry.mpi_comm is not None for entry in own)))
        ]
        for rank, (count, _) in enumerate(counts):
            if count != counts[0][0]:
                raise ValueError(f"init: rank 0 gives {counts[0][0]} process sets, rank {rank} gives {count}.")
        if not any(has_communicators for _, has_communicators in counts):
            return list(own)
        said = self._gather(b"".join(_MEMBERS.pack(*self._members(entry)) for entry in own))
        found = []
        for index, entry in enumerate(own):
            members = [_MEMBERS.unpack_from(each, index * _MEMBERS.size) for each in said]
            found += self._sets_at(index, entry, members)
        return found

    def _sets_at(self, index: int, own: ProcessSet, members: list[tuple[int, bytes]]) -> list[ProcessSet]:
        """The sets that the ranks give at one place of their lists."""
        what = f"init: process_sets[{index}]"
        lowest = [first for first, _ in members]
        if all(first == _GIVEN_AS_LIST for first in lowest):
            return [own]
        for unlike, why in (
            (_GIVEN_AS_LIST, "is a list of ranks here and a communicator on other ranks"),
            (_OUTSIDE, "is a communicator with processes that are not in the job"),
        ):
            if unlike in lowest:
                raise ValueError(f"{what} {why}: rank {lowest.index(unlike)}.")
        found = []
        for first in sorted(set(lowest) - {_NO_MEMBER}):
            ranks = [rank for rank, each in enumerate(lowest) if each == first]
            if {members[rank][1] for rank in ranks} != {_digest_of(ranks)}:
                raise ValueError(
                    f"{what}: ranks {ranks} give communicators that overlap. All ranks need theirs in the same order."
                )
            if self.rank in ranks:
                own.ranks = ranks
            found.append(own if self.rank in ranks else ProcessSet(ranks))
        return found

    def _members(self, entry: ProcessSet) -> tuple[int, bytes]:
        """The lowest member of a set and a digest of all, by which all know a communicator."""
        if entry.mpi_comm is None:
            return _GIVEN_AS_LIST, b""
        if entry.mpi_comm == self._mpi.COMM_NULL:
            return _NO_MEMBER, b""
        ours, theirs = self._given.Get_group(), entry.mpi_comm.Get_group()
        try:
            ranks = self._mpi.Group.Translate_ranks(theirs, list(range(theirs.Get_size())), ours)
        finally:
            ours.Free()
            theirs.Free()
        return (_OUTSIDE if self._mpi.UNDEFINED in ranks else min(ranks)), _digest_of(ranks)

    def _tell(self, invitation: dict[str, str] | None) -> dict[str, str]:
        """What rank 0 says, on all ranks."""
        buffer = bytearray(_TOLD_BYTES)
        if invitation is not None:
            text = json.dumps(invitation).encode()
            buffer[: len(text)] = text
        self._exchange(self._comm.Ibcast(buffer, root=0))
        told: dict[str, str] = json.loads(buffer.rstrip(b"\0"))
        if "trouble" in told:
            raise HorovodInternalError(told["trouble"])
        return told

    def _gather(self, said: bytes) -> list[bytes]:
        """What each rank says, which must be of one length."""
        everything = bytearray(len(said) * self.size)
        self._exchange(self._comm.Iallgather(bytearray(said), everything))
        return [bytes(everything[at : at + len(said)]) for at in range(0, len(everything), len(said))]

    def _duplicate(self) -> Any:
        """The duplicate of the communicator that all ranks make together.

        MPI takes a rank's first for every other's first, and so on. Whoever comes again after others did not goes on
        with the one that it has begun, which is these others' first: else ranks that have tried more or less often
        than others would miss each other for ever.
        """
        for begun in _unfinished:
            if begun[0] == self._given:
                break
        else:
            begun = (self._given, *self._given.Idup())
            _unfinished.append(begun)
        _, duplicate, request = begun
        self._wait_for(request)
        _unfinished[:] = [other for other in _unfinished if other is not begun]
        return duplicate

    def _exchange(self, request: Any) -> None:
        try:
            self._wait_for(request)
        except BaseException:
            _given_up.append(request)
            raise

    def _wait_for(self, request: Any) -> None:
        deadline = time.monotonic() + self._timeout
        while not request.Test():
            if time.monotonic() > deadline:
                raise HorovodInternalError(
                    f"init: rank {self.rank} of the communicator has waited {self._timeout:g} s for the others. Have "
                    f"all {self.size} called hvd.init with it?"
                )
            time.sleep(_POLL_SECONDS)


def mpi_threads_supported() -> bool | None:
    """Whether MPI can be called from several threads; None if mpi4py has not started it in this process."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _digest_of(ranks: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(sorted(ranks)).encode()).digest()


def _host_digest(environ: Mapping[str, str]) -> bytes:
    """The same on ranks that can share memory and Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
    except OSError:
        boot = ""
    name = read("HOROVOD_HOSTNAME", environ) or socket.gethostname()
    return hashlib.sha256("\0".join((name, boot, os.readlink("/proc/self/ns/net"))).encode()).digest()


def _invitation(environ: Mapping[str, str], on_one_host: bool) -> dict[str, str]:
    """What rank 0 tells the others, as environment variables; or the trouble that it has."""
    told = {"HOROVOD_JOB_ID": f"mpi {secrets.token_hex(16)}"}
    try:
        if not read_secret_key(environ):
            told["HOROVOD_SECRET_KEY"] = secrets.token_hex(32)
        if not on_one_host:
            address, port = _where_to_meet(environ)
            told |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    except ValueError as error:
        return {"trouble": str(error)[:_TROUBLE_LENGTH]}
    except OSError as error:
        return {"trouble": f"init: rank 0 can't listen for the other hosts: {error.strerror}."[:_TROUBLE_LENGTH]}
    return told


def _where_to_meet(environ: Mapping[str, str]) -> tuple[str, int]:
    """An address of this host that others can reach, and a port that is free."""
    address = read("HOROVOD_GLOO_RENDEZVOUS_ADDR", environ)
    if address is None:
        address = addresses.own_address_for_others(read("HOROVOD_GLOO_IFACE", environ))
    port = read("HOROVOD_GLOO_RENDEZVOUS_PORT", environ)
    for _ in range(_PORTS_TO_TRY):
        candidate = port or schedulers.port_of(secrets.token_hex(16))
        try:
            addresses.listen_at(address, candidate).close()
            return address, candidate
        except OSError as error:
            trouble = OSError(error.errno, f"{address} port {candidate}: {error.strerror}")
            if port or error.errno != errno.EADDRINUSE:
                break
    raise trouble
