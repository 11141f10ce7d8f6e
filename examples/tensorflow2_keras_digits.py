"""Trains a small network on scikit-learn's handwritten digits with Keras and Horovod.

    python examples/tensorflow2_keras_digits.py                      one process
    horovodrun -np 2 python examples/tensorflow2_keras_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data. The lines that make a program for one process one for
many have `hvd.` in them.
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


def load_data() -> tuple[Any, Any]:
    """Return this process's images and labels to train on, and those to test with: every fifth."""
    digits = load_digits()
    images, labels = (digits.data / 16).reshape(-1, 8, 8, 1).astype("float32"), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    test = order % 5 == 0
    train = order[~test]
    train = train[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]  # as many for each process
    return (images[train], labels[train]), (images[order[test]], labels[order[test]])


def make_model() -> Any:
    """Return a network with one convolution."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step for each process")
    parser.add_argument("--checkpoints", type=Path, help="folder for a file with the weights of each epoch")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for each process
    tf.keras.utils.set_random_seed(hvd.rank())
    train_data, test_data = load_data()
    model = make_model()
    # With more processes a step averages over more samples and can be larger.
    scaled_rate = LEARNING_RATE * hvd.size()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(scaled_rate))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all begin with the weights of rank 0
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(scaled_rate, warmup_epochs=2),
    ]
    if hvd.rank() == 0 and args.checkpoints:  # one process writes files
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(args.checkpoints / "epoch-{epoch}.keras")))

    start = time.perf_counter()
    verbose = 2 if hvd.rank() == 0 else 0  # one process tells how it goes
    model.fit(*train_data, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=verbose)
    rate = args.epochs * len(train_data[0]) * hvd.size() / (time.perf_counter() - start)

    _, score = model.evaluate(*test_data, verbose=0)
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {score:.1%}, {rate:,.0f} samples/s")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": score, "samples_per_s": rate}))


if __name__ == "__main__":
    main()
