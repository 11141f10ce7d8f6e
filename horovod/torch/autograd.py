"""Gradients of the operations whose result is a new tensor.

The backward pass of every rank takes part in another operation. What it has as its name is all of the forward
operation's, with ".grad" at its end: so it never meets that of another forward operation, whatever the order in which
autograd comes to them. It can be differentiated again.
"""

# ruff: noqa: PLR0917

from typing import Any

import torch
from torch import Tensor

from horovod.common.basics import basics
from horovod.common.names import members_of, operation_name
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
from horovod.torch.tensors import code_of, for_result, rows_of

Tensors = tuple[Tensor, ...]


def _averaged(grad: Tensor, ctx: Any) -> Tensor:
    name, process_set = f"{ctx.name}.grad", ctx.process_set
    return HorovodAllreduce.apply(_plain(grad), None, name, Average, 1.0, 1.0, process_set)  # type: ignore[no-untyped-call, no-any-return]


def _plain(grad: Tensor) -> Tensor:
    """Contiguous, since autograd chooses the layout of gradients, and may choose differently on each rank."""
    return grad.contiguous()


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
        ctx.process_set, set_id = process_set, require_id(process_set)
        ctx.op, ctx.factors = reduce_op(op, average), (prescale_factor, postscale_factor)
        ctx.name = operation_name("allreduce", name, set_id)
        return run(allreduce_request(memory, ctx.name, ctx.op, set_id, *ctx.factors))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = HorovodAllreduce.apply(  # type: ignore[no-untyped-call]
            _plain(grad_output), None, f"{ctx.name}.grad", ctx.op, *ctx.factors, ctx.process_set
        )
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
        ctx.process_set, set_id = process_set, require_id(process_set)
        ctx.op, ctx.factors = reduce_op(op, average), (prescale_factor, postscale_factor)
        ctx.name = operation_name("grouped_allreduce", name, set_id)
        outputs = run_group(
            allreduce_request(memory, full_name, ctx.op, set_id, *ctx.factors)
            for memory, full_name in zip(memories, members_of(ctx.name, len(tensors)), strict=True)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        grads = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            None, f"{ctx.name}.grad", ctx.op, *ctx.factors, ctx.process_set, *map(_plain, grad_output)
        )
        return (None,) * 6 + tuple(grads)


class HorovodAllgather(torch.autograd.Function):
    """Allgather; backward averages the gradient and takes this rank's rows of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: D102
        code_of(tensor)  # an error before an unnamed operation is counted
        ctx.process_set, ctx.set_id = process_set, require_id(process_set)
        ctx.name = operation_name("allgather", name, ctx.set_id)
        output, ctx.received = run(allgather_request(tensor, ctx.name, ctx.set_id, with_received=True))
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        return own_rows(_averaged(grad_output, ctx), ctx.received, ctx.set_id), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """Grouped allgather; backward averages the gradients as a group and takes this rank's rows of each."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Tensors:  # noqa: D102
        for tensor in tensors:
            code_of(tensor)
        ctx.process_set, ctx.set_id = process_set, require_id(process_set)
        ctx.name = operation_name("grouped_allgather", name, ctx.set_id)
        pairs = run_group(
            allgather_request(tensor, full_name, ctx.set_id, with_received=True)
            for tensor, full_name in zip(tensors, members_of(ctx.name, len(tensors)), strict=True)
        )
        ctx.received = [received for _, received in pairs]
        return tuple(output for output, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        grads = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
            None, f"{ctx.name}.grad", Average, 1.0, 1.0, ctx.process_set, *map(_plain, grad_output)
        )
        rows = [own_rows(grad, got, ctx.set_id) for grad, got in zip(grads, ctx.received, strict=True)]
        return None, None, *rows


class HorovodBroadcast(torch.autograd.Function):
    """Broadcast; backward gives the root the average of the gradients, and the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: D102
        memory = for_result(tensor)
        ctx.process_set, ctx.root_rank, set_id = process_set, root_rank, require_id(process_set)
        ctx.name = operation_name("broadcast", name, set_id)
        return run(broadcast_request(memory, ctx.name, root_rank, set_id))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = _averaged(grad_output, ctx)
        if basics.rank() != ctx.root_rank:
            # Not new zeros: a second derivative must find the operation on every rank.
            grad = grad.masked_fill(torch.ones((), dtype=torch.bool), 0)
        return grad, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """Alltoall; backward sends the rows of the gradient back to where the values came from."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, splits: list[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        code_of(tensor)
        ctx.process_set, ctx.rows, set_id = process_set, rows_of(tensor), require_id(process_set)
        ctx.name = operation_name("alltoall", name, set_id)
        output, received = run(alltoall_request(tensor, splits, ctx.name, set_id, with_received=True))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *dead_gradients: Tensor) -> Any:  # noqa: D102
        grad, _ = HorovodAlltoall.apply(  # type: ignore[no-untyped-call]
            grad_output, ctx.received, f"{ctx.name}.grad", ctx.process_set
        )
        # Rows beyond the sum of the splits went nowhere.
        return padded(grad, ctx.rows), None, None, None


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
        ctx.process_set, set_id = process_set, require_id(process_set)
        ctx.factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.name = operation_name("reducescatter", name, set_id)
        share = own_share(rows_of(tensor), process_set)
        request = reducescatter_request(tensor, ctx.name, op, set_id, share, prescale_factor, postscale_factor)
        return run(request)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # noqa: D102
        grad = HorovodAllgather.apply(grad_output, f"{ctx.name}.grad", ctx.process_set)  # type: ignore[no-untyped-call]
        return grad * ctx.factor, None, None, None, None, None


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
        ctx.process_set, set_id = process_set, require_id(process_set)
        ctx.factor = backward_factor(op, process_set, prescale_factor, postscale_factor)
        ctx.name = operation_name("grouped_reducescatter", name, set_id)
        shares = [own_share(rows_of(tensor), process_set) for tensor in tensors]
        names = members_of(ctx.name, len(tensors))
        outputs = run_group(
            reducescatter_request(tensor, full_name, op, set_id, share, prescale_factor, postscale_factor)
            for tensor, full_name, share in zip(tensors, names, shares, strict=True)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:  # noqa: D102
        grads = HorovodGroupedAllgather.apply(f"{ctx.name}.grad", ctx.process_set, *grad_output)  # type: ignore[no-untyped-call]
        return (None,) * 5 + tuple(grad * ctx.factor for grad in grads)


def backward_factor(op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float) -> float:
    """What the gathered gradients of a reducescatter are multiplied by."""
    return prescale_factor * postscale_factor * ((process_set.size() or 1) if op == Sum else 1)
