"""The life cycle of Horovod in a process, and who the process is: what every binding offers under the same names."""

import atexit
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from horovod import _core
from horovod.common import names, process_sets, schedulers
from horovod.common.environment import Identity, Tunables, read_identity, read_network, read_tunables
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet


@dataclass
class _Process:
    """The one engine of this process, whichever bindings use it."""

    lock: threading.RLock
    identity: Identity | None = None  # while the engine runs
    is_homogeneous: bool = True
    last_generation: int = 0
    forked: bool = False  # this is a child of a process whose engine ran


_process = _Process(threading.RLock())


class HorovodBasics:
    """Life cycle, identity and introspection. All instances speak of the same engine."""

    Average = _core.AVERAGE
    Sum = _core.SUM
    Adasum = _core.ADASUM
    Min = _core.MIN
    Max = _core.MAX
    Product = _core.PRODUCT

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        """Takes the arguments of the existing Horovod and needs none of them: there is one engine for all bindings."""

    def init(self, comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Joins the job and starts the engine; does nothing if it runs already. Ends at shutdown or interpreter exit.

        Args:
            comm: None, the list of all ranks, or a communicator of mpi4py, whose ranks are then those of the job, and
                over which they get a key and learn where to meet. Part of the ranks is a process set.
            process_sets: Further sets of ranks, the same list on every rank; or "dynamic", which makes no difference:
                sets can always be added later.

        Raises:
            ValueError: A wrong argument or environment variable, or one that differs from the other ranks'.
            HorovodInternalError: A rank did not come or could not start. All ranks may then try again.
        """
        with _process.lock:
            if _process.forked:
                _refuse_fork()
            if self.is_initialized():
                _name_sets_again(process_sets, _process.identity)
                return
            try:
                _start(comm, process_sets)
            except BaseException:  # also Ctrl-C when the engine runs already, and rank 0 sees off the last host
                self.shutdown()
                raise

    def shutdown(self) -> None:
        """Leaves the job. Pending operations fail, here and on the other ranks; init may be called again."""
        with _process.lock:
            if _process.forked:
                return
            _core.shutdown()
            _process.identity = None
            process_sets.invalidate()

    def is_initialized(self) -> bool:
        """Whether the engine runs in this process: between init and shutdown, and not in a forked child."""
        return not _process.forked and _core.is_initialized()

    def rank(self) -> int:
        """This process's number among all, from 0."""
        return _identity().rank

    def size(self) -> int:
        """The number of processes."""
        return _identity().size

    def local_rank(self) -> int:
        """This process's number among those of its host, from 0."""
        return _identity().local_rank

    def local_size(self) -> int:
        """The number of processes on this host."""
        return _identity().local_size

    def cross_rank(self) -> int:
        """The number of this host among those that have this local rank, from 0."""
        return _identity().cross_rank

    def cross_size(self) -> int:
        """The number of hosts that have this local rank."""
        return _identity().cross_size

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of processes."""
        _identity()
        return _process.is_homogeneous

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> NoReturn:
        """Would write a timeline, which this version can't.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"start_timeline({file_path!r}): this version has no timeline.")

    def stop_timeline(self) -> None:
        """Does nothing: no timeline is ever being written.

        Raises:
            ValueError: Horovod is not initialized.
        """
        _identity()

    def mpi_threads_supported(self) -> bool:
        """Whether MPI, which the script has started by mpi4py, can be called from several threads.

        Raises:
            ValueError: It has not, and this version needs no MPI.
        """
        from horovod.common import communicators

        _identity()
        supported = communicators.mpi_threads_supported()
        if supported is None:
            raise ValueError("Horovod MPI is not enabled; this version runs without MPI.")
        return supported

    def mpi_enabled(self) -> bool:
        """Whether MPI is in use."""
        return False

    def mpi_built(self) -> bool:
        """Whether MPI can be used."""
        return False

    def gloo_enabled(self) -> bool:
        """Whether Gloo is in use. It is not: the engine has its own transport."""
        return False

    def gloo_built(self) -> bool:
        """Whether Gloo can be used."""
        return False

    def nccl_built(self) -> int:
        """The version of NCCL that can be used, 0 for none."""
        return 0

    def ddl_built(self) -> bool:
        """Whether IBM DDL can be used."""
        return False

    def ccl_built(self) -> bool:
        """Whether Intel oneCCL can be used."""
        return False

    def cuda_built(self) -> bool:
        """Whether memory of CUDA devices can be used."""
        return False

    def rocm_built(self) -> bool:
        """Whether memory of ROCm devices can be used."""
        return False


basics = HorovodBasics()


def _identity() -> Identity:
    # In a forked child this still answers: data loaders ask for the rank to choose their share and their seed.
    identity = _process.identity
    if identity is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return identity


def _start(comm: Any, asked_for: Any) -> None:
    from horovod.common.rendezvous.meeting import meet  # here: 32 of the 200 ms of `import horovod.torch`

    environ: Mapping[str, str] = os.environ
    if not process_sets.is_communicator(comm):  # which says who this process is, whatever a launcher says
        environ = schedulers.complete(environ)
    tunables = read_tunables(environ)
    sets = process_sets.static_sets(asked_for)
    if process_sets.is_communicator(comm) or any(entry.mpi_comm is not None for entry in sets):
        environ, sets = _ask_mpi(comm, environ, tunables, sets)
    identity = read_identity(environ)
    _check_comm(comm, identity.size)
    ranks_of_sets = process_sets.check_static_sets(sets, identity.size)
    with meet(identity, read_network(environ), tunables, ranks_of_sets, _process.last_generation) as meeting:
        wiring = meeting.wiring
        table = wiring.table
        _process.last_generation = table.generation
        cross_rank, cross_size = table.cross_of(identity.rank)
        identity = dataclasses.replace(
            identity, local_rank=table.local_rank_of(identity.rank), cross_rank=cross_rank, cross_size=cross_size
        )
        try:
            _core.init(
                rank=identity.rank,
                size=identity.size,
                local_rank=identity.local_rank,
                local_size=identity.local_size,
                cross_rank=identity.cross_rank,
                cross_size=identity.cross_size,
                hosts=table.hosts,
                host_of=table.host_of,
                pids=table.pids,
                links=wiring.links,
                controls=wiring.controls,
                link_sessions=wiring.sessions_of(wiring.links),
                control_sessions=wiring.sessions_of(wiring.controls),
                segment_fd=wiring.segment_fd,
                alive_fds=wiring.alive_fds,
                doorbells=wiring.doorbells,
                arena_fds=wiring.arena_fds,
                process_sets=ranks_of_sets,
                **_engine_tunables(tunables),
            )
            meeting.confirm()
        except BaseException:
            _core.shutdown()
            raise
    _process.identity, _process.is_homogeneous = identity, table.is_homogeneous()
    process_sets.register(sets, identity.rank, identity.size)
    names.restart_counting()


def _ask_mpi(
    comm: Any, environ: Mapping[str, str], tunables: Tunables, sets: list[ProcessSet]
) -> tuple[Mapping[str, str], list[ProcessSet]]:
    """The environment and the process sets where there are communicators among the arguments of init."""
    from mpi4py import MPI

    from horovod.common.communicators import World

    if process_sets.is_communicator(comm):
        with World(comm, tunables.start_timeout) as world:
            return world.environment(os.environ), world.sets_of_all(sets)
    identity = read_identity(environ)
    with World(MPI.COMM_WORLD, tunables.start_timeout) as world:
        if (world.rank, world.size) != (identity.rank, identity.size):
            raise ValueError(
                f"init: rank {identity.rank} of {identity.size} is rank {world.rank} of {world.size} in "
                "MPI.COMM_WORLD, which process sets made of communicators belong to. hvd.init(comm=MPI.COMM_WORLD) "
                "takes MPI's ranks."
            )
        return environ, world.sets_of_all(sets)


def _engine_tunables(tunables: Tunables) -> dict[str, Any]:
    return {
        "allreduce_ring": tunables.allreduce_ring,
        "fusion_threshold": tunables.fusion_threshold,
        "cache_capacity": tunables.cache_capacity,
        "heartbeat_timeout": tunables.heartbeat_timeout,
        "stall_warning": tunables.stall_warning,
        "stall_shutdown": tunables.stall_shutdown,
        "log_level": tunables.log_level,
        "log_hide_time": tunables.log_hide_time,
    }


def _check_comm(comm: Any, size: int) -> None:
    if comm is None or process_sets.is_communicator(comm):
        return
    try:
        ranks = list(comm)
    except TypeError:
        raise ValueError(
            f"init: comm must be None, the list of all ranks or a communicator of mpi4py, got {comm!r}."
        ) from None
    if ranks != list(range(size)):
        raise ValueError(
            f"init: comm={ranks}: expected all ranks, 0 to {size - 1}. "
            "For part of them use hvd.init(process_sets=[hvd.ProcessSet(ranks)])."
        )


def _name_sets_again(asked_for: Any, identity: Identity | None) -> None:
    """A second init may name the sets that exist; its objects then stand for them too."""
    sets = process_sets.static_sets(asked_for)
    if asked_for is None or isinstance(asked_for, str) or identity is None:
        return
    if any(entry.mpi_comm is not None for entry in sets):
        # The null communicator, which is false, stands for no set.
        given = [entry for entry in sets if entry.mpi_comm is None or entry.mpi_comm]
        unknown = [entry for entry in given if entry.process_set_id is None]
        if unknown:
            raise ValueError(f"init: Horovod runs already, and {unknown[0]} was not given to the first init.")
        return
    process_sets.register_again(sets, process_sets.check_static_sets(sets, identity.size))


def _refuse_fork() -> NoReturn:
    raise HorovodInternalError(
        f"init: this process (pid {os.getpid()}) was forked from one in which Horovod runs, and can't use it. Start it "
        'with the "spawn" method of multiprocessing, or call hvd.init() after forking.'
    )


def _after_fork_in_child() -> None:
    _process.lock = threading.RLock()  # another thread of the parent may have held it
    _process.forked = _process.forked or _process.identity is not None


os.register_at_fork(after_in_child=_after_fork_in_child)
# In a forked child shutdown does nothing: the engine belongs to the parent.
atexit.register(basics.shutdown)
