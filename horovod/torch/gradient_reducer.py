"""Reduces the gradients of a model over the ranks while the backward pass still computes others.

A slot (gradient_slot.py) says when its gradient is ready; when all of its group (often itself alone) are ready, its
reduction is *started*, in place; `synchronize` starts what is still missing, waits for all, and begins the next step.
What a rank starts without having a gradient of its own is decided in presence.py.

Gradients without a group are *queued* first and started when there is 1 MiB of them: to start many small ones in a row
takes a third of the time that it takes to start each between two layers of the backward pass (docs/performance.md).
"""

import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from horovod import _core
from horovod.common.process_sets import ProcessSet, require_id
from horovod.torch.compression import Compression
from horovod.torch.gradient_slot import NamedParameters, Slot, SlotGroup
from horovod.torch.mpi_ops import Average, allreduce, sparse_allreduce_async
from horovod.torch.presence import Presence
from horovod.torch.tensors import in_place, plain

# Bound once: these are on the way of every gradient.
_submit = _core.submit
_submit_in_place, _submit_each_in_place = plain.submit_in_place, plain.submit_each_in_place
_wait, _wait_all = _core.wait, _core.wait_all
_ALLREDUCE = _core.ALLREDUCE
_storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # private, so it may be missing

_QUEUE_BYTES = 1 << 20

# All that there are, to see when two would use a name at the same time.
_reducers: "weakref.WeakSet[GradientReducer]" = weakref.WeakSet()


