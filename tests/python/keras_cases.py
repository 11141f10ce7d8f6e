"""Keras with Horovod: callbacks, saved models, mixed precision, operations on values. Cases for two ranks.

They are run with Keras 3 and, by TF_USE_LEGACY_KERAS=1, with Keras 2 (test_tensorflow_keras.py).
"""

import contextlib
import io
import itertools
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tensorflow as tf
from cases import Cases, raises

import horovod.keras
import horovod.tensorflow.keras as hvd
from horovod.tensorflow import SyncBatchNormalization, allgather_object, broadcast_object

cases = Cases()
keras = tf.keras
KERAS2 = keras.Model.__module__.startswith("tf_keras")
BINDINGS = [hvd] if KERAS2 else [hvd, horovod.keras]  # the latter has callbacks of Keras 3 alone
# Keras 2 has two generations of optimizers.
FAMILIES = [keras.optimizers, keras.optimizers.legacy] if KERAS2 else [keras.optimizers]


def start() -> None:
    hvd.init()


def model_of(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def data(rows: int = 24) -> tuple[Any, Any]:
    random = np.random.default_rng(hvd.rank())
    values = random.standard_normal((rows, 4)).astype(np.float32)
    return values, values.sum(axis=1, keepdims=True)


def variables_of(optimizer: Any) -> Any:
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def scale_of(optimizer: Any) -> float:
    return float(optimizer.loss_scale if KERAS2 else optimizer.dynamic_scale)


def momentums_of(optimizer: Any, model: Any) -> Any:
    if hasattr(optimizer, "momentums"):
        return optimizer.momentums
    return [optimizer.get_slot(weight, "momentum") for weight in model.trainable_weights]


def check_same_on_all_ranks(variables: Any) -> None:
    everyone = allgather_object([np.asarray(variable).tobytes() for variable in variables])
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
    for binding, family in itertools.product(BINDINGS, FAMILIES):
        model = model_of(seed=hvd.rank())  # other weights on each rank
        optimizer = binding.DistributedOptimizer(family.Adam(0.01))
        model.compile(optimizer, "mse", metrics=["mae"])
        seen: list[dict[str, float]] = []
        callbacks = [
            binding.callbacks.BroadcastGlobalVariablesCallback(0),
            binding.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, seen=seen: seen.append(dict(logs))),
        ]
        model.fit(*data(), batch_size=8, epochs=2, validation_data=data(), callbacks=callbacks, verbose=0)
        check_same_on_all_ranks([*model.variables, *variables_of(optimizer)])
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
    for family in FAMILIES:
        check_learning_rates(hvd.DistributedOptimizer(family.SGD(0.2, momentum=0.9)))


def check_learning_rates(optimizer: Any) -> None:
    model = model_of(seed=0)
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
    for family in FAMILIES:
        check_momentum(family.SGD(0.1, momentum=0.5))


def check_momentum(optimizer: Any) -> None:
    model = model_of(seed=0)
    model.compile(optimizer, "mse")
    model.fit(*data(), epochs=1, verbose=0)
    momentums = momentums_of(optimizer, model)
    before = [np.array(slot) for slot in momentums]
    for correction, factor in ((True, 3.0), (False, 1.0)):
        for slot, value in zip(momentums, before, strict=True):
            slot.assign(value)
        optimizer.learning_rate = 0.1
        callback = hvd.callbacks.LearningRateScheduleCallback(0.3, lambda _: 1.0, momentum_correction=correction)
        callback.set_model(model)
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        for slot, value in zip(momentums, before, strict=True):
            np.testing.assert_allclose(np.asarray(slot), value * factor, rtol=1e-6)


