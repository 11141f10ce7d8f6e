"""DistributedOptimizer: any optimizer of torch, fed with gradients that were reduced over all ranks."""

# ruff: noqa: PLR0917

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.adasum_optimizer import AdasumOptimizer, StepCombiner
from horovod.torch.compression import Compression
from horovod.torch.gradient_groups import Groups, check_groups, group_numbers
from horovod.torch.gradient_reducer import GradientReducer, reduces
from horovod.torch.gradient_slot import check_passes
from horovod.torch.mpi_ops import Adasum, Average, Sum
from horovod.torch.parameter_names import check_all_named, name_group, names_by_parameter
from horovod.torch.wrapping_optimizer import WrappingOptimizer, wrap

Closure = Callable[[], Any]


class _ReducingOptimizer(WrappingOptimizer):
    """Put before an optimizer's class: reduces the gradients before each step."""

    _reducer: GradientReducer | None  # None: this rank is alone, and steps by itself
    _synchronizes: bool  # whether step() does it
    _is_synchronized: bool  # by the user, since the last step
    _was_scaled: bool  # a GradScaler has seen the reduced gradients of this step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters and their options: see torch.optim.Optimizer.

        A GradScaler finds the gradients by this, to divide them by its scale and to look for an overflow. It must do so
        with those of all ranks: so they are reduced before it gets them.
        """
        groups: list[dict[str, Any]] | None = self.__dict__.get("param_groups")
        if groups is None:  # an object that stands for another one, as Lightning makes them
            raise AttributeError("param_groups")
        if self._reducer is not None and self._reducer.has_started() and _is_called_by_a_grad_scaler():
            self.synchronize()
            self._was_scaled = True
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; call it before looking at them or changing them.

        Every rank calls it, once a step. Then call step() in a block `with optimizer.skip_synchronize():`. A parameter
        that has a gradient on some ranks only has it on all afterwards; one that has none anywhere keeps None.

        Raises:
            AssertionError: A gradient was changed while it was being reduced.
            HorovodMismatchError: The ranks disagree about the model or a gradient. The job goes on.
            HorovodInternalError: A rank was lost, or Horovod is not running.
        """
        if self._reducer is not None:
            self._reducer.synchronize()
            self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block step() does not reduce the gradients: synchronize() has done so."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step.

        Raises:
            ValueError: Not a positive number.
        """
        check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_backward_passes_per_step(passes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block backward passes only add up gradients, and don't count as passes of a step.

        The way to accumulate gradients over numbers of passes that vary: the last pass comes after the block.

        Raises:
            AssertionError: Gradients are being reduced.
        """
        self._check_nothing_started("optimizer.no_sync() was called between loss.backward() and optimizer.step().")
        if self._reducer is None:
            yield
            return
        with self._reducer.paused():
            yield

    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Reduces the gradients and makes a step with them.

        Args:
            closure: Computes loss and gradients anew. The optimizer gets the loss reduced like the gradients, so that
                one which decides by the loss (LBFGS) decides the same on every rank.
            **kwargs: For the optimizer.

        Returns:
            What the optimizer's step returns: None, or the (reduced) loss of the closure.
        """
        self._tell_schedulers()
        if self._reducer is None:
            return super().step(closure, **kwargs)
        if not self._synchronizes:
            self._check_nothing_started(
                "optimizer.step() was called in optimizer.skip_synchronize() before optimizer.synchronize()."
            )
        elif closure is None and not (self._was_scaled and not self._reducer.has_started()):
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        elif closure is not None:
            closure = functools.partial(self._reduced, closure)
        self._is_synchronized = self._was_scaled = False
        return super().step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients: see torch.optim.Optimizer.

        Raises:
            AssertionError: They are being reduced.
        """
        self._check_nothing_started(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(). This is prohibited as it can cause a race condition."
        )
        self._is_synchronized = self._was_scaled = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are reduced too: see torch.optim.Optimizer. Every rank calls it."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            number = len(self.param_groups) - 1
            self._reducer.add(name_group(number, self.param_groups[number], self._given_names))

    def _reduced(self, closure: Closure) -> Any:
        loss = closure()
        self.synchronize()
        self._is_synchronized = False
        if not isinstance(loss, torch.Tensor) or self._reducer is None:
            return loss
        return self._reducer.reduce_loss(loss.detach())

    def _check_nothing_started(self, text: str) -> None:
        if self._reducer is not None and self._reducer.has_started():
            raise AssertionError(text)


def _is_called_by_a_grad_scaler() -> bool:
    """Whether torch.amp.GradScaler (or torch.cuda.amp's, of older releases) has asked our caller."""
    module = str(sys._getframe(2).f_globals.get("__name__"))
    return module.startswith("torch.") and module.endswith(".grad_scaler")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that it steps with the gradients of all ranks.

    The reduction of gradients starts when the backward pass has computed 1 MiB of them, or the whole group, and goes on
    while others are computed; step() waits for all. The result is an instance of the optimizer's own class, with the
    same state and parameter groups, and has three methods more: synchronize(), skip_synchronize() and
    set_backward_passes_per_step().

    Args:
        optimizer: Any torch.optim.Optimizer; don't use it directly afterwards.
        named_parameters: Names for the parameters, usually model.named_parameters(). They match the gradients with the
            other ranks' and occur in messages. Optimizers that reduce at the same time need different names.
        compression: How gradients are sent: Compression.none, .fp16, .bf16, or an object with compress and decompress.
        backward_passes_per_step: How many backward passes add up their gradients before these are reduced.
        op: Average or Sum of the gradients; or Adasum, which combines the ranks' steps instead of their gradients.
        gradient_predivide_factor: Divides the gradients before the sum, and the sum by the number of ranks over this
            factor: against overflow in float16. Only with Average.
        num_groups: Deprecated: groups as a number.
        groups: A number of groups into which the parameters are split, or lists of parameters: those of a group are
            reduced together, when the last of them is ready.
        sparse_as_dense: Reduce sparse gradients as dense ones.
        process_set: The ranks that train together. On other ranks the optimizer steps with its own gradients.

    Raises:
        ValueError: A wrong argument, or Horovod is not initialized.
    """
    basics.size()  # fails before init
    if isinstance(optimizer, WrappingOptimizer):
        raise ValueError("This optimizer is a DistributedOptimizer already.")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer: op must be Average, Sum or Adasum, it is {op!r}.")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average.")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be > 0, it is {gradient_predivide_factor}.")
    check_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    check_groups(groups)
    given_names = names_by_parameter(named_parameters)
    check_all_named(optimizer.param_groups, given_names)
    named = [
        pair for number, group in enumerate(optimizer.param_groups) for pair in name_group(number, group, given_names)
    ]
    active = reduces(process_set)
    if op == Adasum and active:
        steps = StepCombiner(compression, backward_passes_per_step, process_set)
        steps.add(named)
        wrapped = wrap(optimizer, AdasumOptimizer, _steps=steps, _given_names=given_names)
        weakref.finalize(wrapped, steps.close).atexit = False
        return wrapped
    reducer = None
    if active:
        reducer = GradientReducer(
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            group_of=group_numbers(groups, [parameter for _, parameter in named]),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        reducer.add(named)
    wrapped = wrap(
        optimizer,
        _ReducingOptimizer,
        _reducer=reducer,
        _given_names=given_names,
        _synchronizes=True,
        _is_synchronized=False,
        _was_scaled=False,
    )
    if reducer is not None:
        weakref.finalize(wrapped, reducer.close).atexit = False
    return wrapped
