"""Keras with Horovod: callbacks, saved models, mixed precision, operations on values."""

import contextlib
import io
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import Cases, Outcomes, raises
from tensorflow_arrays import ENVIRONMENT, LIMIT

import horovod.keras
import horovod.tensorflow.keras as hvd
from horovod.tensorflow import broadcast_object

cases = Cases()
BINDINGS = (hvd, horovod.keras)


def start() -> None:
    hvd.init()


def model_of(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def data(rows: int = 24) -> tuple[Any, Any]:
    random = np.random.default_rng(hvd.rank())
    values = random.standard_normal((rows, 4)).astype(np.float32)
    return values, values.sum(axis=1, keepdims=True)


def check_same_on_all_ranks(variables: Any) -> None:
    everyone = horovod.tensorflow.allgather_object([np.asarray(variable).tobytes() for variable in variables])
    assert everyone[0] == everyone[1]


@cases.add
def values_are_reduced_gathered_and_sent() -> None:
    rank = hvd.rank()
    for binding in BINDINGS:
        assert binding.allreduce(2.0 * rank, name="value").tolist() == 1.0
        assert binding.allreduce([1.0, rank], average=None, op=binding.Sum).tolist() == [2.0, 1.0]
        assert binding.allgather([rank] * (rank + 1)).tolist() == [0, 1, 1]
        assert binding.broadcast(rank + 5, 1).tolist() == 6
        assert binding.reducescatter([[1.0], [3.0]], op=binding.Sum).tolist() == [[2.0], [6.0]][rank : rank + 1]
    with raises(ValueError, "average"):
        horovod.keras.allreduce(1.0, op=hvd.Sum)  # average=True is the default there


@cases.add
def callbacks_begin_alike_and_average_metrics() -> None:
    for binding in BINDINGS:
        model = model_of(seed=hvd.rank())  # other weights on each rank
        optimizer = binding.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse", metrics=["mae"])
        seen: list[dict[str, float]] = []
        callbacks = [
            binding.callbacks.BroadcastGlobalVariablesCallback(0),
            binding.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, seen=seen: seen.append(dict(logs))),
        ]
        model.fit(*data(), batch_size=8, epochs=2, validation_data=data(), callbacks=callbacks, verbose=0)
        check_same_on_all_ranks([*model.variables, *optimizer.variables])
        assert set(seen[0]) == {"loss", "mae", "val_loss", "val_mae"}
        assert broadcast_object(seen, 0) == seen


@cases.add
def local_variables_are_not_broadcast() -> None:
    model = model_of(seed=hvd.rank())
    model.compile(keras.optimizers.SGD(0.0), "mse")
    own = np.asarray(model.layers[0].kernel)
    local = [model.layers[0].kernel]
    model.fit(*data(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)], verbose=0)
    np.testing.assert_array_equal(np.asarray(model.layers[0].kernel), own)
    check_same_on_all_ranks(model.layers[1].weights)


@cases.add
def the_learning_rate_is_raised_and_scheduled() -> None:
    model = model_of(seed=0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9))
    model.compile(optimizer, "mse")
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(optimizer.learning_rate))
    )
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=2)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        history = model.fit(*data(), batch_size=12, epochs=4, callbacks=[warmup, decay, note], verbose=0)
    # Two batches an epoch: four steps from 0.1 to 0.2, then 0.2 * 0.5 ** (epoch - 2).
    np.testing.assert_allclose(rates, [0.125, 0.15, 0.175, 0.2, 0.2, 0.2, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [0.15, 0.2, 0.2, 0.1], rtol=1e-6)
    assert ("warmup to 0.2" in said.getvalue()) == (hvd.rank() == 0)
    smooth = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 1 / (1 + epoch), staircase=False)
    rates.clear()
    model.fit(*data(), batch_size=12, epochs=1, callbacks=[smooth, note], verbose=0)
    np.testing.assert_allclose(rates, [1.0, 1 / 1.5], rtol=1e-6)


@cases.add
def momentum_follows_the_learning_rate() -> None:
    model = model_of(seed=0)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(optimizer, "mse")
    model.fit(*data(), epochs=1, verbose=0)
    before = [np.asarray(slot) for slot in optimizer.momentums]
    for correction, factor in ((True, 3.0), (False, 1.0)):
        for slot, value in zip(optimizer.momentums, before, strict=True):
            slot.assign(value)
        optimizer.learning_rate = 0.1
        callback = hvd.callbacks.LearningRateScheduleCallback(0.3, lambda _: 1.0, momentum_correction=correction)
        callback.set_model(model)
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        for slot, value in zip(optimizer.momentums, before, strict=True):
            np.testing.assert_allclose(np.asarray(slot), value * factor, rtol=1e-6)


