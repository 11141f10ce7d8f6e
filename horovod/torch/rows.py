"""Allgather, alltoall and reducescatter: the operations that move rows, along the first dimension.

How many rows the result of an allgather or alltoall has depends on the other ranks: the engine makes its memory. These
operations move rows in the order of the dimensions; a tensor in another layout is copied first.
"""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod import _core
from horovod.common.handles import synchronize
from horovod.common.names import member_names, operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, own_share, require_id
from horovod.common.reduce_ops import Average
from horovod.torch import compiled_rows
from horovod.torch.autograd import (
    HorovodAllgather,
    HorovodAlltoall,
    HorovodGroupedAllgather,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    backward_factor,
)
from horovod.torch.compiled import finished
from horovod.torch.compression import Compression, Compressor
from horovod.torch.requests import (
    Request,
    RequestWithSplits,
    allgather_request,
    alltoall_request,
    reducescatter_request,
    start_all,
)
from horovod.torch.tensors import code_of, plain, rows_of

# Bound once: these are on the way of every small operation.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_ALLGATHER, _ALLTOALL, _REDUCESCATTER = _core.ALLGATHER, _core.ALLTOALL, _core.REDUCESCATTER
_run_into_new, _submit_into_new = plain.run_into_new, plain.submit_into_new
_no_compression = Compression.none


def _wants_gradient(*tensors: Tensor) -> bool:
    return _is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# ---- Allgather -------------------------------------------------------------------------------------------------------


