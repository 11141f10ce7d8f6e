"""The optimizer for op=Adasum: every rank makes the step of its own gradients, and the steps are combined.

Adasum adds orthogonal vectors and averages parallel ones. Combining steps rather than gradients lets it see what the
optimizer makes of them (momentum, Adam's scaling). So nothing can be reduced before the optimizer has made its step:
the reductions start then, all at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
from horovod.torch.gradient_slot import NamedParameters, Slot, check_passes
from horovod.torch.mpi_ops import Adasum, allreduce_async_, synchronize
from horovod.torch.parameter_names import name_group
from horovod.torch.presence import DENSE, NONE, Presence
from horovod.torch.wrapping_optimizer import WrappingOptimizer


class StepCombiner:
    """The parameters of one optimizer: where they were before a step, and how the ranks' steps are combined."""

    def __init__(self, compression: Any, backward_passes_per_step: int, process_set: ProcessSet) -> None:
        """Takes the arguments of DistributedOptimizer, checked."""
        self._compression = compression
        self._passes = backward_passes_per_step
        self._process_set = process_set
        self._slots: list[Slot] = []
        self._presence = Presence([], process_set)

    def add(self, named_parameters: NamedParameters) -> None:
        """Takes care of further parameters from now on."""
        for name, parameter in named_parameters:
            slot = Slot(name, parameter, self._passes, _nothing)
            slot.watch()
            self._slots.append(slot)
        self._slots.sort(key=lambda slot: slot.name)
        self._presence = Presence([slot.describe(None) for slot in self._slots], self._process_set)

    def close(self) -> None:
        """Leaves the parameters alone from now on: the optimizer is gone."""
        for slot in self._slots:
            if slot.hook is not None:
                slot.hook.remove()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step."""
        self._passes = passes
        self.begin()

    def begin(self) -> None:
        """Counts backward passes from zero."""
        for slot in self._slots:
            slot.restart(self._passes)
            slot.watch()

    def positions(self) -> list[torch.Tensor]:
        """A copy of all parameters."""
        return [slot.parameter.detach().clone() for slot in self._slots]

    @torch.no_grad()
    def combine(self, starts: Sequence[torch.Tensor]) -> None:
        """Makes the steps from `starts` to where the parameters are now one step, the same on all ranks."""
        pattern = bytes(NONE if slot.parameter.grad is None else DENSE for slot in self._slots)
        somewhere = self._presence.agree(pattern)
        moved = [kind == DENSE for kind in pattern] if somewhere is None else [dense for dense, _ in somewhere]
        reductions = []
        for slot, start, has_moved in zip(self._slots, starts, moved, strict=True):
            if has_moved:
                delta = slot.parameter.detach() - start
                slot.parameter.copy_(start)
                wire, context = self._compression.compress(delta)
                handle = allreduce_async_(wire, name=slot.name, op=Adasum, process_set=self._process_set)
                reductions.append((slot.parameter, handle, context))
        for parameter, handle, context in reductions:
            parameter.add_(self._compression.decompress(synchronize(handle), context))


class AdasumOptimizer(WrappingOptimizer):
    """Put before an optimizer's class: combines the ranks' steps."""

    _steps: StepCombiner

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Makes a step with this rank's gradients, and replaces it by what Adasum makes of all ranks' steps.

        Raises:
            HorovodMismatchError: The ranks disagree about the model. The job goes on.
            HorovodInternalError: A rank was lost, or Horovod is not running.
        """
        self._tell_schedulers()
        starts = self._steps.positions()
        result = super().step(closure, **kwargs)
        self._steps.combine(starts)
        self._steps.begin()
        return result

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for before step()."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible with Adasum.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step.

        Raises:
            ValueError: Not a positive number.
        """
        check_passes(passes)
        self._steps.set_backward_passes_per_step(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients: see torch.optim.Optimizer."""
        self._steps.begin()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters: see torch.optim.Optimizer. Every rank calls it."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        self._steps.add(name_group(number, self.param_groups[number], self._given_names))


def _nothing(_slot: Slot) -> None:
    """A gradient is not reduced when it is ready; the hooks only count."""
