"""Cases for Keras 2 alone: its optimizers, new and legacy, learn on two ranks what one process learns.

Keras 3 has the same in test_tensorflow_training.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from cases import Cases
from tensorflow_training import check_same, convolution, data_of, dense, embedding, fit, keras, train, twins

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

keras2_cases = Cases()
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda family: family.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda family: family.Adam(0.01),
    "Adagrad": lambda family: family.Adagrad(0.05),
}


def families() -> Iterator[Any]:
    assert keras.Model.__module__.startswith("tf_keras"), "TF_USE_LEGACY_KERAS=1 was not heard"
    yield from (keras.optimizers, keras.optimizers.legacy)


def learn(make: Callable[..., Any], name: str, family: Any, **arguments: Any) -> None:
    """Trains by fit on all ranks, and like one process, and compares."""
    model, alone = twins(make, hvd.SyncBatchNormalization if make is convolution else None)
    optimizer = OPTIMIZERS[name](family)
    fit(model, hvd.DistributedOptimizer(optimizer, **arguments), data_of(make, own=True))
    train(alone, OPTIMIZERS[name](family), data_of(make, own=False))
    check_same(model, alone, what=f"{make.__name__}, {family.__name__}.{name} {arguments}")


@keras2_cases.add
def optimizers_of_keras_2_learn_the_same() -> None:
    new, legacy = families()
    for family in (new, legacy):
        learn(dense, "Adam", family)
        learn(dense, "momentum", family, groups=2, gradient_predivide_factor=2.0)
        learn(embedding, "Adagrad", family)
    learn(convolution, "momentum", new)
    learn(embedding, "momentum", legacy, sparse_as_dense=True)


@keras2_cases.add
def tapes_train_models_of_keras_2() -> None:
    for make, compiled in ((dense, False), (convolution, True)):
        model, alone = twins(make, hvd.SyncBatchNormalization if make is convolution else None)
        optimizer = OPTIMIZERS["momentum"](keras.optimizers)
        train(model, optimizer, data_of(make, own=True), hvd.DistributedGradientTape, compiled)
        train(alone, OPTIMIZERS["momentum"](keras.optimizers), data_of(make, own=False))
        check_same(model, alone, what=make.__name__)


@keras2_cases.add
def several_passes_of_keras_2_make_a_step() -> None:
    for family in families():
        model, alone = twins(dense)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](family), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        fit(model, optimizer, data_of(dense, own=True))
        joined = data_of(dense, own=False)
        pairs = [
            (tf.concat([a[0], b[0]], 0), tf.concat([a[1], b[1]], 0))
            for a, b in zip(joined[::2], joined[1::2], strict=True)
        ]
        train(alone, OPTIMIZERS["momentum"](family), pairs)
        check_same(model, alone, what=family.__name__)
        assert int(optimizer.iterations.numpy()) == 2


@keras2_cases.add
def models_of_keras_2_are_trained_in_sessions_of_tensorflow_1() -> None:
    random = np.random.default_rng(hvd.rank())
    values = random.standard_normal((24, 4)).astype(np.float32)
    with tf.Graph().as_default():
        keras.utils.set_random_seed(hvd.rank())  # other weights on each rank
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.legacy.SGD(0.02, momentum=0.9))
        model.compile(optimizer, "mse")
        callbacks = [
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_keras.callbacks.MetricAverageCallback(),
            hvd_keras.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=2),
        ]
        labels = values.sum(axis=1, keepdims=True)
        history = model.fit(values, labels, batch_size=8, epochs=2, callbacks=callbacks, verbose=0).history
        outcomes = hvd.allgather_object((history, [weight.tobytes() for weight in model.get_weights()]))
    assert outcomes[0] == outcomes[1]
    np.testing.assert_allclose(history["lr"], [0.015, 0.02], rtol=1e-6)
