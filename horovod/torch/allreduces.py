"""Allreduce of dense tensors, single and grouped, with autograd where the result is a new tensor."""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod import _core
from horovod.common.handles import group_of, synchronize
from horovod.common.names import member_names, operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.reduce_ops import ALL as _REDUCE_OPS
from horovod.common.reduce_ops import Average, reduce_op
from horovod.torch import compiled
from horovod.torch.autograd import HorovodAllreduce, HorovodGroupedAllreduce
from horovod.torch.compiled import finished
from horovod.torch.compression import Compression, Compressor
from horovod.torch.requests import Request, allreduce_request, start_all
from horovod.torch.tensors import Memory, for_result, in_place, plain

# Bound once: these are on the way of every small operation.
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # the quicker question; the short way asks the rest itself
_ALLREDUCE = _core.ALLREDUCE
_run_in_place, _submit_in_place = plain.run_in_place, plain.submit_in_place
_run_into_new, _submit_into_new = plain.run_into_new, plain.submit_into_new
_no_compression = Compression.none


def _request(
    memory: Memory,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Request:
    if op is None and average is None:
        op = Average
    elif average is not None or op not in _REDUCE_OPS:
        op = reduce_op(op, average)
    set_id = require_id(process_set)
    full_name = operation_name("allreduce", name, set_id)
    return allreduce_request(memory, full_name, op, set_id, prescale_factor, postscale_factor)


def _compiled(
    tensor: Tensor,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Tensor:
    op, set_id = reduce_op(op, average), require_id(process_set)
    return compiled.allreduce(tensor, name, op, set_id, prescale_factor, postscale_factor)  # type: ignore[no-any-return]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over all ranks of a set into a new tensor.

    Differentiable: the gradient is allreduced in the same way.

    Args:
        tensor: This rank's values; shape and dtype must be the same on all ranks.
        average: Deprecated; use op.
        name: What matches the operation with the other ranks'; counted if None.
        compression: How the values travel, e.g. Compression.fp16.
        op: Average (default), Sum, Adasum, Min, Max or Product. Of booleans, Sum and Max are "or", Min and Product
            are "and".
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.
        process_set: The ranks that take part.

    Returns:
        The reduced values, the same on all ranks, in the layout of the tensor.

    Raises:
        ValueError: A wrong argument, or one that the dtype has no such reduction for; nothing was started.
        HorovodMismatchError: The ranks disagree about the tensor. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if average is None and compression is _no_compression and not _is_dynamo_compiling():
        result = _run_into_new(_ALLREDUCE, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    compressed, context = compression.compress(tensor)
    if _is_compiling():
        reduced = _compiled(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    elif isinstance(compressed, Tensor) and compressed.requires_grad and _is_grad_enabled():
        reduced = HorovodAllreduce.apply(compressed, average, name, op, prescale_factor, postscale_factor, process_set)  # type: ignore[no-untyped-call]
    else:
        memory = for_result(compressed)
        reduced = _core.run(*_request(memory, average, name, op, prescale_factor, postscale_factor, process_set))
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce, but only starts it; returns a handle for poll and synchronize. Not differentiable."""
    if average is None and not _is_dynamo_compiling():
        handle = _submit_into_new(_ALLREDUCE, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    if _is_compiling():
        result = _compiled(tensor.detach(), average, name, op, prescale_factor, postscale_factor, process_set)
        return finished(result)
    memory = for_result(tensor)
    return _core.submit(*_request(memory, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As allreduce, but in place; returns the same tensor. Not differentiable."""
    if average is None and not _is_dynamo_compiling():
        result = _run_in_place(_ALLREDUCE, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    if _is_compiling():
        result = _compiled(tensor.detach(), average, name, op, prescale_factor, postscale_factor, process_set)
        return compiled.copied_into(tensor, result)
    memory = in_place(tensor)
    return _core.run(  # type: ignore[no-any-return]
        *_request(memory, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_, but only starts it; returns a handle. The tensor must be left alone until synchronize."""
    if average is None and not _is_dynamo_compiling():
        handle = _submit_in_place(_ALLREDUCE, tensor, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    if _is_compiling():
        return finished(allreduce_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    memory = in_place(tensor)
    return _core.submit(*_request(memory, average, name, op, prescale_factor, postscale_factor, process_set))


# ---- Groups ----------------------------------------------------------------------------------------------------------


def _start_group(
    memories: Sequence[Memory],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    op = reduce_op(op, average)
    set_id = require_id(process_set)
    names = member_names("grouped_allreduce", name, set_id, len(memories))
    return start_all(
        allreduce_request(memory, full_name, op, set_id, prescale_factor, postscale_factor)
        for memory, full_name in zip(memories, names, strict=True)
    )


def _compiled_group(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[Tensor]:
    op, set_id = reduce_op(op, average), require_id(process_set)
    return compiled.grouped_allreduce(  # type: ignore[no-any-return]
        list(tensors), name, op, set_id, prescale_factor, postscale_factor
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduces several tensors over all ranks of a set, together, into new tensors: see allreduce.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the tensors; the others were reduced. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if average is None and compression is _no_compression and not _is_dynamo_compiling():
        handles = plain.submit_group_into_new(
            _ALLREDUCE, tensors, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return synchronize(group_of(handles))  # type: ignore[no-any-return]
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]
    reduced: Any
    if _is_compiling():
        reduced = _compiled_group(compressed, average, name, op, prescale_factor, postscale_factor, process_set)
    elif _is_grad_enabled() and any(tensor.requires_grad for tensor in compressed):
        reduced = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            average, name, op, prescale_factor, postscale_factor, process_set, *compressed
        )
    else:
        memories = [for_result(tensor) for tensor in compressed]
        handle = _start_group(memories, average, name, op, prescale_factor, postscale_factor, process_set)
        reduced = synchronize(handle)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce, but only starts it; returns one handle, for which synchronize returns all tensors."""
    if average is None and not _is_dynamo_compiling():
        handles = plain.submit_group_into_new(
            _ALLREDUCE, tensors, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return group_of(handles)
    if _is_compiling():
        inputs = [tensor.detach() for tensor in tensors]
        results = _compiled_group(inputs, average, name, op, prescale_factor, postscale_factor, process_set)
        return finished(results)
    memories = [for_result(tensor) for tensor in tensors]
    return _start_group(memories, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As grouped_allreduce, but in place; returns the same tensors. Not differentiable."""
    if average is None and not _is_dynamo_compiling():
        handles = plain.submit_group_in_place(
            _ALLREDUCE, tensors, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return synchronize(group_of(handles))  # type: ignore[no-any-return]
    if _is_compiling():
        inputs = [tensor.detach() for tensor in tensors]
        results = _compiled_group(inputs, average, name, op, prescale_factor, postscale_factor, process_set)
        return [compiled.copied_into(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
    memories = [in_place(tensor) for tensor in tensors]
    handle = _start_group(memories, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_, but only starts it; returns one handle. Leave the tensors alone until synchronize."""
    if average is None and not _is_dynamo_compiling():
        handles = plain.submit_group_in_place(
            _ALLREDUCE, tensors, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return group_of(handles)
    if _is_compiling():
        return finished(grouped_allreduce_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    memories = [in_place(tensor) for tensor in tensors]
    return _start_group(memories, average, name, op, prescale_factor, postscale_factor, process_set)
