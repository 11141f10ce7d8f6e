"""Operations as the engine takes them: the arguments of _core.run and _core.submit."""

# ruff: noqa: PLR0917

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod import _core
from horovod.common.handles import group_of, synchronize
from horovod.common.process_sets import position_in
from horovod.torch.tensors import Memory, for_rows, from_rows

# op, name, dtype, shape, input, output, reduce_op, root, process_set, prescale, postscale, result, keep_alive
Request = tuple[int, str, int, tuple[int, ...], int, int, int, int, int, float, float, Any, Any]
RequestWithSplits = tuple[*Request, Sequence[int] | None]

# Bound once: these are on the way of every small operation.
_ALLREDUCE, _ALLGATHER, _ALLTOALL = _core.ALLREDUCE, _core.ALLGATHER, _core.ALLTOALL
_SUM = _core.SUM
_partial = functools.partial


def run(request: Request | RequestWithSplits) -> Any:
    """Runs an operation to its end."""
    return _core.run(*request)


def start_all(requests: Iterable[Request]) -> int:
    """Starts operations together and returns the handle of the group."""
    return group_of(_core.submit_all(list(requests)))


def run_group(requests: Iterable[Request]) -> list[Any]:
    """Runs operations together."""
    return synchronize(start_all(requests))  # type: ignore[no-any-return]


def allreduce_request(
    memory: Memory, full_name: str, op: int, set_id: int, prescale_factor: float, postscale_factor: float
) -> Request:
    """An allreduce of what tensors.for_result or tensors.in_place has returned."""
    code, shape, source, target, result, keep_alive = memory
    return (
        *(_ALLREDUCE, full_name, code, shape, source, target),
        *(op, 0, set_id, prescale_factor, postscale_factor, result, keep_alive),
    )


def broadcast_request(memory: Memory, full_name: str, root_rank: int, set_id: int) -> Request:
    """A broadcast of what tensors.for_result or tensors.in_place has returned."""
    code, shape, source, target, result, keep_alive = memory
    return (
        *(_core.BROADCAST, full_name, code, shape, source, target),
        *(_core.SUM, root_rank, set_id, 1.0, 1.0, result, keep_alive),
    )


def allgather_request(tensor: Tensor, full_name: str, set_id: int, *, with_received: bool = False) -> Request:
    """An allgather; with_received: its result is a pair, the second how many rows came from each member."""
    code, dense = for_rows(tensor)
    return (
        *(_ALLGATHER, full_name, code, dense.shape, dense.data_ptr(), 0),
        *(_SUM, 0, set_id, 1.0, 1.0, _maker(tensor, dense, with_received), dense),
    )


def alltoall_request(
    tensor: Tensor, splits: Sequence[int] | None, full_name: str, set_id: int, *, with_received: bool
) -> RequestWithSplits:
    """An alltoall; with_received: its result is a pair, the second how many rows came from each member."""
    code, dense = for_rows(tensor)
    return (
        *(_ALLTOALL, full_name, code, dense.shape, dense.data_ptr(), 0),
        *(_SUM, 0, set_id, 1.0, 1.0, _maker(tensor, dense, with_received), dense),
        splits,
    )


def reducescatter_request(
    tensor: Tensor,
    full_name: str,
    op: int,
    set_id: int,
    share: int,
    prescale_factor: float,
    postscale_factor: float,
) -> Request:
    """A reducescatter into a new tensor, which gets `share` rows; of a scalar, which the engine will refuse, too."""
    code, dense = for_rows(tensor)
    output = torch.empty((share, *dense.shape[1:]), dtype=dense.dtype)
    result: Any = output if tensor.is_cpu else functools.partial(output.to, tensor.device)
    return (
        *(_core.REDUCESCATTER, full_name, code, dense.shape, dense.data_ptr(), output.data_ptr()),
        *(op, 0, set_id, prescale_factor, postscale_factor, result, (dense, output)),
    )


def _maker(tensor: Tensor, dense: Tensor, with_received: bool) -> Callable[[_core.Rows], Any]:
    """What makes the result, where the tensor is, of the rows."""
    # A tensor that was not copied is in CPU memory. To ask it would take longer than all of this.
    device = None if dense is tensor else tensor.device
    return _partial(_received_with if with_received else from_rows, dense.dtype, device)


def _received_with(dtype: torch.dtype, device: torch.device | None, rows: _core.Rows) -> tuple[Tensor, Tensor]:
    # The splits of the existing Horovod are 32-bit integers.
    return from_rows(dtype, device, rows), torch.tensor(rows.received, dtype=torch.int32)


# ---- What backward passes do with rows -------------------------------------------------------------------------------


def own_rows(total: Tensor, received: Tensor, set_id: int) -> Tensor:
    """Of gathered rows those that came from this rank."""
    counts = received.tolist()
    position = position_in(set_id)
    return total.narrow(0, sum(counts[:position]), counts[position])


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with zeros for the rows that it lacks."""
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
