"""horovod.keras with Keras 3 on PyTorch (KERAS_BACKEND=torch).

Keras reads the variable when it is imported, so that is done by the ranks only, within functions.
"""

import importlib.util
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from cases import Cases, Outcomes, raises

import horovod.torch as hvd

ENVIRONMENT = {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
BATCH = 6
cases = Cases()

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs the Python package keras")


def start() -> None:
    import horovod.keras

    horovod.keras.init()
    assert "tensorflow" not in sys.modules


def models(count: int, dtype: str = "float64") -> list[Any]:
    """Models with the same weights."""
    import keras

    made = []
    for _ in range(count):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, activation="tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
        made.append(keras.Sequential([keras.Input((4,)), *layers]))
    return made


def data(own: bool, batches: int = 4) -> tuple[Any, Any]:
    """This rank's part of each batch, or the joined batches."""
    values = np.random.default_rng(0).standard_normal((batches, hvd.size(), BATCH, 4))
    values = values[:, hvd.rank()] if own else values
    values = values.reshape(-1, 4)
    return values, values.sum(axis=1, keepdims=True) ** 2


def fit(model: Any, optimizer: Any, own: bool, **arguments: Any) -> Any:
    model.compile(optimizer, "mse")
    batch_size = BATCH if own else BATCH * hvd.size()
    return model.fit(*data(own), batch_size=batch_size, shuffle=False, verbose=0, **arguments)


def check_same(model: Any, expected: Any, what: str) -> None:
    for value, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-7, atol=1e-7, err_msg=what)
    check_same_on_all_ranks(model)


def check_same_on_all_ranks(model: Any) -> None:
    variables = [*model.variables, *model.optimizer.variables]
    everyone = hvd.allgather_object([variable.numpy().tobytes() for variable in variables])
    assert everyone[0] == everyone[1]


@cases.add
def fit_learns_what_one_process_learns() -> None:
    import keras

    import horovod.keras as hvd_keras

    ways: list[tuple[str, dict[str, Any]]] = [
        ("SGD", {}),
        ("Adam", {}),
        ("RMSprop", {"groups": 2}),
        ("SGD", {"gradient_predivide_factor": 2.0}),
    ]
    for name, arguments in ways:
        model, alone = models(2)
        kind = getattr(keras.optimizers, name)
        fit(model, hvd_keras.DistributedOptimizer(kind(0.01), **arguments), own=True)
        fit(alone, kind(0.01), own=False)
        check_same(model, alone, what=f"{name} {arguments}")
    model, alone = models(2)
    groups = [model.trainable_variables[:1], model.trainable_variables[2:]]
    fit(model, hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01), groups=groups), own=True)
    fit(alone, keras.optimizers.SGD(0.01), own=False)
    check_same(model, alone, what="lists of variables as groups")
    with raises(ValueError, "device_dense"):
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01), device_dense="/cpu:0")


@cases.add
def several_backward_passes_make_a_step() -> None:
    import keras

    import horovod.keras as hvd_keras

    model, alone = models(2)
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.01), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    fit(model, optimizer, own=True)
    alone.compile(keras.optimizers.SGD(0.01), "mse")
    alone.fit(*data(own=False), batch_size=2 * BATCH * hvd.size(), shuffle=False, verbose=0)
    check_same(model, alone, what="two passes a step")
    assert int(optimizer.iterations.numpy()) == 2


@cases.add
def layers_of_a_partial_optimizer_stay_local() -> None:
    import keras

    import horovod.keras as hvd_keras

    (model,) = models(1)
    optimizer = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[0])
    fit(model, optimizer, own=True)
    first, second = hvd.allgather_object([layer.kernel.numpy() for layer in model.layers])
    assert not np.array_equal(first[0], second[0])


