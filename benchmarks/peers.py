"""The peers that are compared: one small class each, with the same methods.

A peer works on views of NumPy arrays that the benchmark owns, so that all peers move the same bytes of the same memory.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import horovod.numpy as hvd

Array = NDArray[np.float32]


class Peer(Protocol):
    """What a benchmark needs of a peer. All reductions are sums, in place."""

    name: str

    def view(self, array: Array) -> Any:
        """The array as this peer takes it, on the same memory."""

    def allreduce(self, view: Any, name: str) -> None:
        """Reduces and returns when the result is there."""

    def start(self, view: Any, name: str) -> Any:
        """Begins to reduce; returns a handle for finish."""

    def finish(self, handle: Any) -> None:
        """Returns when the result is there."""

    def close(self) -> None:
        """Leaves the job."""


class Horovod:
    """This project, by horovod.numpy. The rank must have called hvd.init()."""

    name = "horovod"

    def view(self, array: Array) -> Any:
        """The array itself."""
        return array

    def allreduce(self, view: Any, name: str) -> None:
        """hvd.allreduce_."""
        hvd.allreduce_(view, name=name, op=hvd.Sum)

    def start(self, view: Any, name: str) -> Any:
        """hvd.allreduce_async_."""
        return hvd.allreduce_async_(view, name=name, op=hvd.Sum)

    def finish(self, handle: Any) -> None:
        """hvd.synchronize."""
        hvd.synchronize(handle)

    def close(self) -> None:
        """hvd.shutdown."""
        hvd.shutdown()


class Gloo:
    """torch.distributed's gloo. It matches operations by their order and has no names."""

    name = "gloo"

    def __init__(self, rank: int, size: int, scratch: Path) -> None:
        """Joins the ranks that use this scratch directory."""
        dist.init_process_group("gloo", init_method=f"file://{scratch}/gloo-store", rank=rank, world_size=size)

    def view(self, array: Array) -> Any:
        """A tensor on the array's memory."""
        return torch.from_numpy(array)

    def allreduce(self, view: Any, name: str) -> None:
        """dist.all_reduce."""
        del name
        dist.all_reduce(view)

    def start(self, view: Any, name: str) -> Any:
        """dist.all_reduce with async_op."""
        del name
        return dist.all_reduce(view, async_op=True)

    def finish(self, handle: Any) -> None:
        """The handle's wait()."""
        handle.wait()

    def close(self) -> None:
        """dist.destroy_process_group."""
        dist.destroy_process_group()