@cases.add
def models_are_saved_and_loaded_with_their_optimizer() -> None:
    with TemporaryDirectory() as folder:
        for binding, suffix in ((hvd, "keras"), (horovod.keras, "h5")):
            model = model_of(seed=0)
            optimizer = binding.DistributedOptimizer(keras.optimizers.Adam(0.02))
            model.compile(optimizer, keras.losses.MeanSquaredError())  # h5 files can't have "mse"
            model.fit(*data(), epochs=2, verbose=0)
            path = os.path.join(folder, f"model{hvd.rank()}.{suffix}")
            model.save(path)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is keras.optimizers.Adam
            again = binding.load_model(path)
            for kept, loaded in zip(plain.optimizer.variables, again.optimizer.variables, strict=True):
                np.testing.assert_array_equal(np.asarray(kept), np.asarray(loaded))
            again.fit(*data(), epochs=2, verbose=0)
            check_same_on_all_ranks([*again.variables, *again.optimizer.variables])
            if suffix == "h5":
                continue  # from these Keras itself does not restore an optimizer's state
            model.fit(*data(), epochs=2, verbose=0)
            np.testing.assert_allclose(again.get_weights()[0], model.get_weights()[0], rtol=1e-5)


@cases.add
def the_best_model_is_kept() -> None:
    with TemporaryDirectory() as folder:
        for binding in BINDINGS:
            best = binding.callbacks.BestModelCheckpoint(monitor="loss")
            model = model_of(seed=0)
            model.compile(binding.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
            with raises(ValueError, "filepath"):
                model.fit(*data(), callbacks=[best], verbose=0)
            best.filepath = os.path.join(folder, f"best{hvd.rank()}.keras")
            model.fit(*data(), epochs=2, callbacks=[best], verbose=0)
            assert os.path.exists(best.filepath)


def mixed(policy: str, make: Callable[[Any], Any], poison: bool) -> Any:
    """Trains with a policy; if asked for, rank 1 has an infinite gradient in the second of three steps."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = model_of(seed=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.compile(make(keras.optimizers.SGD(0.01)), "mse")
    # So small that float16 holds the gradients, which are scaled by 2 ** 15.
    values, labels = (array / 50 for array in data(24))
    if poison and hvd.rank() == 1:
        values[8:16] = 1e30
    model.fit(values, labels, batch_size=8, shuffle=False, verbose=0)
    check_same_on_all_ranks([*model.variables, *model.optimizer.variables])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return model


@cases.add
def mixed_precision_skips_the_same_steps_on_all_ranks() -> None:
    within: list[Callable[[Any], Any]] = [
        hvd.DistributedOptimizer,  # compile() puts a LossScaleOptimizer around it
        lambda optimizer: hvd.DistributedOptimizer(keras.mixed_precision.LossScaleOptimizer(optimizer)),
    ]
    for make in within:
        for poison in (False, True):
            model = mixed("mixed_float16", make, poison)
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert int(np.asarray(model.optimizer.inner_optimizer.iterations)) == (2 if poison else 3)
    mixed("mixed_bfloat16", hvd.DistributedOptimizer, poison=False)


@cases.add
def layers_of_a_partial_optimizer_stay_local() -> None:
    model = model_of(seed=0)
    optimizer = horovod.keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[0])
    model.compile(optimizer, "mse")
    model.fit(*data(), verbose=0)
    check_same_on_all_ranks(model.layers[1].weights)
    kernels = horovod.tensorflow.allgather_object(np.asarray(model.layers[0].kernel))
    assert not np.array_equal(*kernels)


@cases.add
def normalization_layers_are_saved_and_have_masks() -> None:
    layer = horovod.tensorflow.SyncBatchNormalization(momentum=0.5)
    assert layer.name.startswith("sync_batch_normalization")
    assert layer.get_config()["momentum"] == 0.5
    with raises(ValueError, "fused"):
        horovod.tensorflow.SyncBatchNormalization(fused=True)
    # Rank r has r + 1 samples that count.
    rank = hvd.rank()
    values = tf.constant([[[1.0], [2.0], [9.0]], [[4.0], [6.0], [9.0]]])[rank : rank + 1]
    mask = tf.constant([[True, False, False], [True, True, False]])[rank : rank + 1]
    layer(values, training=True, mask=mask)
    np.testing.assert_allclose(np.asarray(layer.moving_mean), [0.5 * np.mean([1, 4, 6])], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(layer.moving_variance), [0.5 + 0.5 * np.var([1, 4, 6])], rtol=1e-6)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start, LIMIT, ENVIRONMENT)


@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
