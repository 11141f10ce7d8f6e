"""Reduces the gradients of a model over the ranks while the backward pass still computes others.

A *slot* is one parameter's place in a step. Its life: a hook tells that the gradient has been added to; after as many
backward passes as make a step it is *ready*; when all of its group (often itself alone) are ready, its reduction is
*started*, in place; `synchronize` starts what is still missing, waits for all, and begins the next step. What a rank
starts without having a gradient of its own is decided in presence.py.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod import _core
from horovod.common.process_sets import ProcessSet
from horovod.torch.backward_hooks import Removable, call_after_gradient
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, allreduce, allreduce_async_, sparse_allreduce_async, synchronize
from horovod.torch.presence import DENSE, NONE, SPARSE, Description, Presence

NamedParameters = Sequence[tuple[str, torch.Tensor]]


def reduces(process_set: ProcessSet) -> bool:
    """Whether there is anything to reduce on this rank: it is one of several, or may become so (elastic training)."""
    several = (process_set.size() or 1) > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"
    return bool(process_set.included()) and several


def check_passes(passes: int) -> None:
    """Fails unless this can be the number of backward passes of a step.

    Raises:
        ValueError: It can't.
    """
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, it is {passes!r}.")


class _Group:
    """Slots that are started together."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.not_ready = 0


class Slot:
    """One parameter and what is going on with its gradient."""

    __slots__ = (
        "context",
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
        "wire",
    )

    def __init__(self, name: str, parameter: torch.Tensor, passes: int, ready: "Callable[[Slot], None]") -> None:
        """Waits for the gradient of a parameter; calls ready(self) after the given number of backward passes."""
        self.name = name
        self.parameter = parameter
        self.ready = ready
        self.group: _Group | None = None
        self.hook: Removable | None = None
        self.passes_left = passes
        self.handle: int | None = None  # of a dense reduction, of `wire` into `target`
        self.wire: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.context: Any = None
        self.sparse: Callable[[], torch.Tensor] | None = None  # waits for a sparse reduction
        self.gradient: torch.Tensor | None = None  # parameter.grad as it was started, and how often it was changed
        self.version = 0

    def watch(self) -> None:
        """Sets the hook, unless it is set or the parameter is frozen: then when it no longer is."""
        if self.hook is None and self.parameter.requires_grad:
            self.hook = call_after_gradient(self.parameter, self.on_gradient)

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
        self.handle = self.wire = self.target = self.context = self.sparse = self.gradient = None


