"""This project by horovod.numpy, which needs no framework, on any memory and on its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
from peers import Array, NumpyMemory
from subject import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST

import horovod.numpy as hvd


class Horovod(NumpyMemory):
    """This project, by horovod.numpy. The rank must have called hvd.init()."""

    def bind(self, kind: str, source: Array, target: Array, name: str) -> Callable[[], Array]:
        """See Peer."""
        del target

        def allreduce() -> Any:
            return hvd.allreduce_(source, name=name, op=hvd.Sum)

        def broadcast() -> Array:
            return hvd.broadcast_(source, 0, name=name)

        def allgather() -> Array:
            return hvd.allgather(source, name=name)

        def alltoall() -> Array:
            result: Any = hvd.alltoall(source, name=name)
            return np.asarray(result)

        def reducescatter() -> Array:
            return hvd.reducescatter(source, name=name, op=hvd.Sum)

        return {ALLREDUCE: allreduce, BROADCAST: broadcast, ALLGATHER: allgather, ALLTOALL: alltoall}.get(
            kind, reducescatter
        )

    def close(self) -> None:
        """hvd.shutdown, which may be called again."""
        hvd.shutdown()


class HorovodShared(Horovod):
    """The same on memory from hvd_alloc."""

    has_own_memory = True

    def allocate(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """hvd.zeros."""
        return hvd.zeros(shape, dtype)
