"""Open MPI and MPICH, by mpi4py's functions for buffers."""

from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from peers import Array, NumpyMemory, Unsupported
from subject import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST


class Mpi(NumpyMemory):
    """Whichever MPI this environment has."""

    def __init__(self) -> None:
        """Joins all ranks."""
        self.ranks: Any = MPI.COMM_WORLD

    def bind(self, kind: str, source: Array, target: Array, name: str) -> Callable[[], Array]:
        """See Peer."""
        del name
        ranks = self.ranks
        if source.dtype.char not in "fdilbBhHqQ":
            raise Unsupported(f"MPI has no {source.dtype}")

        def allreduce() -> Array:
            ranks.Allreduce(MPI.IN_PLACE, source)
            return source

        def broadcast() -> Array:
            ranks.Bcast(source)
            return source

        def allgather() -> Array:
            ranks.Allgather(source, target)
            return target

        def alltoall() -> Array:
            ranks.Alltoall(source, target)
            return target

        def reducescatter() -> Array:
            ranks.Reduce_scatter_block(source, target)
            return target

        return {ALLREDUCE: allreduce, BROADCAST: broadcast, ALLGATHER: allgather, ALLTOALL: alltoall}.get(
            kind, reducescatter
        )