@cases.add
def models_are_saved_and_loaded_with_their_optimizer() -> None:
    with TemporaryDirectory() as folder:
        ways = [(hvd, "keras", family) for family in FAMILIES]
        ways += [(BINDINGS[-1], "h5", family) for family in FAMILIES]
        ways += [(hvd, "folder", keras.optimizers)] if KERAS2 else []
        for number, (binding, suffix, family) in enumerate(ways):
            model = model_of(seed=0)
            optimizer = binding.DistributedOptimizer(family.Adam(0.02))
            model.compile(optimizer, keras.losses.MeanSquaredError())  # h5 files can't have "mse"
            model.fit(*data(), epochs=2, verbose=0)
            path = os.path.join(folder, f"model{number}-{hvd.rank()}" + (f".{suffix}" if suffix != "folder" else ""))
            model.save(path)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is family.Adam
            again = binding.load_model(path)
            for kept, loaded in zip(variables_of(plain.optimizer), variables_of(again.optimizer), strict=True):
                np.testing.assert_array_equal(np.asarray(kept), np.asarray(loaded))
            again.fit(*data(), epochs=2, verbose=0)
            check_same_on_all_ranks([*again.variables, *variables_of(again.optimizer)])
            # Not from every kind of file Keras itself restores the state of every optimizer.
            restored = len(variables_of(plain.optimizer)) == len(variables_of(optimizer))
            assert restored or (suffix, family) != ("keras", keras.optimizers)
            if not restored:
                continue
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


def mixed(policy: str, optimizer: Any, poison: bool) -> Any:
    """Trains with a policy; if asked for, rank 1 has an infinite gradient in the second of three steps."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = model_of(seed=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.compile(optimizer, "mse")
    # So small that float16 holds the gradients, which are scaled by 2 ** 15.
    values, labels = (array / 50 for array in data(24))
    if poison and hvd.rank() == 1:
        values[8:16] = 1e30
    model.fit(values, labels, batch_size=8, shuffle=False, verbose=0)
    check_same_on_all_ranks([*model.variables, *variables_of(model.optimizer)])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    return model


@cases.add
def mixed_precision_skips_the_same_steps_on_all_ranks() -> None:
    within: list[Callable[[Any], Any]] = [
        hvd.DistributedOptimizer,  # compile() puts a LossScaleOptimizer around it
        lambda optimizer: hvd.DistributedOptimizer(keras.mixed_precision.LossScaleOptimizer(optimizer)),
    ]
    ways = [(keras.optimizers, make, poison) for make in within for poison in (False, True)]
    ways += [(family, make, True) for family in FAMILIES[1:] for make in within]
    for family, make, poison in ways:
        optimizer = mixed("mixed_float16", make(family.SGD(0.01)), poison).optimizer
        # Keras 2 counts steps that it skips.
        assert int(np.asarray(optimizer.inner_optimizer.iterations)) == (2 if poison and not KERAS2 else 3)
        assert scale_of(optimizer) == (2**14 if poison else 2**15)
    mixed("mixed_bfloat16", hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), poison=False)


@cases.add
def the_scale_of_the_loss_is_that_of_rank_0() -> None:
    # As after a restart, for which rank 0 alone has read a checkpoint.
    for family in FAMILIES:
        inner = hvd.DistributedOptimizer(family.SGD(0.01))
        own = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0 ** (10 + hvd.rank()))
        model = model_of(seed=0)
        model.compile(own, "mse")
        model.fit(*data(), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert scale_of(own) == 2.0**10


@cases.add
def layers_of_a_partial_optimizer_stay_local() -> None:
    for family in FAMILIES:
        model = model_of(seed=0)
        optimizer = horovod.keras.PartialDistributedOptimizer(family.SGD(0.1), local_layers=model.layers[0])
        model.compile(optimizer, "mse")
        model.fit(*data(), verbose=0)
        check_same_on_all_ranks(model.layers[1].weights)
        kernels = allgather_object(np.asarray(model.layers[0].kernel))
        assert not np.array_equal(*kernels)


@cases.add
def normalization_layers_are_saved_and_have_masks() -> None:
    layer = SyncBatchNormalization(momentum=0.5)
    assert layer.name.startswith("sync_batch_normalization")
    assert layer.get_config()["momentum"] == 0.5
    with raises(ValueError, "fused"):
        SyncBatchNormalization(fused=True)
    # Rank r has r + 1 samples that count.
    rank = hvd.rank()
    values = tf.constant([[[1.0], [2.0], [9.0]], [[4.0], [6.0], [9.0]]])[rank : rank + 1]
    mask = tf.constant([[True, False, False], [True, True, False]])[rank : rank + 1]
    layer(values, training=True, mask=mask)
    np.testing.assert_allclose(np.asarray(layer.moving_mean), [0.5 * np.mean([1, 4, 6])], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(layer.moving_variance), [0.5 + 0.5 * np.var([1, 4, 6])], rtol=1e-6)
