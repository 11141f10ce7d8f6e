"""All operations, under the module's name in the existing Horovod; they are written in the modules beside this one."""

from typing import Any

import torch

from horovod import _core
from horovod.common import barriers, handles
from horovod.common.basics import basics as _basics
from horovod.common.exceptions import HorovodInternalError, HorovodMismatchError
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    require_id,
)
from horovod.common.reduce_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
)
from horovod.torch import compiled
from horovod.torch.allreduces import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
)
from horovod.torch.broadcasts import broadcast, broadcast_, broadcast_async, broadcast_async_
from horovod.torch.compiled import Finished
from horovod.torch.compression import Compression
from horovod.torch.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.sparse import sparse_allreduce_async

_wait = _core.wait  # bound once: it is on the way of every small operation

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
rank = _basics.rank
size = _basics.size
local_rank = _basics.local_rank
local_size = _basics.local_size
cross_rank = _basics.cross_rank
cross_size = _basics.cross_size
is_homogeneous = _basics.is_homogeneous
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that synchronize will not wait.

    Raises:
        ValueError: There is no such handle, or synchronize has already returned it.
    """
    return True if isinstance(handle, Finished) else handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result, that of a group as a tuple; None for an unknown handle.

    Raises:
        HorovodMismatchError: The ranks disagree about the tensor. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod was shut down.
    """
    if type(handle) is int and handle > 0:
        return _wait(handle)
    result = handle.result if isinstance(handle, Finished) else handles.synchronize(handle)
    return tuple(result) if isinstance(result, list) else result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. Pending operations need not have ended.

    Raises:
        ValueError: Another thread of this rank is in a barrier of this set.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if torch.compiler.is_compiling():
        compiled.barrier(require_id(process_set))
    else:
        barriers.barrier(process_set)


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and returns when every rank has said so.

    Until then the others' allreduces, allgathers and alltoalls go on: this rank takes part without contributing
    anything, though an Average is still divided by the number of all ranks. A broadcast or reducescatter needs all
    ranks, and fails where it is called.

    Args:
        device: Not used; the existing Horovod has it.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    return barriers.join()


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodMismatchError",
    "HorovodReducescatter",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
