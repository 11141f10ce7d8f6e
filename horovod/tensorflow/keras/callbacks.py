"""Callbacks for tf.keras."""

# ruff: noqa: D101 (the classes have the docstrings of what they are made of)

from typing import Any

import tensorflow as tf

from horovod._keras import callbacks as _callbacks
from horovod._keras import on_tensorflow


class BroadcastGlobalVariablesCallback(_callbacks.BroadcastGlobalVariables, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.BroadcastGlobalVariables.__doc__
    _framework = on_tensorflow


class MetricAverageCallback(_callbacks.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.MetricAverage.__doc__


class LearningRateScheduleCallback(_callbacks.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.LearningRateSchedule.__doc__
    _framework = on_tensorflow


class LearningRateWarmupCallback(_callbacks.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _callbacks.LearningRateWarmup.__doc__
    _framework = on_tensorflow


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model only; where, is to be set as `filepath` before training.

    Args:
        monitor: The metric that decides.
        verbose: 1: tell when it saves.
        save_weights_only: Save the weights, not the model.
        mode: Whether the metric should be "min" or "max"; "auto": by its name.
        save_freq: "epoch", or after how many batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Keeps the arguments."""
        super().__init__(
            filepath="unset.weights.h5",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def set_model(self, model: Any) -> None:
        """Fails if there is no place to save to."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its attribute `filepath` before training.")
        super().set_model(model)
