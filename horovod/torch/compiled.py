"""The operations inside functions that torch.compile compiles.

There each is an operator of the library `horovod`, which the compiler takes as a whole: how it computes it does not
look into. All of them have the effect "ordered": the compiler keeps them in the order of the program, one after the
other, and drops none, not even if its result is not used; otherwise one rank might wait for what another has dropped.
The backward passes are operators too, with the same effect.

Names are resolved when an operator runs, since an unnamed operation is counted then. Asynchronous forms run at once and
return a Finished: the compiler may use memory again, also of an operation that is under way. The way to have several at
a time is a grouped form.
"""

# ruff: noqa: PLR0917

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod.common.barriers import wait_for_all
from horovod.common.basics import basics
from horovod.common.names import member_names, operation_name
from horovod.common.reduce_ops import Average
from horovod.torch.requests import allreduce_request, broadcast_request, run, run_group
from horovod.torch.tensors import for_result


class Finished:
    """What an asynchronous form returns in place of a handle: its operation has ended."""

    def __init__(self, result: Any) -> None:
        """Keeps the result for synchronize."""
        self.result = result


def finished(result: Any) -> int:
    """A Finished, which is typed as the handle that it stands for."""
    handle: Any = Finished(result)
    return handle  # type: ignore[no-any-return]


def copied_into(tensor: Tensor, result: Tensor) -> Tensor:
    """Writes the result of an operation in place, which the compiler sees as one with a new tensor."""
    with torch.no_grad():
        return tensor.copy_(result)


class _Unavailable:
    """Stands for an operator where PyTorch is too old for it."""

    def __init__(self, name: str) -> None:
        """Keeps the name for the error."""
        self._name = name

    def register_autograd(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"hvd.{self._name} inside a compiled function needs operators with effects, which PyTorch "
            f"{torch.__version__} does not have. Call it outside of the function, or decorate what calls it with "
            "torch.compiler.disable."
        )


def operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function an operator of its name; `fake` tells the compiler the shapes of its results."""

    def define(function: Callable[..., Any]) -> Any:
        try:
            from torch._library.effects import EffectType
        except ImportError:  # untested: only 2.13 was
            return _Unavailable(function.__name__)
        made: Any = torch.library.custom_op(f"horovod::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        made.register_effect(EffectType.ORDERED)
        return made

    return define


def backward_name(op: str, name: str | None) -> str | None:
    """The name of an operation of the backward pass: see autograd.py. Of one without a name, none."""
    return None if name is None else f"{op}.{name}.grad"


def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps all arguments but the tensors, for the backward pass."""
    ctx.arguments = inputs[1:]


# ---- Allreduce -------------------------------------------------------------------------------------------------------


@operator(lambda tensor, *_: torch.empty_like(tensor))
def allreduce(tensor: Tensor, name: str | None, op: int, set_id: int, prescale: float, postscale: float) -> Tensor:
    """An allreduce into a new tensor."""
    full_name = operation_name("allreduce", name, set_id)
    return run(allreduce_request(for_result(tensor), full_name, op, set_id, prescale, postscale))  # type: ignore[no-any-return]


def _allreduce_backward(ctx: Any, grad: Tensor) -> Any:
    name, *others = ctx.arguments
    return allreduce(grad.contiguous(), backward_name("allreduce", name), *others), None, None, None, None, None


allreduce.register_autograd(_allreduce_backward, setup_context=keep)


@operator(lambda tensors, *_: [torch.empty_like(tensor) for tensor in tensors])
def grouped_allreduce(
    tensors: Sequence[Tensor], name: str | None, op: int, set_id: int, prescale: float, postscale: float
) -> list[Tensor]:
    """Allreduces into new tensors, together."""
    names = member_names("grouped_allreduce", name, set_id, len(tensors))
    return run_group(
        [
            allreduce_request(for_result(tensor), full_name, op, set_id, prescale, postscale)
            for tensor, full_name in zip(tensors, names, strict=True)
        ]
    )


def _grouped_allreduce_backward(ctx: Any, grads: list[Tensor]) -> Any:
    name, *others = ctx.arguments
    plain = [grad.contiguous() for grad in grads]
    return grouped_allreduce(plain, backward_name("grouped_allreduce", name), *others), None, None, None, None, None


grouped_allreduce.register_autograd(_grouped_allreduce_backward, setup_context=keep)


# ---- Broadcast -------------------------------------------------------------------------------------------------------


@operator(lambda tensor, *_: torch.empty_like(tensor))
def broadcast(tensor: Tensor, root_rank: int, name: str | None, set_id: int) -> Tensor:
    """A broadcast into a new tensor."""
    full_name = operation_name("broadcast", name, set_id)
    return run(broadcast_request(for_result(tensor), full_name, root_rank, set_id))  # type: ignore[no-any-return]


def _broadcast_backward(ctx: Any, grad: Tensor) -> Any:
    root_rank, name, set_id = ctx.arguments
    average = allreduce(grad.contiguous(), backward_name("broadcast", name), Average, set_id, 1.0, 1.0)
    return average if basics.rank() == root_rank else torch.zeros_like(average), None, None, None


broadcast.register_autograd(_broadcast_backward, setup_context=keep)


# ---- Barrier ---------------------------------------------------------------------------------------------------------


@operator(lambda set_id: None)
def barrier(set_id: int) -> None:
    """Waits for all members of a set."""
    wait_for_all(set_id)
