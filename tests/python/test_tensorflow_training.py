"""The acceptance of horovod.tensorflow: N ranks learn what one process learns from the batches of all of them together.

With a tape, eagerly and in a tf.function; with Keras' fit; and with optimizers and sessions of TensorFlow 1.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import Cases, Outcomes, raises
from tensorflow_arrays import ENVIRONMENT, LIMIT
from tensorflow_training import (
    check_same,
    convolution,
    data_of,
    dense,
    embedding,
    fit,
    keras,
    loss_of,
    train,
    twins,
)

import horovod.tensorflow as hvd

v1 = tf.compat.v1
equivalence = Cases()
cases = Cases()  # those, and what is tried with two ranks only

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
}


def start() -> None:
    hvd.init()


def learn(make: Callable[..., Any], name: str, way: str, optimizer: Any = None, tape: Any = None) -> None:
    """Trains on all ranks, and like one process, and compares."""
    normalization = hvd.SyncBatchNormalization if make is convolution else None
    model, alone = twins(make, normalization)
    if way == "fit":
        fit(model, optimizer or hvd.DistributedOptimizer(OPTIMIZERS[name]()), data_of(make, own=True))
    else:
        wrap = tape or hvd.DistributedGradientTape
        train(model, OPTIMIZERS[name](), data_of(make, own=True), wrap, compiled=way == "function")
    train(alone, OPTIMIZERS[name](), data_of(make, own=False))
    check_same(model, alone, what=f"{make.__name__}, {name}, {way}")


@equivalence.add
def dense_layers_learn_the_same() -> None:
    for name, way in (("momentum", "eager"), ("Adam", "function"), ("Adagrad", "fit"), ("Adam", "fit")):
        learn(dense, name, way)


@equivalence.add
def convolutions_with_normalization_over_all_ranks_learn_the_same() -> None:
    for name, way in (("Adam", "eager"), ("momentum", "function"), ("momentum", "fit")):
        learn(convolution, name, way)


@equivalence.add
def embeddings_learn_the_same() -> None:
    for name, way in (("momentum", "eager"), ("Adagrad", "function"), ("Adam", "fit")):
        learn(embedding, name, way)
    # Not Adam: Keras squares each slice of a gradient by itself, and so has other results for slices than for tensors.
    dense_gradients = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), sparse_as_dense=True)
    learn(embedding, "momentum", "fit", dense_gradients)


@cases.add
def groups_factors_and_sums_make_no_difference() -> None:
    learn(dense, "Adam", "fit", hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), groups=2))
    learn(dense, "Adam", "fit", hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), gradient_predivide_factor=2.0))
    learn(embedding, "Adam", "eager", tape=lambda tape: hvd.DistributedGradientTape(tape, groups=1))
    model, alone = twins(dense)
    groups = [model.trainable_variables[:2], model.trainable_variables[3:]]
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), groups=groups), data_of(dense, own=True))
    train(alone, OPTIMIZERS["Adam"](), data_of(dense, own=False))
    check_same(model, alone, what="lists of variables as groups")
    for arguments, text in (
        ({"groups": 0}, "groups should be"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
        ({"op": hvd.Adasum}, "Average and Sum"),
    ):
        with raises(ValueError, text):
            hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), **arguments)
    wrapped = hvd.DistributedOptimizer(OPTIMIZERS["Adam"]())
    with raises(ValueError, "before"):
        hvd.DistributedOptimizer(wrapped)
    with raises(ValueError, "expected an optimizer"):
        hvd.DistributedOptimizer("adam")


@cases.add
def compressed_gradients_are_about_the_same() -> None:
    model, alone = twins(dense)
    fit(
        model,
        hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), compression=hvd.Compression.fp16),
        data_of(dense, own=True),
    )
    train(alone, OPTIMIZERS["momentum"](), data_of(dense, own=False))
    check_same(model, alone, tolerance=1e-2)
    assert any(not np.array_equal(a, b) for a, b in zip(model.get_weights(), alone.get_weights(), strict=True))


@cases.add
def several_backward_passes_make_a_step() -> None:
    # Two batches of each rank are one batch of one process that is twice as large.
    for way in ("fit", "eager"):
        model, alone = twins(dense)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        if way == "fit":
            fit(model, optimizer, data_of(dense, own=True))
        else:
            train(model, optimizer, data_of(dense, own=True))
        joined = data_of(dense, own=False)
        pairs = [
            (tf.concat([a[0], b[0]], 0), tf.concat([a[1], b[1]], 0))
            for a, b in zip(joined[::2], joined[1::2], strict=True)
        ]
        train(alone, OPTIMIZERS["momentum"](), pairs)
        check_same(model, alone, what=way)
        assert int(optimizer.iterations.numpy()) == 2
    with raises(ValueError, "backward_passes_per_step must be > 0"):
        hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), backward_passes_per_step=0)
    sparse = hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), backward_passes_per_step=2)
    with raises(ValueError, "sparse_as_dense"):
        train(twins(embedding)[0], sparse, data_of(embedding, own=True))


@cases.add
def local_variables_keep_their_own_gradients() -> None:
    model, _ = twins(dense)
    values, labels = data_of(dense, own=True)[0]
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(model, values, labels)
    own = tape.gradient(loss, model.trainable_variables)
    average = hvd.grouped_allreduce(own)
    layer = model.layers[0]
    for scale, factor in ((True, 1.0 / hvd.size()), (False, 1.0)):
        partial = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scale)
        got = partial.gradient(loss, model.trainable_variables)
        np.testing.assert_allclose(got[0], own[0] * factor)
        np.testing.assert_allclose(got[2], average[2])
    local, reduced = partial.get_local_and_global_gradients(loss, model.trainable_variables)
    assert all(pair[0] is known for pair, known in zip(local, layer.trainable_variables, strict=True))
    np.testing.assert_allclose(local[0][1], own[0])
    np.testing.assert_allclose(reduced[0][1], average[2])
    assert reduced[0][0] is model.trainable_variables[2]
    # The tape itself is as before.
    np.testing.assert_array_equal(tape.gradient(loss, model.trainable_variables)[2], own[2])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for variable in layer.trainable_variables:
        optimizer.register_local_var(variable)
    before = model.get_weights()
    optimizer.apply_gradients(zip(own, model.trainable_variables, strict=True))
    np.testing.assert_allclose(model.get_weights()[0], before[0] - own[0] / hvd.size())
    np.testing.assert_allclose(model.get_weights()[2], before[2] - average[2])


@cases.add
def ranks_outside_a_process_set_train_alone() -> None:
    first = hvd.add_process_set([0])
    model, alone = twins(dense)
    batches = data_of(dense, own=True)
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), process_set=first), batches)
    if not first.included():
        train(alone, OPTIMIZERS["momentum"](), batches)
        np.testing.assert_allclose(model.get_weights()[0], alone.get_weights()[0], rtol=1e-7, atol=1e-7)
    hvd.remove_process_set(first)


# ---- TensorFlow 1 ----------------------------------------------------------------------------------------------------


def linear_model(values: Any, labels: Any, shift: float) -> Any:
    """Variables of TensorFlow 1, and the loss."""
    initial = np.random.default_rng(3).standard_normal((8, 4))
    weights = v1.get_variable("weights", initializer=tf.constant(initial))
    bias = v1.get_variable("bias", initializer=tf.fill([4], tf.constant(shift, tf.float64)))
    logits = tf.matmul(values, weights) + bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def v1_weights(batches: Any, make: Callable[[], Any], folder: str | None = None, shift: float = 0.0) -> Any:
    """What a session learns."""
    with tf.Graph().as_default():
        values = v1.placeholder(tf.float64, [None, 8])
        labels = v1.placeholder(tf.int64, [None])
        loss = linear_model(values, labels, shift)
        step = make().minimize(loss, global_step=v1.train.get_or_create_global_step())
        variables = v1.trainable_variables()
        hooks = [] if folder is None else [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(checkpoint_dir=folder or None, hooks=hooks) as session:
            for batch_values, batch_labels in batches:
                session.run(step, {values: batch_values.numpy(), labels: batch_labels.numpy()})
            return session.run(variables)


@equivalence.add
def sessions_of_tensorflow_1_learn_the_same() -> None:
    makers: list[Callable[[], Any]] = [
        lambda: v1.train.GradientDescentOptimizer(0.1),
        lambda: v1.train.AdagradOptimizer(0.1),
        lambda: v1.train.AdamOptimizer(0.01),
    ]
    with TemporaryDirectory() as folder:
        for index, make in enumerate(makers):
            checkpoints = str(Path(folder) / str(index)) if hvd.rank() == 0 else ""

            def distributed(make: Callable[[], Any] = make) -> Any:
                return hvd.DistributedOptimizer(make())

            # Each rank begins with another bias, if the hook does not do its work.
            learned = v1_weights(data_of(dense, own=True), distributed, checkpoints, hvd.rank())
            alone = v1_weights(data_of(dense, own=False), make)
            for got, want in zip(learned, alone, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)
            if hvd.rank() == 0:
                assert v1.train.latest_checkpoint(checkpoints)


@cases.add
def several_passes_of_tensorflow_1_make_a_step() -> None:
    batches = data_of(dense, own=True)
    learned = v1_weights(
        batches,
        lambda: hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
        ),
    )
    joined = data_of(dense, own=False)
    pairs = [
        (tf.concat([a[0], b[0]], 0), tf.concat([a[1], b[1]], 0)) for a, b in zip(joined[::2], joined[1::2], strict=True)
    ]
    alone = v1_weights(pairs, lambda: v1.train.GradientDescentOptimizer(0.1))
    for got, want in zip(learned, alone, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)


@cases.add
def adasum_combines_the_steps_of_tensorflow_1() -> None:
    def one_step(make: Callable[[], Any], batches: Any) -> Any:
        return v1_weights(batches[:1], make)[0]

    initial = np.random.default_rng(3).standard_normal((8, 4))
    own = one_step(lambda: v1.train.GradientDescentOptimizer(0.5), data_of(dense, own=True)) - initial
    a, b = (part.astype(np.float64) for part in hvd.allgather_object(own))
    dot = (a * b).sum()
    want = initial + (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
    adasum = lambda: hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)  # noqa: E731
    np.testing.assert_allclose(one_step(adasum, data_of(dense, own=True)), want, rtol=1e-7)


cases.include(equivalence)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start, LIMIT, ENVIRONMENT)


@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


@pytest.fixture(scope="module")
def outcomes_of_three() -> Outcomes:
    return equivalence.run(3, start, LIMIT, ENVIRONMENT)


@pytest.mark.parametrize("case", equivalence.names())
def test_three_ranks(outcomes_of_three: Outcomes, case: str) -> None:
    outcomes_of_three.check(case)
