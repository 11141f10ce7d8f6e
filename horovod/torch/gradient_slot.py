"""One parameter's place in a step.

Its life: a hook tells that the gradient has been added to; after as many backward passes as make a step it is *ready*,
which is told to whoever made the slot; he starts the reduction, and begins again when it has ended.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod.common.names import operation_name
from horovod.common.process_sets import GLOBAL_ID
from horovod.torch.backward_hooks import Removable, call_after_gradient
from horovod.torch.presence import DENSE, NONE, SPARSE, Description

NamedParameters = Sequence[tuple[str, torch.Tensor]]

# Which slot has its hook on a parameter: the latest. An optimizer that was replaced by another one for the same
# parameters may still live, in a scheduler for instance, and must not start the same reductions.
_watchers: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


def check_passes(passes: int) -> None:
    """Fails unless this can be the number of backward passes of a step.

    Raises:
        ValueError: It can't.
    """
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, it is {passes!r}.")


class SlotGroup:
    """Slots that are started together."""

    def __init__(self) -> None:
        """Has no slots yet."""
        self.slots: list[Slot] = []
        self.not_ready = 0


class Slot:
    """One parameter and what is going on with its gradient."""

    __slots__ = (
        "__weakref__",
        "context",
        "full_name",
        "gradient",
        "group",
        "handle",
        "hook",
        "name",
        "parameter",
        "passes_left",
        "ready",
        "sparse",
        "target",
        "version",
    )

    def __init__(self, name: str, parameter: torch.Tensor, passes: int, ready: "Callable[[Slot], None]") -> None:
        """Will call ready(self) after the given number of backward passes."""
        self.name = name
        self.full_name = operation_name("allreduce", name, GLOBAL_ID)
        self.parameter = parameter
        self.ready = ready
        self.group: SlotGroup | None = None
        self.hook: Removable | None = None
        self.passes_left = passes
        self.gradient: torch.Tensor | None = None  # parameter.grad as it was started, and how often it was changed
        self.version = 0
        self.handle: int | None = None  # of a dense reduction, in place
        self.target: torch.Tensor | None = None  # or of something else, of which this will be the gradient
        self.context: Any = None
        self.sparse: Callable[[], torch.Tensor] | None = None  # waits for a sparse reduction

    def watch(self) -> bool:
        """Sets the hook, unless the parameter is frozen: then this is to be tried again. Returns whether it is set."""
        if self.hook is None and self.parameter.requires_grad:
            known = _watchers.get(self.parameter)
            before = None if known is None else known()
            if before is not None and before.hook is not None:
                before.hook.remove()
            self.hook = call_after_gradient(self.parameter, self.on_gradient)
            _watchers[self.parameter] = weakref.ref(self)
        return self.hook is not None

    def on_gradient(self, _parameter: torch.Tensor) -> None:
        """The hook."""
        if self.passes_left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(): those of "
                f"parameter {self.name!r}. Increase backward_passes_per_step to accumulate gradients locally. If "
                "another model's loss goes through this one (GAN), call requires_grad_(False) on this one meanwhile."
            )
        self.passes_left -= 1
        if self.passes_left == 0:
            self.ready(self)

    def kind(self, sparse_as_dense: bool) -> int:
        """What this rank has: NONE, DENSE or SPARSE."""
        if self.gradient is not None:
            return SPARSE if self.handle is None else DENSE
        gradient = self.parameter.grad
        if gradient is None:
            return NONE
        return SPARSE if gradient.is_sparse and not sparse_as_dense else DENSE

    def was_changed(self) -> bool:
        """Whether somebody changed or replaced the gradient after its reduction was started."""
        gradient = self.gradient
        return gradient is not None and (self.parameter.grad is not gradient or gradient._version != self.version)

    def describe(self, group_number: int | None) -> Description:
        """What must be the same on all ranks."""
        parameter = self.parameter
        strides = tuple(parameter.stride()) if parameter.layout == torch.strided else ()
        return Description(self.name, tuple(parameter.shape), strides, str(parameter.dtype), group_number)

    def restart(self, passes: int) -> None:
        """Forgets what was, for the next step."""
        self.passes_left = passes
        self.handle = self.gradient = self.target = self.context = self.sparse = None