def _allgather_request(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Request:
    code_of(tensor)  # an error before an unnamed operation is counted
    set_id = require_id(process_set)
    return allgather_request(tensor, operation_name("allgather", name, set_id), set_id)


def _compiled_allgather(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
    output, _ = compiled_rows.allgather(tensor, name, require_id(process_set), process_set.size())
    return output  # type: ignore[no-any-return]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the tensors of all ranks of a set, in the order of ranks, along the first dimension.

    Differentiable: the gradients are averaged, and each rank gets those of its rows.

    Args:
        tensor: This rank's rows. Their number may differ between ranks, and be 0; the other dimensions may not.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Returns:
        A new tensor, the same on all ranks.

    Raises:
        ValueError: A wrong argument; nothing was started.
        HorovodMismatchError: The ranks disagree about the tensor, or it is a scalar. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if not _is_dynamo_compiling():
        result = _run_into_new(_ALLGATHER, tensor, name, process_set)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    if _is_compiling():
        return _compiled_allgather(tensor, name, process_set)
    if isinstance(tensor, Tensor) and tensor.requires_grad and _is_grad_enabled():
        return HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call, no-any-return]
    return _core.run(*_allgather_request(tensor, name, process_set))  # type: ignore[no-any-return]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As allgather, but only starts it; returns a handle for poll and synchronize. Not differentiable."""
    if _is_compiling():
        return finished(_compiled_allgather(tensor.detach(), name, process_set))
    return _core.submit(*_allgather_request(tensor, name, process_set))


def _compiled_grouped_allgather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> list[Tensor]:
    both = compiled_rows.grouped_allgather(list(tensors), name, require_id(process_set), process_set.size())
    return list(both[: len(tensors)])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenates several tensors over all ranks of a set, each along its first dimension: see allgather.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the tensors; the others were gathered. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if _is_compiling():
        return _compiled_grouped_allgather(tensors, name, process_set)
    for tensor in tensors:
        code_of(tensor)
    if _wants_gradient(*tensors):
        return list(HorovodGroupedAllgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    return synchronize(_start_allgathers(tensors, name, process_set))  # type: ignore[no-any-return]


def _start_allgathers(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> int:
    for tensor in tensors:
        code_of(tensor)
    set_id = require_id(process_set)
    names = member_names("grouped_allgather", name, set_id, len(tensors))
    return start_all(allgather_request(tensor, full, set_id) for tensor, full in zip(tensors, names, strict=True))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As grouped_allgather, but only starts it; returns one handle, for which synchronize returns all tensors."""
    if _is_compiling():
        return finished(_compiled_grouped_allgather([tensor.detach() for tensor in tensors], name, process_set))
    return _start_allgathers(tensors, name, process_set)


# ---- Alltoall --------------------------------------------------------------------------------------------------------


def _checked_splits(splits: Sequence[int] | Tensor | None) -> list[int] | None:
    """The splits as integers; what they add up to is the engine's business."""
    if splits is None:
        return None
    counts: Any = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    if not isinstance(counts, list) or not all(hasattr(count, "__index__") for count in counts):
        raise ValueError(
            f"alltoall: splits must be one-dimensional integers, one for each rank of the process set, got {splits!r}."
        )
    return [int(count) for count in counts]


def _alltoall_request(
    tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None, process_set: ProcessSet
) -> RequestWithSplits:
    code_of(tensor)
    counts = _checked_splits(splits)
    set_id = require_id(process_set)
    full_name = operation_name("alltoall", name, set_id)
    return alltoall_request(tensor, counts, full_name, set_id, with_received=counts is not None)


def _compiled_alltoall(
    tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None, process_set: ProcessSet
) -> Tensor | tuple[Tensor, Tensor]:
    counts = splits if splits is None or isinstance(splits, Tensor) else torch.tensor(splits)
    output, received = compiled_rows.alltoall(tensor, counts, name, require_id(process_set), process_set.size())
    return output if splits is None else (output, received)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends some rows to each rank of a set, and returns what came from each.

    Differentiable: the gradient's rows go back to where the values came from.

    Args:
        tensor: This rank's rows, first those for the first rank of the set, then those for the second, and so on. All
            dimensions but the first must be the same on all ranks.
        splits: How many rows go to each rank. Rows beyond their sum are not sent. None: equal parts.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Returns:
        The received rows, in the order of ranks; if splits were given, also how many came from each rank.

    Raises:
        ValueError: A wrong argument, e.g. splits that don't fit, or no splits and a number of rows that can't be
            divided by the number of ranks. Nothing was started.
        HorovodMismatchError: The ranks disagree about the tensor, or it is a scalar. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if splits is None and not _is_dynamo_compiling():
        result = _run_into_new(_ALLTOALL, tensor, name, process_set)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    if _is_compiling():
        return _compiled_alltoall(tensor, splits, name, process_set)
    if not (isinstance(tensor, Tensor) and tensor.requires_grad and _is_grad_enabled()):
        return _core.run(*_alltoall_request(tensor, splits, name, process_set))  # type: ignore[no-any-return]
    output, received = HorovodAlltoall.apply(tensor, _checked_splits(splits), name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As alltoall, but only starts it; returns a handle for poll and synchronize. Not differentiable."""
    if _is_compiling():
        return finished(_compiled_alltoall(tensor.detach(), splits, name, process_set))
    return _core.submit(*_alltoall_request(tensor, splits, name, process_set))


# ---- Reducescatter ---------------------------------------------------------------------------------------------------


def _reducescatter_request(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float
) -> Request:
    code_of(tensor)
    set_id = require_id(process_set)
    full_name = operation_name("reducescatter", name, set_id)
    share = own_share(rows_of(tensor), process_set)
    return reducescatter_request(tensor, full_name, op, set_id, share, prescale_factor, postscale_factor)


def _compiled_reducescatter(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float
) -> Tensor:
    share = own_share(rows_of(tensor), process_set)
    factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
    return compiled_rows.reducescatter(  # type: ignore[no-any-return]
        tensor, name, op, require_id(process_set), share, factor, prescale_factor, postscale_factor
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over all ranks of a set, and gives each of them its own rows of the result.

    Of n rows, the r-th of s ranks gets n / s, and one more if r < n % s; the first rank has the first rows.
    Differentiable: the gradients of all rows are gathered, and multiplied by the number of ranks if op is Sum.

    Args:
        tensor: This rank's values; shape and dtype must be the same on all ranks.
        name: What matches the operation with the other ranks'; counted if None.
        compression: How the values travel, e.g. Compression.fp16.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.

    Returns:
        A new tensor with this rank's rows.

    Raises:
        ValueError: A wrong argument, e.g. a scalar; nothing was started.
        HorovodMismatchError: The ranks disagree about the tensor. The job goes on.
        HorovodInternalError: Another op, a rank was lost or has joined, or Horovod is not running.
    """
    if compression is _no_compression and not _is_dynamo_compiling():
        result = _run_into_new(_REDUCESCATTER, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    compressed, context = compression.compress(tensor)
    if _is_compiling():
        reduced = _compiled_reducescatter(compressed, name, op, process_set, prescale_factor, postscale_factor)
    elif _wants_gradient(compressed):
        reduced = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    else:
        request = _reducescatter_request(compressed, name, op, process_set, prescale_factor, postscale_factor)
        reduced = _core.run(*request)
    return compression.decompress(reduced, context)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter, but only starts it; returns a handle for poll and synchronize. Not differentiable."""
    if not _is_dynamo_compiling():
        handle = _submit_into_new(_REDUCESCATTER, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    if _is_compiling():
        result = _compiled_reducescatter(tensor.detach(), name, op, process_set, prescale_factor, postscale_factor)
        return finished(result)
    return _core.submit(*_reducescatter_request(tensor, name, op, process_set, prescale_factor, postscale_factor))


def _start_reducescatters(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> int:
    for tensor in tensors:
        code_of(tensor)
    set_id = require_id(process_set)
    names = member_names("grouped_reducescatter", name, set_id, len(tensors))
    shares = [own_share(rows_of(tensor), process_set) for tensor in tensors]
    return start_all(
        reducescatter_request(tensor, full, op, set_id, share, prescale_factor, postscale_factor)
        for tensor, full, share in zip(tensors, names, shares, strict=True)
    )


def _compiled_reducescatters(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> list[Tensor]:
    shares = [own_share(rows_of(tensor), process_set) for tensor in tensors]
    factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
    return compiled_rows.grouped_reducescatter(  # type: ignore[no-any-return]
        list(tensors), name, op, require_id(process_set), shares, factor, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduces several tensors over all ranks of a set, and gives each rank its rows of each: see reducescatter.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the tensors; the others were reduced. The job goes on.
        HorovodInternalError: Another op than Average and Sum, a rank was lost or joined, or Horovod is not running.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    reduced: Any
    if _is_compiling():
        reduced = _compiled_reducescatters(compressed, name, op, process_set, prescale_factor, postscale_factor)
    elif _wants_gradient(*compressed):
        reduced = HorovodGroupedReducescatter.apply(  # type: ignore[no-untyped-call]
            name, op, process_set, prescale_factor, postscale_factor, *compressed
        )
    else:
        handle = _start_reducescatters(compressed, name, op, process_set, prescale_factor, postscale_factor)
        reduced = synchronize(handle)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As grouped_reducescatter, but only starts it; returns one handle, for which synchronize returns all tensors."""
    if _is_compiling():
        inputs = [tensor.detach() for tensor in tensors]
        return finished(_compiled_reducescatters(inputs, name, op, process_set, prescale_factor, postscale_factor))
    return _start_reducescatters(tensors, name, op, process_set, prescale_factor, postscale_factor)