class GradientReducer:
    """The gradients of one optimizer."""

    def __init__(
        self,
        *,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        group_of: dict[torch.Tensor, int],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """Takes the arguments of DistributedOptimizer, checked; and the group of each parameter that has one."""
        self._compression = None if compression is Compression.none else compression
        self._passes = backward_passes_per_step
        self._op = op
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        # Average divides by the number of ranks after the sum. With a factor, part of that comes before it.
        average = op == Average
        self._prescale = 1.0 / gradient_predivide_factor if average else 1.0
        self._postscale = gradient_predivide_factor if average else 1.0
        self._group_of = group_of
        self._groups: dict[int, _Group] = {}
        self._slots: list[Slot] = []
        self._presence = Presence([], process_set)
        self._dense_started = 0

    def add(self, named_parameters: NamedParameters) -> None:
        """Takes care of further parameters from now on.

        Raises:
            ValueError: A name that another parameter has.
        """
        names = {slot.name for slot in self._slots}
        for name, _ in named_parameters:
            if name in names:
                raise ValueError(f"Parameter names must be unique: another parameter is called {name!r}, too.")
            names.add(name)
        for name, parameter in named_parameters:
            slot = Slot(name, parameter, self._passes, self._on_ready)
            if parameter in self._group_of:
                slot.group = self._groups.setdefault(self._group_of[parameter], _Group())
                slot.group.slots.append(slot)
                slot.group.not_ready += 1
            slot.watch()
            self._slots.append(slot)
        # The ranks may have them in different orders.
        self._slots.sort(key=lambda slot: slot.name)
        self._presence = Presence(
            [slot.describe(self._group_of.get(slot.parameter)) for slot in self._slots], self._process_set
        )

    def remove_hooks(self) -> None:
        """Leaves the parameters alone from now on."""
        for slot in self._slots:
            if slot.hook is not None:
                slot.hook.remove()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step, beginning with those that come next."""
        self._passes = passes
        for slot in self._slots:
            slot.passes_left = passes
        for group in self._groups.values():
            group.not_ready = len(group.slots)

    def has_started(self) -> bool:
        """Whether reductions were started that nobody has waited for."""
        return any(slot.handle is not None or slot.sparse is not None for slot in self._slots)

    def synchronize(self) -> None:
        """Ends the step: waits until every gradient that any rank has is reduced on all.

        Raises:
            AssertionError: A gradient was changed while it was being reduced.
            HorovodMismatchError: The ranks disagree, about the model or about a gradient. The job goes on.
            HorovodInternalError: A rank was lost, or Horovod is not running.
        """
        changed = [slot.name for slot in self._slots if slot.was_changed()]
        try:
            with torch.no_grad():
                self._start_missing()
                self._finish_all()
        finally:
            self.abandon()
        for slot in self._slots:
            slot.watch()
        if changed:
            raise AssertionError(
                f"The gradient of parameter {changed[0]!r} ({len(changed)} in all) was changed after loss.backward() "
                "and before it was reduced over all ranks. Call optimizer.synchronize() first, before clipping or "
                "GradScaler.unscale_(), and then optimizer.step() in a block `with optimizer.skip_synchronize():`."
            )

    def reduce_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks, reduced like the gradients."""
        return allreduce(loss, name="DistributedOptimizer.loss", op=self._op, process_set=self._process_set)

    def abandon(self) -> None:
        """Forgets all reductions that were started, without waiting, and begins a new step."""
        for slot in self._slots:
            if slot.handle is not None:
                _core.forget(slot.handle)
            slot.restart(self._passes)
        for group in self._groups.values():
            group.not_ready = len(group.slots)
        self._dense_started = 0

    # ---- Starting ----------------------------------------------------------------------------------------------------

    def _on_ready(self, slot: Slot) -> None:
        try:
            if slot.group is None:
                self._start(slot)
                return
            slot.group.not_ready -= 1
            if slot.group.not_ready == 0:
                for member in slot.group.slots:
                    self._start(member)
        except BaseException:
            self.abandon()  # so that a training loop that goes on after the error can begin a step
            raise

    def _start(self, slot: Slot) -> None:
        """Starts the reduction of the gradient that this rank has."""
        gradient = slot.parameter.grad
        if gradient is None:  # taken away between the backward passes of a step
            return
        if gradient.is_sparse:
            if self._sparse_as_dense:
                gradient = slot.parameter.grad = gradient.to_dense()
            else:
                self._start_sparse(slot, gradient)
                slot.gradient = gradient
                slot.version = gradient._version
                return
        self._start_dense(slot, gradient)
        slot.gradient = gradient
        slot.version = gradient._version
        self._dense_started += 1

    def _start_dense(self, slot: Slot, gradient: torch.Tensor) -> None:
        wire = slot.target = gradient
        if self._compression is not None:
            wire, slot.context = self._compression.compress(gradient)
        slot.handle = allreduce_async_(
            wire, None, slot.name, self._op, self._prescale, self._postscale, self._process_set
        )
        slot.wire = wire

    def _start_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.sparse = sparse_allreduce_async(gradient, slot.name, self._op, self._process_set)

    def _start_missing(self) -> None:
        """Has this rank take part in the reduction of all gradients that any rank has."""
        pattern = None
        if self._dense_started < len(self._slots):
            pattern = bytes(slot.kind(self._sparse_as_dense) for slot in self._slots)
        exists_somewhere = self._presence.agree(pattern)
        if pattern is None and exists_somewhere is None:
            return
        for slot in self._slots:
            if slot.gradient is None:
                self._start(slot)
        for slot, (dense, sparse) in zip(self._slots, exists_somewhere or (), strict=False):
            if dense and slot.handle is None:
                self._start_dense(slot, torch.zeros_like(slot.parameter))
            if sparse and slot.sparse is None:
                self._start_sparse(slot, _no_rows(slot.parameter))

    # ---- Waiting -----------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        """Waits for all, also when one has failed: the memory of the others is in use until they have ended."""
        error: Exception | None = None
        for slot in self._slots:
            try:
                self._finish(slot)
            except Exception as failure:
                error = error or failure
        if error is not None:
            raise error

    def _finish(self, slot: Slot) -> None:
        result = None
        if slot.handle is not None:
            handle, slot.handle = slot.handle, None
            result = slot.target
            reduced = synchronize(handle)
            if slot.wire is not result:
                if self._compression is not None:
                    reduced = self._compression.decompress(reduced, slot.context)
                assert result is not None
                result.copy_(reduced)
        if slot.sparse is not None:
            rows = slot.sparse()
            result = rows if result is None else result.add_(rows)
        if result is not None and result is not slot.gradient:
            slot.parameter.grad = result


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of an embedding that was not used."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)
