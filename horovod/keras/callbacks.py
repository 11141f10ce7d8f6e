"""Callbacks for Keras 3 on TensorFlow."""

# ruff: noqa: PLR0917

from collections.abc import Callable, Sequence
from typing import Any

import keras

from horovod._keras import callbacks as _callbacks


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    """After the first batch, gives all variables of model and optimizer the values of one rank.

    So all ranks begin with the same weights, whether those are random or restored from a checkpoint.

    Args:
        root_rank: The rank whose values are sent.
        device: Where the operation is to be run.
        local_variables: Variables that stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        """Keeps the arguments."""
        super().__init__(root_rank, device, local_variables)


class MetricAverageCallback(_callbacks.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of every epoch, averages the metrics over all ranks.

    Callbacks that look at metrics have to come after it in the list.

    Args:
        device: Where the operation is to be run.
    """

    def __init__(self, device: str = "") -> None:
        """Keeps the argument."""
        super().__init__(device)


class LearningRateScheduleCallback(_callbacks.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
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
        super().__init__(
            initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
        )


class LearningRateWarmupCallback(_callbacks.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from initial_lr / size to initial_lr over the first epochs, batch by batch.

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
        super().__init__(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model only; where, is to be set as `filepath` before training.

    Args:
        monitor: The metric that decides.
        verbose: 1: tell when it saves.
        mode: Whether the metric should be "min" or "max"; "auto": by its name.
        save_freq: "epoch", or after how many batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Keeps the arguments."""
        super().__init__(
            filepath="unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def set_model(self, model: Any) -> None:
        """Fails if there is no place to save to."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its attribute `filepath` before training.")
        super().set_model(model)
