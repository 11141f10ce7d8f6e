"""Trains a small network on scikit-learn's handwritten digits with Keras and Horovod.

    python examples/tensorflow2_keras_digits.py                      one process
    horovodrun -np 2 python examples/tensorflow2_keras_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data. The lines that make a program for one process one for
many have `hvd.` in them. It runs with Keras 3 and, where tf-keras is installed, by TF_USE_LEGACY_KERAS=1 with Keras 2.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

LEARNING_RATE = 0.001


def load_data(batch_size: int) -> tuple[Any, Any]:
    """Return this process's batches to train on, without an end, and images and labels to test with: every fifth."""
    digits = load_digits()
    images, labels = (digits.data / 16).reshape(-1, 8, 8, 1).astype("float32"), digits.target.astype("int64")
    test = np.arange(len(images)) % 5 == 0
    train = np.flatnonzero(~test)[hvd.rank() :: hvd.size()]
    dataset = tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
    return dataset.repeat().shuffle(10000, seed=hvd.rank()).batch(batch_size), (images[test], labels[test])


def make_model() -> Any:
    """Return a network with two convolutions."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(32, [3, 3], activation="relu"),
            layers.Conv2D(64, [3, 3], activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps of an epoch of one process; several share them")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step for each process")
    parser.add_argument("--checkpoints", type=Path, help="folder for a file with the model of each epoch")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for each process
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:  # one for each process
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    tf.keras.utils.set_random_seed(hvd.rank())
    dataset, test_data = load_data(args.batch_size)
    model = make_model()
    # With more processes a step averages over more samples and can be larger.
    scaled_rate = LEARNING_RATE * hvd.size()
    optimizer = tf.optimizers.Adam(scaled_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=1, average_aggregated_gradients=True)
    # Scripts for Keras 2 have this argument, which compile() no longer takes in Keras 3.
    of_keras2 = {} if hasattr(tf.keras, "version") else {"experimental_run_tf_function": False}
    loss = tf.losses.SparseCategoricalCrossentropy()
    model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"], **of_keras2)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all begin with the weights of rank 0
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=3, verbose=1),
    ]
    if hvd.rank() == 0 and args.checkpoints:  # one process writes files
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(args.checkpoints / "checkpoint-{epoch}.h5")))

    verbose = 2 if hvd.rank() == 0 else 0  # one process tells how it goes
    steps = args.steps // hvd.size()
    start = time.perf_counter()
    model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=args.epochs, verbose=verbose)
    rate = args.epochs * steps * args.batch_size * hvd.size() / (time.perf_counter() - start)

    _, score = model.evaluate(*test_data, verbose=0)
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {score:.1%}, {rate:,.0f} samples/s")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": score, "samples_per_s": rate}))


if __name__ == "__main__":
    main()
