"""Allgather, alltoall and reducescatter inside functions that torch.compile compiles: see compiled.py.

How many rows an allgather or alltoall returns the compiler can't know. In one graph (fullgraph=True) it takes them only
if torch._dynamo.config.capture_dynamic_output_shape_ops is set. Such results are lists: Inductor (2.13) can't follow
tuples of them through operators that have effects.
"""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.common.names import member_names, operation_name
from horovod.common.reduce_ops import Average
from horovod.torch.compiled import backward_name, operator
from horovod.torch.requests import (
    allgather_request,
    allreduce_request,
    alltoall_request,
    own_rows,
    padded,
    reducescatter_request,
    run,
    run_group,
)
from horovod.torch.tensors import for_result


def _many_rows(tensor: Tensor) -> Tensor:
    """A result whose number of rows depends on the other ranks."""
    return tensor.new_empty((torch.library.get_ctx().new_dynamic_size(), *tensor.shape[1:]))


def _some_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _counts(set_size: int) -> Tensor:
    return torch.empty(set_size, dtype=torch.int32)


# ---- Allgather -------------------------------------------------------------------------------------------------------


@operator(lambda tensor, name, set_id, set_size: [_many_rows(tensor), _counts(set_size)])
def allgather(tensor: Tensor, name: str | None, set_id: int, set_size: int) -> list[Tensor]:
    """An allgather, and how many rows came from each member."""
    full_name = operation_name("allgather", name, set_id)
    return list(run(allgather_request(tensor, full_name, set_id, with_received=True)))


@operator(lambda grad, received, name, set_id, rows: _some_rows(grad, rows))
def allgather_backward(grad: Tensor, received: Tensor, name: str | None, set_id: int, rows: int) -> Tensor:
    """The average of the gradients, and of it this rank's rows."""
    full_name = operation_name("allreduce", name, set_id)
    average = run(allreduce_request(for_result(grad), full_name, Average, set_id, 1.0, 1.0))
    return own_rows(average, received, set_id).clone()


