"""Broadcast of dense tensors, with autograd where the result is a new tensor."""

import torch
from torch import Tensor

from horovod import _core
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.torch import compiled
from horovod.torch.autograd import HorovodBroadcast
from horovod.torch.compiled import finished
from horovod.torch.requests import Request, broadcast_request
from horovod.torch.tensors import Memory, for_result, in_place, plain

# Bound once: these are on the way of every small operation.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_BROADCAST = _core.BROADCAST
_run_in_place, _submit_in_place = plain.run_in_place, plain.submit_in_place
_run_into_new, _submit_into_new = plain.run_into_new, plain.submit_into_new


def _request(memory: Memory, root_rank: int, name: str | None, process_set: ProcessSet) -> Request:
    set_id = require_id(process_set)
    return broadcast_request(memory, operation_name("broadcast", name, set_id), root_rank, set_id)


def _compiled(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    return compiled.broadcast(tensor, root_rank, name, require_id(process_set))  # type: ignore[no-any-return]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor as a new tensor on every rank of a set.

    Differentiable: the root gets the average of the gradients, the others zeros.

    Args:
        tensor: The values to send; on other ranks than the root only shape, dtype and layout matter.
        root_rank: The global rank that sends.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Raises:
        ValueError: A wrong argument; nothing was started.
        HorovodMismatchError: The ranks disagree about the tensor. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if not _is_dynamo_compiling():
        result = _run_into_new(_BROADCAST, tensor, name, process_set, root_rank)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return _compiled(tensor, root_rank, name, process_set)
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]
    return _core.run(*_request(for_result(tensor), root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast, but only starts it; returns a handle for poll and synchronize. Not differentiable."""
    if not _is_dynamo_compiling():
        handle = _submit_into_new(_BROADCAST, tensor, name, process_set, root_rank)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return finished(_compiled(tensor.detach(), root_rank, name, process_set))
    return _core.submit(*_request(for_result(tensor), root_rank, name, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As broadcast, but in place; returns the same tensor. Not differentiable."""
    if not _is_dynamo_compiling():
        result = _run_in_place(_BROADCAST, tensor, name, process_set, root_rank)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return compiled.copied_into(tensor, _compiled(tensor.detach(), root_rank, name, process_set))
    return _core.run(*_request(in_place(tensor), root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_, but only starts it; returns a handle. The tensor must be left alone until synchronize."""
    if not _is_dynamo_compiling():
        handle = _submit_in_place(_BROADCAST, tensor, name, process_set, root_rank)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return finished(broadcast_(tensor, root_rank, name, process_set))
    return _core.submit(*_request(in_place(tensor), root_rank, name, process_set))
