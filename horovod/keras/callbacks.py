"""Callbacks for Keras 3."""

# ruff: noqa: D101 (the classes have the docstrings of what they are made of)

from typing import Any

import keras

from horovod._keras import callbacks as _callbacks
from horovod._keras.framework import framework_of

_framework = framework_of(keras)


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.BroadcastGlobalVariables.__doc__
    _framework = _framework


class MetricAverageCallback(_callbacks.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(_callbacks.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.LearningRateSchedule.__doc__
    _framework = _framework


class LearningRateWarmupCallback(_callbacks.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.LearningRateWarmup.__doc__
    _framework = _framework


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
