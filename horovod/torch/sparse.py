"""Allreduce of sparse tensors: the indices and values of all ranks, one after the other."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from horovod.common.handles import start_group, synchronize
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.reduce_ops import Average, Sum
from horovod.torch.rows import allgather_async


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts to add up sparse tensors over all ranks of a set.

    Args:
        tensor: This rank's sparse COO tensor; the number of its elements may differ between ranks.
        name: What matches the operation with the other ranks'; counted if None.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A function that waits and returns the result: a sparse tensor that is not coalesced, the same on all ranks.

    Raises:
        NotImplementedError: Another op.
        ValueError: Not a sparse COO tensor; nothing was started.
    """
    if op not in (Average, Sum):
        raise NotImplementedError("Sparse tensors can be reduced by Average and Sum only.")
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        layout = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"sparse_allreduce_async: expected a sparse COO tensor, got {layout}.")
    shape, sparse_dimensions = tensor.shape, tensor.sparse_dim()
    # Elements that occur more than once on this rank are added up here, and travel once.
    own = tensor.detach().coalesce()
    name = operation_name("sparse_allreduce", None, require_id(process_set)) if name is None else name
    handle = start_group(
        [
            functools.partial(allgather_async, own.indices().t(), f"{name}.indices", process_set),
            functools.partial(allgather_async, own.values(), f"{name}.values", process_set),
        ]
    )

    def result() -> Tensor:
        indices, values = synchronize(handle)
        total = torch.sparse_coo_tensor(
            indices.t().reshape(sparse_dimensions, -1), values, shape, check_invariants=False
        )
        return total / (process_set.size() or 1) if op == Average else total

    return result