def _keep_received(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensor, *ctx.arguments = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _allgather_backward(ctx: Any, grads: list[Tensor]) -> Any:
    name, set_id, _ = ctx.arguments
    name = backward_name("allgather", name)
    return allgather_backward(grads[0].contiguous(), *ctx.saved_tensors, name, set_id, ctx.rows), None, None, None


allgather.register_autograd(_allgather_backward, setup_context=_keep_received)


@operator(lambda tensor, name, set_id, rows: _some_rows(tensor, rows))
def gather_rows(tensor: Tensor, name: str, set_id: int, rows: int) -> Tensor:
    """An allgather under this very name, of a number of rows that is known."""
    return run(allgather_request(tensor, name, set_id))  # type: ignore[no-any-return]


def _many_rows_of_each(tensors: Sequence[Tensor], name: str | None, set_id: int, set_size: int) -> list[Tensor]:
    return [*(_many_rows(tensor) for tensor in tensors), *(_counts(set_size) for _ in tensors)]


@operator(_many_rows_of_each)
def grouped_allgather(tensors: Sequence[Tensor], name: str | None, set_id: int, set_size: int) -> list[Tensor]:
    """Allgathers, together: all results, then for each of them how many rows came from each member."""
    names = member_names("grouped_allgather", name, set_id, len(tensors))
    pairs = run_group(
        [
            allgather_request(tensor, full_name, set_id, with_received=True)
            for tensor, full_name in zip(tensors, names, strict=True)
        ]
    )
    return [*(output for output, _ in pairs), *(received for _, received in pairs)]


def _some_rows_of_each(
    grads: Sequence[Tensor], received: Sequence[Tensor], name: str | None, set_id: int, rows: Sequence[int]
) -> list[Tensor]:
    return [_some_rows(grad, count) for grad, count in zip(grads, rows, strict=True)]


@operator(_some_rows_of_each)
def grouped_allgather_backward(
    grads: Sequence[Tensor], received: Sequence[Tensor], name: str | None, set_id: int, rows: Sequence[int]
) -> list[Tensor]:
    """The averages of the gradients, and of each this rank's rows."""
    names = member_names("grouped_allreduce", name, set_id, len(grads))
    averages = run_group(
        [
            allreduce_request(for_result(grad), full_name, Average, set_id, 1.0, 1.0)
            for grad, full_name in zip(grads, names, strict=True)
        ]
    )
    return [own_rows(average, got, set_id).clone() for average, got in zip(averages, received, strict=True)]


def _keep_received_of_each(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, *ctx.arguments = inputs
    ctx.rows = [tensor.shape[0] for tensor in tensors]
    ctx.save_for_backward(*output[len(tensors) :])


def _grouped_allgather_backward(ctx: Any, grads: list[Tensor]) -> Any:
    name, set_id, _ = ctx.arguments
    plain = [grad.contiguous() for grad in grads[: len(ctx.rows)]]
    name = backward_name("grouped_allgather", name)
    own = grouped_allgather_backward(plain, list(ctx.saved_tensors), name, set_id, ctx.rows)
    return own, None, None, None


grouped_allgather.register_autograd(_grouped_allgather_backward, setup_context=_keep_received_of_each)


# ---- Alltoall --------------------------------------------------------------------------------------------------------


@operator(lambda tensor, splits, name, set_id, set_size: [_many_rows(tensor), _counts(set_size)])
def alltoall(tensor: Tensor, splits: Tensor | None, name: str | None, set_id: int, set_size: int) -> list[Tensor]:
    """An alltoall, and how many rows came from each member."""
    full_name = operation_name("alltoall", name, set_id)
    counts = None if splits is None else splits.tolist()
    return list(run(alltoall_request(tensor, counts, full_name, set_id, with_received=True)))


@operator(lambda grad, received, name, set_id, rows: _some_rows(grad, rows))
def alltoall_backward(grad: Tensor, received: Tensor, name: str | None, set_id: int, rows: int) -> Tensor:
    """The rows of the gradient, back where the values came from; zeros for rows that were not sent."""
    full_name = operation_name("alltoall", name, set_id)
    returned = run(alltoall_request(grad, received.tolist(), full_name, set_id, with_received=False))
    return padded(returned, rows)


def _alltoall_backward(ctx: Any, grads: list[Tensor]) -> Any:
    _, name, set_id, _ = ctx.arguments
    name = backward_name("alltoall", name)
    return alltoall_backward(grads[0].contiguous(), *ctx.saved_tensors, name, set_id, ctx.rows), None, None, None, None


alltoall.register_autograd(_alltoall_backward, setup_context=_keep_received)


# ---- Reducescatter ---------------------------------------------------------------------------------------------------


@operator(lambda tensor, name, op, set_id, share, backward_factor, *_: _some_rows(tensor, share))
def reducescatter(
    tensor: Tensor,
    name: str | None,
    op: int,
    set_id: int,
    share: int,
    backward_factor: float,
    prescale: float,
    postscale: float,
) -> Tensor:
    """A reducescatter; `share` is the number of this rank's rows."""
    full_name = operation_name("reducescatter", name, set_id)
    return run(reducescatter_request(tensor, full_name, op, set_id, share, prescale, postscale))  # type: ignore[no-any-return]


@operator(lambda grad, name, set_id, rows, factor: _some_rows(grad, rows))
def reducescatter_backward(grad: Tensor, name: str | None, set_id: int, rows: int, factor: float) -> Tensor:
    """The gradients of all rows, times a factor."""
    full_name = operation_name("allgather", name, set_id)
    everything: Tensor = run(allgather_request(grad, full_name, set_id))
    return everything.mul_(factor)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensor, *ctx.arguments = inputs
    ctx.rows = tensor.shape[0]


def _reducescatter_backward(ctx: Any, grad: Tensor) -> Any:
    name, _, set_id, _, factor, *_ = ctx.arguments
    name = backward_name("reducescatter", name)
    whole = reducescatter_backward(grad.contiguous(), name, set_id, ctx.rows, factor)
    return whole, None, None, None, None, None, None, None


reducescatter.register_autograd(_reducescatter_backward, setup_context=_keep_rows)


def _share_of_each(
    tensors: Sequence[Tensor], name: str | None, op: int, set_id: int, shares: Sequence[int], *_: float
) -> list[Tensor]:
    return [_some_rows(tensor, share) for tensor, share in zip(tensors, shares, strict=True)]


@operator(_share_of_each)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    set_id: int,
    shares: Sequence[int],
    backward_factor: float,
    prescale: float,
    postscale: float,
) -> list[Tensor]:
    """Reducescatters, together."""
    names = member_names("grouped_reducescatter", name, set_id, len(tensors))
    return run_group(
        [
            reducescatter_request(tensor, full_name, op, set_id, share, prescale, postscale)
            for tensor, full_name, share in zip(tensors, names, shares, strict=True)
        ]
    )


@operator(lambda grads, name, set_id, rows, factor: [_some_rows(g, n) for g, n in zip(grads, rows, strict=True)])
def grouped_reducescatter_backward(
    grads: Sequence[Tensor], name: str | None, set_id: int, rows: Sequence[int], factor: float
) -> list[Tensor]:
    """The gradients of all rows of each, times a factor."""
    names = member_names("grouped_allgather", name, set_id, len(grads))
    requests = [allgather_request(grad, full_name, set_id) for grad, full_name in zip(grads, names, strict=True)]
    return [everything.mul_(factor) for everything in run_group(requests)]


def _keep_rows_of_each(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, *ctx.arguments = inputs
    ctx.rows = [tensor.shape[0] for tensor in tensors]


def _grouped_reducescatter_backward(ctx: Any, grads: list[Tensor]) -> Any:
    name, _, set_id, _, factor, *_ = ctx.arguments
    name = backward_name("grouped_reducescatter", name)
    whole = grouped_reducescatter_backward([g.contiguous() for g in grads], name, set_id, ctx.rows, factor)
    return whole, None, None, None, None, None, None, None


grouped_reducescatter.register_autograd(_grouped_reducescatter_backward, setup_context=_keep_rows_of_each)