def reduces(process_set: ProcessSet) -> bool:
    """Whether there is anything to reduce on this rank: it is one of several, or may become so (elastic training)."""
    several = (process_set.size() or 1) > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"
    return bool(process_set.included()) and several


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
        self._groups: dict[int, SlotGroup] = {}
        self._slots: list[Slot] = []
        self._presence = Presence([], process_set)
        self._queue: list[Slot] = []
        self._queued_bytes = 0
        self._owners: dict[int, Slot] = {}  # of this step's gradients, by address
        self._dense_started = 0  # gradients of this rank; if these are all, there is little to do at the end
        self._anything_started = False
        self._frozen: list[Slot] = []  # parameters on which no hook can be set yet
        _reducers.add(self)

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
            slot = Slot(name, parameter, self._passes, self._enqueue)
            if parameter in self._group_of:
                slot.ready = self._count_ready
                slot.group = self._groups.setdefault(self._group_of[parameter], SlotGroup())
                slot.group.slots.append(slot)
                slot.group.not_ready += 1
            self._slots.append(slot)
            self._frozen.append(slot)
        self._watch_frozen()
        # The ranks may have them in different orders.
        self._slots.sort(key=lambda slot: slot.name)
        self._presence = Presence(
            [slot.describe(self._group_of.get(slot.parameter)) for slot in self._slots], self._process_set
        )

    def close(self) -> None:
        """Leaves the parameters alone from now on: the optimizer is gone."""
        _reducers.discard(self)
        for slot in self._slots:
            if slot.hook is not None:
                slot.hook.remove()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step; if one is under way, from the next step on."""
        self._passes = passes
        if not self._anything_started:
            self._count_from(passes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in this block are not counted."""
        self._count_from(sys.maxsize)
        try:
            yield
        finally:
            self._count_from(self._passes)

    def has_started(self) -> bool:
        """Whether reductions were started that nobody has waited for."""
        return self._anything_started

    def synchronize(self) -> None:
        """Ends the step: waits until every gradient that any rank has is reduced on all.

        Raises:
            AssertionError: A gradient was changed while it was being reduced.
            HorovodMismatchError: The ranks disagree, about the model or about a gradient. The job goes on.
            HorovodInternalError: A rank was lost, or Horovod is not running.
        """
        try:
            with torch.no_grad():
                self._start_missing()
                changed = self._finish_all()
        except BaseException:
            self.abandon()
            raise
        self._begin()
        if self._frozen:
            self._watch_frozen()
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
        self._queue.clear()
        self._begin()

    def _begin(self) -> None:
        for group in self._groups.values():
            group.not_ready = len(group.slots)
        self._queued_bytes = 0
        self._owners.clear()
        self._dense_started = 0
        self._anything_started = False

    def _count_from(self, passes: int) -> None:
        for slot in self._slots:
            slot.passes_left = passes
        for group in self._groups.values():
            group.not_ready = len(group.slots)

    def _watch_frozen(self) -> None:
        self._frozen = [slot for slot in self._frozen if not slot.watch()]

    # ---- Starting ----------------------------------------------------------------------------------------------------

    def _count_ready(self, slot: Slot) -> None:
        """What the hook of a slot in a group calls."""
        group = slot.group
        assert group is not None
        group.not_ready -= 1
        if group.not_ready > 0:
            return
        try:
            for member in group.slots:  # before any of them is written to
                if member.parameter.grad is not None and not member.parameter.grad.is_sparse:
                    self._unshared(member, member.parameter.grad)
            for member in group.slots:
                self._start(member)
        except BaseException:
            self.abandon()  # so that a training loop that goes on after the error can begin a step
            raise

    def _enqueue(self, slot: Slot) -> None:
        """What the hook of any other slot calls."""
        try:
            gradient = slot.parameter.grad
            if gradient is None or gradient.is_sparse:
                self._start(slot)
                return
            if not self._anything_started:
                self._begin_to_start()
            slot.gradient = gradient = self._unshared(slot, gradient)
            slot.version = gradient._version
            self._queue.append(slot)
            self._queued_bytes += gradient.nbytes
            if self._queued_bytes >= _QUEUE_BYTES and not _may_be_shared(gradient):
                self._start_queue()
        except BaseException:
            self.abandon()
            raise

    def _unshared(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, or a copy of it if it is another parameter's, too: it would be reduced twice.

        Autograd gives both terms of a sum the same memory, if each goes through a view to its parameter.
        """
        address = gradient.data_ptr()
        if address != 0 and self._owners.setdefault(address, slot) is not slot:
            gradient = slot.parameter.grad = gradient.clone()
            self._owners[gradient.data_ptr()] = slot
        return gradient

    def _start_queue(self) -> None:
        """Starts all that are queued. One that was changed meanwhile keeps its version, and is found at the end."""
        queue, self._queue = self._queue, []
        self._queued_bytes = 0
        if self._compression is None:
            gradients, names = [slot.gradient for slot in queue], [slot.name for slot in queue]
            handles = _submit_each_in_place(
                _ALLREDUCE, gradients, names, self._process_set, self._op, self._prescale, self._postscale
            )
            if handles is not NotImplemented:
                for slot, handle in zip(queue, handles, strict=True):
                    slot.handle = handle
                    slot.version += 1  # that is our own change
                self._dense_started += len(queue)
                return
        for slot in queue:
            gradient = slot.gradient
            assert gradient is not None
            unchanged = gradient._version == slot.version
            self._start_dense(slot, gradient)
            if unchanged:
                slot.version = gradient._version
            self._dense_started += 1

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
        gradient = self._unshared(slot, gradient)
        self._start_dense(slot, gradient)
        slot.gradient = gradient
        slot.version = gradient._version
        self._dense_started += 1

    def _start_dense(self, slot: Slot, gradient: torch.Tensor) -> None:
        wire = gradient
        if self._compression is not None:
            wire, slot.context = self._compression.compress(gradient)
            slot.target = gradient
        if not self._anything_started:
            self._begin_to_start()
        # What allreduce_async_ does, without finding out again what does not change: this runs once a gradient.
        handle = _submit_in_place(
            _ALLREDUCE, wire, slot.name, self._process_set, self._op, self._prescale, self._postscale
        )
        if handle is not NotImplemented:
            slot.handle = handle
            return
        code, shape, source, target, result, keep_alive = in_place(wire)
        set_id = self._process_set.process_set_id
        if set_id is None:
            set_id = require_id(self._process_set)  # says what is wrong
        slot.handle = _submit(
            *(_ALLREDUCE, slot.full_name, code, shape, source, target),
            *(self._op, 0, set_id, self._prescale, self._postscale, result, keep_alive),
        )

    def _start_sparse(self, slot: Slot, gradient: torch.Tensor) -> None:
        if not self._anything_started:
            self._begin_to_start()
        slot.sparse = sparse_allreduce_async(gradient, slot.name, self._op, self._process_set)

    def _begin_to_start(self) -> None:
        """Looks whether another optimizer has reductions under way whose names are ours too, for other parameters.

        The engine would refuse such a name only as long as the reduction has not ended: now and then, on some ranks.
        """
        for other in _reducers:
            if other is not self and other._anything_started and other._process_set is self._process_set:
                own = {slot.full_name: slot.parameter for slot in self._slots}
                shared = [s.full_name for s in other._slots if own.get(s.full_name, s.parameter) is not s.parameter]
                if shared:
                    raise ValueError(
                        "Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
                        f"tensor that is currently being processed: {min(shared)!r}. Two DistributedOptimizers reduce "
                        "gradients of this name at the same time. Give their parameters different names, for instance "
                        'named_parameters=model.named_parameters(prefix="teacher"), or step the first one before the '
                        "backward pass of the second."
                    )
        self._anything_started = True

    def _start_missing(self) -> None:
        """Has this rank take part in the reduction of all gradients that any rank has."""
        if self._queue:
            self._start_queue()
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
                slot.target = torch.zeros_like(slot.parameter)
                self._start_dense(slot, slot.target)
            if sparse and slot.sparse is None:
                self._start_sparse(slot, _no_rows(slot.parameter))

    # ---- Waiting -----------------------------------------------------------------------------------------------------

    def _finish_all(self) -> list[str]:
        """Waits for all, also when one has failed: the memory of the others is in use until they have ended.

        Returns:
            The names of those that somebody changed after they were started.
        """
        changed = self._changed()
        errors: list[Exception] = []
        handles = [slot.handle for slot in self._slots if slot.handle is not None and slot.target is None]
        _wait_all(handles, [], errors)
        passes = self._passes
        for slot in self._slots:
            try:
                if slot.handle is not None and slot.target is not None:
                    self._store(slot, _wait(slot.handle))
                if slot.sparse is not None:
                    self._add_rows(slot, slot.sparse())
            except Exception as failure:
                errors.append(failure)
            slot.restart(passes)
        if errors:
            raise errors[0]
        return changed

    def _changed(self) -> list[str]:
        slots = [slot for slot in self._slots if slot.was_changed()]
        if not slots:
            return []
        # Gradients that lie side by side in one piece of memory (those of parameters which the model concatenates, for
        # instance) are counted as one: our own writing to one of them looks like a change of the others.
        memories = Counter(_memory(slot) for slot in self._slots)
        return [slot.name for slot in slots if memories[_memory(slot)] == 1]

    def _store(self, slot: Slot, reduced: torch.Tensor) -> None:
        """Makes what was reduced elsewhere than in its place the parameter's gradient."""
        target = slot.target
        assert target is not None
        if self._compression is not None:
            reduced = self._compression.decompress(reduced, slot.context)
        if reduced is not target:
            target.copy_(reduced)
        if slot.gradient is not target:
            slot.parameter.grad = target

    def _add_rows(self, slot: Slot, rows: torch.Tensor) -> None:
        """Makes the rows of all ranks the gradient; if another rank has a dense one, adds them to that."""
        dense = slot.parameter.grad
        if dense is not None and not dense.is_sparse:
            rows = dense + rows
        slot.parameter.grad = rows


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of an embedding that was not used."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def _memory(slot: Slot) -> int:
    """What tells whether two slots have their gradients in one piece of memory."""
    gradient = slot.gradient
    return id(slot) if gradient is None or gradient.is_sparse else gradient.untyped_storage().data_ptr()


def _may_be_shared(gradient: torch.Tensor) -> bool:
    """Whether somebody else has this memory: of a gradient that was just computed, perhaps the next parameter."""
    # Two have it anyway: the gradient, and who asks.
    return _storage_use_count is not None and _storage_use_count(gradient.untyped_storage()._cdata) > 2
