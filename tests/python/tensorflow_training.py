"""Small Keras models, data and training loops for the tests: every rank can also be the one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

BATCH = 6  # samples of a step on each rank
STEPS = 4
CLASSES = 4

Data = list[tuple[Any, Any]]  # batches of values and labels
keras = tf.keras


def dense(normalization: Any = None) -> Any:
    """Two layers."""
    return keras.Sequential(
        [
            keras.Input((8,), dtype="float64"),
            keras.layers.Dense(16, activation="tanh", dtype="float64"),
            keras.layers.Dense(CLASSES, dtype="float64"),
        ]
    )


def convolution(normalization: Any = None) -> Any:
    """A convolution with batch normalization, over the batch of all ranks."""
    normalize = normalization or keras.layers.BatchNormalization
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="float64"),
            keras.layers.Conv2D(4, 3, use_bias=False, dtype="float64"),
            normalize(dtype="float64"),
            keras.layers.Activation("tanh", dtype="float64"),
            keras.layers.GlobalAveragePooling2D(dtype="float64"),
            keras.layers.Dense(CLASSES, dtype="float64"),
        ]
    )


def embedding(normalization: Any = None) -> Any:
    """An embedding, whose gradients are IndexedSlices, before a dense layer."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            keras.layers.Embedding(12, 8, dtype="float64"),
            keras.layers.GlobalAveragePooling1D(dtype="float64"),
            keras.layers.Dense(CLASSES, dtype="float64"),
        ]
    )


INPUTS: dict[Callable[..., Any], Callable[[Any, int], Any]] = {
    dense: lambda random, rows: random.standard_normal((rows, 8)),
    convolution: lambda random, rows: random.standard_normal((rows, 8, 8, 1)),
    embedding: lambda random, rows: random.integers(0, 12, (rows, 5)),
}


def data_of(make: Callable[..., Any], own: bool, steps: int = STEPS) -> Data:
    """The batches of a model: this rank's part of each, or the joined ones."""
    batches = []
    for step in range(steps):
        random = np.random.default_rng(step)
        rows = BATCH * hvd.size()
        values, labels = INPUTS[make](random, rows), random.integers(0, CLASSES, rows)
        part = slice(BATCH * hvd.rank(), BATCH * (hvd.rank() + 1)) if own else slice(None)
        batches.append((tf.constant(values[part]), tf.constant(labels[part])))
    return batches


def loss_of(model: Any, values: Any, labels: Any) -> Any:
    """The mean cross-entropy."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=model(values, training=True))
    return tf.reduce_mean(losses)


def train(model: Any, optimizer: Any, batches: Data, wrap: Any = None, compiled: bool = False) -> None:
    """A training loop with a tape, which may be wrapped."""

    def step(values: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, values, labels)
        chosen = tape if wrap is None else wrap(tape)
        gradients = chosen.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if hasattr(optimizer, "build"):  # all but the legacy ones of Keras 2
        optimizer.build(model.trainable_variables)
    run = tf.function(step) if compiled else step
    for values, labels in batches:
        run(values, labels)


def fit(model: Any, optimizer: Any, batches: Data, epochs: int = 1) -> None:
    """The same by Keras."""
    # The mean over the batch is Keras' own reduction.
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    values, labels = (np.concatenate([batch[i].numpy() for batch in batches]) for i in range(2))
    model.fit(values, labels, batch_size=len(batches[0][1]), epochs=epochs, shuffle=False, verbose=0)


def check_same(model: Any, expected: Any, tolerance: float = 1e-7, what: str = "") -> None:
    """The weights are close to the expected ones, and bit by bit the same on all ranks."""
    own = [np.asarray(weight) for weight in model.get_weights()]
    for index, (value, wanted) in enumerate(zip(own, expected.get_weights(), strict=True)):
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{what}: weight {index}")
    everyone = hvd.allgather_object([value.tobytes() for value in own])
    assert all(other == everyone[0] for other in everyone), f"{what}: the ranks have different bits"


def twins(make: Callable[..., Any], normalization: Any = None) -> tuple[Any, Any]:
    """A model, and one for one process with the same weights."""
    keras.utils.set_random_seed(1)
    model, alone = make(normalization), make()
    alone.set_weights(model.get_weights())
    return model, alone
