"""State that all ranks shall have from one of them: parameters, optimizers, objects."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from horovod.common.agreement import require_same
from horovod.common.basics import basics
from horovod.common.handles import start_group, synchronize
from horovod.common.objects import allgather_object, broadcast_object
from horovod.torch.broadcasts import broadcast_async_
from horovod.torch.tensors import contiguous, memory_shape

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives all ranks the root's parameters, in place.

    Args:
        params: model.state_dict(), model.named_parameters(), or a list of tensors; the same on all ranks.
        root_rank: The global rank whose values are sent.

    Raises:
        ValueError: Something else was given, or the ranks have different parameters (it says which).
        HorovodInternalError: A rank was lost.
    """
    named = _named_tensors(params)
    require_same(
        "broadcast_parameters",
        [f"{name}: {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named],
    )
    _broadcast_all(named, root_rank)


def _named_tensors(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        named = [p if isinstance(p, tuple) else (f"broadcast_parameters.{i}", p) for i, p in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; expected a state_dict, named_parameters or a list.")
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"broadcast_parameters: {name} is a {type(tensor).__name__}, not a tensor. Take it out, and send it "
                "with broadcast_object."
            )
    return named


def _broadcast_all(named: list[tuple[str, Tensor]], root_rank: int) -> None:
    """Starts all before it waits for any: they run together."""
    synchronize(start_group(functools.partial(broadcast_async_, tensor, root_rank, name) for name, tensor in named))


# ---- Optimizers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Slot:
    """Stands for a tensor while the structure around it is sent as an object."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        """A tensor to receive into; load_state_dict moves it to the device of its parameter."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives all ranks the root's optimizer state and hyperparameters.

    The root's state is taken as it is: parameters for which the root has none have none afterwards, wherever they had.

    Args:
        optimizer: An optimizer over the same parameters on all ranks.
        root_rank: The global rank whose state is sent.
        model: Not used; the existing Horovod has it.

    Raises:
        ValueError: An LBFGS optimizer, or the ranks' optimizers have different parameters.
        HorovodInternalError: A rank was lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is no set of tensors of the same kind for all.")
    require_same("broadcast_optimizer_state", _described(optimizer))
    own = optimizer.state_dict()
    is_root = basics.rank() == root_rank
    skeleton, tensors = _without_tensors(own) if is_root else (None, [])
    skeleton = broadcast_object(skeleton, root_rank, name="broadcast_optimizer_state")
    if not is_root:
        own, tensors = _with_tensors(skeleton)
    named = [(f"broadcast_optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)]
    _broadcast_all(named, root_rank)
    if not is_root:
        optimizer.load_state_dict(own)


def _described(optimizer: torch.optim.Optimizer) -> list[str]:
    return [
        f"parameter {i} of group {g}: {parameter.dtype} {tuple(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def _without_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """The structure with slots for the tensors in it, and these, in order."""
    tensors: list[Tensor] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, Tensor):
            sent = item if memory_shape(item) is not None else contiguous(item)
            tensors.append(sent)
            return _Slot(tuple(sent.shape), sent.stride(), sent.dtype)
        return _mapped(item, replaced)

    return replaced(value), tensors


def _with_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """The structure with new tensors for the slots in it, and these, in order."""
    tensors: list[Tensor] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, _Slot):
            tensors.append(item.make())
            return tensors[-1]
        return _mapped(item, replaced)

    return replaced(value), tensors


def _mapped(item: Any, function: Any) -> Any:
    """Applies the function to what a container holds; anything else is returned as it is."""
    if isinstance(item, dict):
        return {key: function(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(function(value) for value in item)
    return item
