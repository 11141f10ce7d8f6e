"""Calls when the gradient of a parameter has been added up: where the reduction of gradients begins."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Removable(Protocol):
    """A hook that can be taken away again."""

    def remove(self) -> None:
        """Takes it away."""


def call_after_gradient(parameter: torch.Tensor, function: Callable[[torch.Tensor], None]) -> Removable:
    """Calls function(parameter) whenever a backward pass has added to parameter.grad.

    Args:
        parameter: A leaf that requires a gradient.
        function: Called on the thread of the backward pass; what it raises comes out of backward().

    Returns:
        What takes the hook away.
    """
    register: Any = getattr(parameter, "register_post_accumulate_grad_hook", None)
    if register is not None:
        hook: Removable = register(function)
        return hook
    return _AccumulatorHook(parameter, function)


class _AccumulatorHook:
    """The same for torch 2.0, which has no such hook yet: on the node of the graph that accumulates the gradient."""

    def __init__(self, parameter: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
        grad_fn: Any = parameter.expand_as(parameter).grad_fn
        self._accumulator = grad_fn.next_functions[0][0]  # exists only as long as somebody holds it
        self._hook = self._accumulator.register_hook(lambda *_: function(parameter))

    def remove(self) -> None:
        self._hook.remove()
