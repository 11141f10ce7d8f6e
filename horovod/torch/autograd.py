"""Gradients of the operations whose result is a new tensor.

The backward pass of every rank takes part in another operation, whose name is the forward operation's with ".grad" at
its end: so it never meets that of another forward operation, whatever the order in which autograd comes to them.
"""

# ruff: noqa: PLR0917

from typing import Any

import torch
from torch import Tensor

from horovod.common.basics import basics
from horovod.common.names import member_names, operation_name
from horovod.common.process_sets import ProcessSet, own_share, require_id
from horovod.common.reduce_ops import Average, Sum, reduce_op
from horovod.torch.requests import (
    allgather_request,
    allreduce_request,
    alltoall_request,
    broadcast_request,
    own_rows,
    padded,
    reducescatter_request,
    run,
    run_group,
)
from horovod.torch.tensors import code_of, contiguous, for_result, rows_of

Tensors = tuple[Tensor, ...]


def _allreduced(grad: Tensor, name: str, op: int, set_id: int, prescale: float = 1.0, postscale: float = 1.0) -> Tensor:
    # Contiguous, since autograd chooses the layout of gradients, and may choose differently on each rank.
    memory = for_result(contiguous(grad))
    return run(allreduce_request(memory, name, op, set_id, prescale, postscale))  # type: ignore[no-any-return]


class HorovodAllreduce(torch.autograd.Function):
    """Allreduce; backward allreduces the gradient with the same op and factors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        tensor: Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Tensor:
        memory = for_result(tensor)
        ctx.set_id = require_id(process_set)
        ctx.op, ctx.factors = reduce_op(op, average), (prescale_factor, postscale_factor)
        ctx.name = operation_name("allreduce", name, ctx.set_id)
        return run(allreduce_request(memory, ctx.name, ctx.op, ctx.set_id, *ctx.factors))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = _allreduced(grad_output, f"{ctx.name}.grad", ctx.op, ctx.set_id, *ctx.factors)
        return grad, None, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    """Grouped allreduce; backward allreduces the gradients as a group."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> Tensors:
        memories = [for_result(tensor) for tensor in tensors]
        ctx.set_id = require_id(process_set)
        ctx.op, ctx.factors = reduce_op(op, average), (prescale_factor, postscale_factor)
        ctx.names = member_names("grouped_allreduce", name, ctx.set_id, len(tensors))
        return tuple(_grouped_allreduce(memories, ctx))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        memories = [for_result(contiguous(grad)) for grad in grad_output]
        return (None,) * 6 + tuple(_grouped_allreduce(memories, ctx, ".grad"))


def _grouped_allreduce(memories: list[Any], ctx: Any, suffix: str = "") -> list[Tensor]:
    return run_group(
        [
            allreduce_request(memory, name + suffix, ctx.op, ctx.set_id, *ctx.factors)
            for memory, name in zip(memories, ctx.names, strict=True)
        ]
    )


class HorovodAllgather(torch.autograd.Function):
    """Allgather; backward averages the gradient and takes this rank's rows of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: D102
        code_of(tensor)  # an error before an unnamed operation is counted
        ctx.set_id = require_id(process_set)
        ctx.name = operation_name("allgather", name, ctx.set_id)
        output, ctx.received = run(allgather_request(tensor, ctx.name, ctx.set_id, with_received=True))
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = _allreduced(grad_output, f"{ctx.name}.grad", Average, ctx.set_id)
        return own_rows(grad, ctx.received, ctx.set_id), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """Grouped allgather; backward averages the gradients as a group and takes this rank's rows of each."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Tensors:  # noqa: D102
        for tensor in tensors:
            code_of(tensor)
        ctx.set_id = require_id(process_set)
        ctx.names = member_names("grouped_allgather", name, ctx.set_id, len(tensors))
        pairs = run_group(
            [
                allgather_request(tensor, full_name, ctx.set_id, with_received=True)
                for tensor, full_name in zip(tensors, ctx.names, strict=True)
            ]
        )
        ctx.received = [received for _, received in pairs]
        return tuple(output for output, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        ctx.op, ctx.factors = Average, (1.0, 1.0)
        grads = _grouped_allreduce([for_result(contiguous(grad)) for grad in grad_output], ctx, ".grad")
        rows = [own_rows(grad, got, ctx.set_id) for grad, got in zip(grads, ctx.received, strict=True)]
        return None, None, *rows


class HorovodBroadcast(torch.autograd.Function):
    """Broadcast; backward gives the root the average of the gradients, and the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: D102
        memory = for_result(tensor)
        ctx.set_id, ctx.root_rank = require_id(process_set), root_rank
        ctx.name = operation_name("broadcast", name, ctx.set_id)
        return run(broadcast_request(memory, ctx.name, root_rank, ctx.set_id))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = _allreduced(grad_output, f"{ctx.name}.grad", Average, ctx.set_id)
        if basics.rank() != ctx.root_rank:
            grad.zero_()
        return grad, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """Alltoall; backward sends the rows of the gradient back to where the values came from."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, splits: list[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        code_of(tensor)
        ctx.set_id, ctx.rows = require_id(process_set), rows_of(tensor)
        ctx.name = operation_name("alltoall", name, ctx.set_id)
        output, received = run(alltoall_request(tensor, splits, ctx.name, ctx.set_id, with_received=True))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *dead_gradients: Tensor) -> Any:  # noqa: D102
        request = alltoall_request(grad_output, ctx.received, f"{ctx.name}.grad", ctx.set_id, with_received=False)
        # Rows beyond the sum of the splits went nowhere.
        return padded(run(request), ctx.rows), None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """Reducescatter; backward allgathers the gradient, times the number of ranks for a Sum, times both factors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        tensor: Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Tensor:
        code_of(tensor)
        ctx.set_id = require_id(process_set)
        ctx.factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.name = operation_name("reducescatter", name, ctx.set_id)
        share = own_share(rows_of(tensor), process_set)
        request = reducescatter_request(tensor, ctx.name, op, ctx.set_id, share, prescale_factor, postscale_factor)
        return run(request)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = run(allgather_request(grad_output, f"{ctx.name}.grad", ctx.set_id))
        return _times(grad, ctx.factor), None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """Grouped reducescatter; backward allgathers the gradients as a group."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> Tensors:
        for tensor in tensors:
            code_of(tensor)
        ctx.set_id = require_id(process_set)
        ctx.factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.names = member_names("grouped_reducescatter", name, ctx.set_id, len(tensors))
        shares = [own_share(rows_of(tensor), process_set) for tensor in tensors]
        outputs = run_group(
            reducescatter_request(tensor, full_name, op, ctx.set_id, share, prescale_factor, postscale_factor)
            for tensor, full_name, share in zip(tensors, ctx.names, shares, strict=True)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        grads = run_group(
            [
                allgather_request(grad, f"{full_name}.grad", ctx.set_id)
                for grad, full_name in zip(grad_output, ctx.names, strict=True)
            ]
        )
        return (None,) * 5 + tuple(_times(grad, ctx.factor) for grad in grads)


def backward_factor(op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float) -> float:
    """What the gathered gradients of a reducescatter are multiplied by."""
    return prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)


def _times(grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1.0 else grad.mul_(factor)
