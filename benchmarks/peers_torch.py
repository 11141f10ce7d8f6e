"""The peers that live in one process with PyTorch: this project by horovod.torch, and torch.distributed's gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peers import Array, NumpyMemory
from subject import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST

import horovod.torch as hvd_torch


def tensor_on(array: Array) -> torch.Tensor:
    """A tensor on the array's memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array_on(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.float().numpy())  # a new tensor of a few elements is asked for only
    return np.asarray(tensor.numpy())


class HorovodTorch(NumpyMemory):
    """This project, by horovod.torch."""

    def bind(self, kind: str, source: Array, target: Array, name: str) -> Callable[[], Array]:
        """See Peer."""
        del target
        tensor, name = tensor_on(source), f"torch.{name}"

        def allreduce() -> Array:
            hvd_torch.allreduce_(tensor, name=name, op=hvd_torch.Sum)
            return source

        def broadcast() -> Array:
            hvd_torch.broadcast_(tensor, 0, name=name)
            return source

        def allgather() -> Array:
            return _array_on(hvd_torch.allgather(tensor, name=name))

        def alltoall() -> Array:
            result: Any = hvd_torch.alltoall(tensor, name=name)
            return _array_on(result)

        def reducescatter() -> Array:
            return _array_on(hvd_torch.reducescatter(tensor, name=name, op=hvd_torch.Sum))

        return {ALLREDUCE: allreduce, BROADCAST: broadcast, ALLGATHER: allgather, ALLTOALL: alltoall}.get(
            kind, reducescatter
        )


class Gloo(NumpyMemory):
    """torch.distributed's gloo. It matches operations by their order and has no names."""

    def __init__(self, rank: int, size: int, scratch: Path) -> None:
        """Joins the ranks that use this scratch directory."""
        dist.init_process_group("gloo", init_method=f"file://{scratch}/gloo-store", rank=rank, world_size=size)

    def bind(self, kind: str, source: Array, target: Array, name: str) -> Callable[[], Array]:
        """See Peer."""
        del name
        send, receive = tensor_on(source), tensor_on(target)

        def allreduce() -> Array:
            dist.all_reduce(send)
            return source

        def broadcast() -> Array:
            dist.broadcast(send, 0)
            return source

        def allgather() -> Array:
            dist.all_gather_into_tensor(receive, send)
            return target

        def alltoall() -> Array:
            dist.all_to_all_single(receive, send)
            return target

        def reducescatter() -> Array:
            dist.reduce_scatter_tensor(receive, send)
            return target

        return {ALLREDUCE: allreduce, BROADCAST: broadcast, ALLGATHER: allgather, ALLTOALL: alltoall}.get(
            kind, reducescatter
        )

    def close(self) -> None:
        """dist.destroy_process_group."""
        dist.destroy_process_group()