@cases.add
def callbacks_begin_alike_average_metrics_and_warm_up() -> None:
    import keras

    import horovod.keras as hvd_keras

    (model,) = models(1)
    model.layers[0].kernel.assign(model.layers[0].kernel + hvd.rank())
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=2),
    ]
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9))
    history = fit(model, optimizer, own=True, epochs=2, callbacks=callbacks).history
    check_same_on_all_ranks(model)
    assert hvd.broadcast_object(history, 0) == history
    np.testing.assert_allclose(history["lr"], [0.015, 0.02], rtol=1e-6)
    own = model.layers[0].bias
    own.assign(own + hvd.rank())
    keep = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[own])
    model.layers[1].bias.assign(model.layers[1].bias + hvd.rank())
    keep.set_model(model)
    keep.on_train_batch_end(0)
    mine, other = hvd.allgather_object([layer.bias.numpy() for layer in model.layers])
    assert not np.array_equal(mine[0], other[0])
    np.testing.assert_array_equal(mine[1], other[1])


@cases.add
def mixed_precision_skips_the_same_steps_on_all_ranks() -> None:
    import keras

    import horovod.keras as hvd_keras

    for around, poison in ((False, False), (False, True), (True, True)):
        (model,) = models(1, dtype="mixed_float16")
        optimizer = keras.optimizers.SGD(0.01)
        if around:
            model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), "mse")
        else:
            model.compile(keras.optimizers.LossScaleOptimizer(hvd_keras.DistributedOptimizer(optimizer)), "mse")
        values, labels = (array / 50 for array in data(own=True))
        if poison and hvd.rank() == 1:
            values[BATCH : 2 * BATCH] = 1e30
        model.fit(values, labels, batch_size=BATCH, shuffle=False, verbose=0)
        check_same_on_all_ranks(model)
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        assert int(model.optimizer.inner_optimizer.iterations.numpy()) == (3 if poison else 4)


@cases.add
def models_are_saved_and_loaded_with_their_optimizer() -> None:
    import keras

    import horovod.keras as hvd_keras

    (model,) = models(1)
    fit(model, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), own=True)
    with TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        assert type(keras.models.load_model(path).optimizer) is type(keras.optimizers.Adam())
        again = hvd_keras.load_model(path)
    for one in (model, again):
        one.fit(*data(own=True), batch_size=BATCH, shuffle=False, verbose=0)
    check_same(again, model, what="loaded")


@cases.add
def values_are_reduced_gathered_and_sent() -> None:
    import keras

    import horovod.keras as hvd_keras

    rank = hvd.rank()
    assert hvd_keras.allreduce(2.0 * rank).tolist() == 1.0
    assert hvd_keras.allreduce(keras.Variable([1.0, rank]), average=None, op=hvd_keras.Sum).tolist() == [2.0, 1.0]
    assert hvd_keras.allgather([rank] * (rank + 1)).tolist() == [0, 1, 1]
    assert hvd_keras.broadcast(rank + 5, 1).tolist() == 6
    assert hvd_keras.reducescatter([[1.0], [3.0]], op=hvd_keras.Sum).tolist() == [[2.0], [6.0]][rank : rank + 1]
    with raises(RuntimeError, "BroadcastGlobalVariablesCallback"):
        hvd_keras.broadcast_global_variables(0)


@cases.add
def bindings_for_tensorflow_say_what_to_use() -> None:
    if importlib.util.find_spec("tensorflow") is None:
        return
    import keras

    with raises(ImportError, "Keras runs on torch", "import horovod.keras as hvd"):
        import horovod.tensorflow.keras
    import horovod.tensorflow

    with raises(ValueError, "Keras runs on torch", "import horovod.keras as hvd"):
        horovod.tensorflow.DistributedOptimizer(keras.optimizers.SGD())


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start, env=ENVIRONMENT)


@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the Python package jax")
def test_keras_on_jax_says_what_to_use() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-c", "import horovod.keras"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "Keras runs on jax" in ended.stderr
    assert "set KERAS_BACKEND to tensorflow or torch" in ended.stderr
