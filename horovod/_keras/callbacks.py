"""The callbacks, to be mixed with the Callback class of one Keras or the other."""

# ruff: noqa: PLR0917

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod._keras.loss_scale import scale_variables


def _variables_of(optimizer: Any) -> list[Any]:
    """All variables of an optimizer: of Keras 2's legacy ones they are what a function returns."""
    variables = optimizer.variables
    return [*(variables() if callable(variables) else variables), *scale_variables(optimizer)]


class _OnFramework:
    """Has what Keras runs on: on_tensorflow or on_torch, which the classes that are made of these set."""

    _framework: Any


class BroadcastGlobalVariables(_OnFramework):
    """After the first batch, gives all variables of model and optimizer the values of one rank.

    So all ranks begin with the same weights, whether those are random or restored from a checkpoint.

    Args:
        root_rank: The rank whose values are sent.
        device: Where the operation is to be run.
        local_variables: Variables that stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        """Keeps the arguments."""
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local_variables = {self._framework.reference(variable) for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """From now on this variable stays each rank's own."""
        self._local_variables.add(self._framework.reference(var))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does it after the first batch."""
        if self.broadcast_done:
            return
        own: Any = self
        candidates = [*own.model.variables, *_variables_of(own.model.optimizer)]
        reference = self._framework.reference
        shared = [variable for variable in candidates if reference(variable) not in self._local_variables]
        self._framework.broadcast_variables(shared, self.root_rank, self.device)
        self.broadcast_done = True


class MetricAverage:
    """At the end of every epoch, averages the metrics over all ranks.

    Callbacks that look at metrics have to come after it in the list.

    Args:
        device: Makes no difference: metrics are numbers of Python.
    """

    def __init__(self, device: str = "") -> None:
        """Keeps the argument."""
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages, in place."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        averages = hvd.allreduce(values, op=hvd.Average, name="MetricAverageCallback")
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateSchedule(_OnFramework):
    """Sets the learning rate to initial_lr * multiplier(epoch), for some epochs.

    Args:
        initial_lr: The learning rate without a multiplier.
        multiplier: A function of the epoch; or a number, whose powers are taken: 1 in the first epoch.
        start_epoch: The first epoch in which this is done.
        end_epoch: The first one in which it is not.
        staircase: Once an epoch; if not, before every batch, with a fractional epoch.
        momentum_correction: Keep what momentum has added up in step with the learning rate.
        steps_per_epoch: Batches of an epoch, if Keras can't tell.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Keeps the arguments."""
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = multiplier
            self.staircase = True
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds out how many steps an epoch has, if it needs to know."""
        own: Any = self
        if self.steps_per_epoch is None and not self.staircase:
            self.steps_per_epoch = _steps(own.params)
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter "
                    f"to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate: for an epoch at its first batch, or for every batch."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase and self.steps_per_epoch:
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Has the learning rate among the metrics."""
        if logs is not None:
            logs["lr"] = self._framework.number(_innermost(self).learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = _innermost(self)
        before = self._framework.number(optimizer.learning_rate)
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and before and after != before:
            # What momentum has added up contains the learning rate of its time, and gets the new one.
            own: Any = self
            for slot in _momentums(optimizer, own.model.trainable_weights):
                self._framework.multiply(slot, after / before)


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from initial_lr / size to initial_lr over the first epochs, batch by batch.

    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (https://arxiv.org/abs/1706.02677).

    Args:
        initial_lr: The learning rate at the end: that of one process times the number of ranks.
        warmup_epochs: How many epochs it takes.
        momentum_correction: Keep what momentum has added up in step with the learning rate.
        steps_per_epoch: Batches of an epoch, if Keras can't tell.
        verbose: 1: say so when the warm-up has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Keeps the arguments."""

        def multiplier(epoch: float) -> float:
            # The last batch of the warm-up has the whole learning rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Says so when the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = self._framework.number(_innermost(self).learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _innermost(callback: Any) -> Any:
    """The optimizer that has the learning rate: within a LossScaleOptimizer it is another one."""
    optimizer = callback.model.optimizer
    return getattr(optimizer, "inner_optimizer", optimizer)


def _momentums(optimizer: Any, weights: Sequence[Any]) -> list[Any]:
    """The variables in which an optimizer adds up momentum."""
    if hasattr(optimizer, "get_slot_names"):  # a legacy optimizer of Keras 2
        known = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(weight, "momentum") for weight in weights] if known else []
    if not getattr(optimizer, "momentum", None):
        return []
    slots = [slot for name in ("momentums", "_momentums") for slot in getattr(optimizer, name, None) or ()]
    return list({id(slot): slot for slot in slots if slot is not None}.values())


def _steps(params: dict[str, Any]) -> int | None:
    """The batches of an epoch, if Keras knows them; in sessions of TensorFlow 1 it tells of samples instead."""
    if params.get("steps"):
        return int(params["steps"])
    if params.get("samples") and params.get("batch_size"):
        return -(-int(params["samples"]) // int(params["batch_size"]))
    return None
