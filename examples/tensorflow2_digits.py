"""Trains a small network on scikit-learn's handwritten digits with TensorFlow and Horovod, in a loop of its own.

    python examples/tensorflow2_digits.py                      one process
    horovodrun -np 2 python examples/tensorflow2_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data. The lines that make a program for one process one for
many have `hvd.` in them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

LEARNING_RATE = 0.02
MOMENTUM = 0.9


def load_data(batch_size: int) -> tuple[Any, Any, int]:
    """Return this process's batches to train on, its images and labels to test with, and the steps of an epoch."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    test = tf.range(len(images)) % 5 == 0
    train = tf.data.Dataset.from_tensor_slices((images[~test], labels[~test]))
    steps = len(train) // (batch_size * hvd.size())
    own = train.shuffle(len(train), seed=0).batch(batch_size, drop_remainder=True).shard(hvd.size(), hvd.rank())
    parts = (images[test][hvd.rank() :: hvd.size()], labels[test][hvd.rank() :: hvd.size()])
    return own.take(steps), parts, steps


def make_model() -> Any:
    """Return a network with two hidden layers."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_step(model: Any, optimizer: Any) -> Any:
    """Return the function that makes one step of training."""
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # its gradients are the average of all processes'
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step for each process")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    hvd.init()
    tf.keras.utils.set_random_seed(hvd.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for each process
    train_data, (test_images, test_labels), steps = load_data(args.batch_size)
    if steps == 0:
        parser.error(f"{hvd.size()} processes x {args.batch_size} samples are more than there are")
    model = make_model()
    # With more processes a step averages over more samples and can be larger.
    optimizer = tf.keras.optimizers.SGD(LEARNING_RATE * hvd.size(), momentum=MOMENTUM)
    hvd.broadcast_variables(model.variables, root_rank=0)  # all begin with the weights of rank 0
    step = make_step(model, optimizer)

    start = time.perf_counter()
    for number, (images, labels) in enumerate(train_data.repeat(args.epochs)):
        loss = step(images, labels)
        if number % 100 == 0:
            mean = hvd.allreduce(loss, name="loss")  # on all processes, or it would wait for the others
            if hvd.rank() == 0:
                print(f"step {number}: loss {mean:.4f}", flush=True)
    rate = args.epochs * steps * args.batch_size * hvd.size() / (time.perf_counter() - start)

    right = tf.reduce_sum(tf.cast(tf.argmax(model(test_images), axis=1) == test_labels, tf.float32))
    totals = hvd.allreduce([right, float(len(test_labels))], op=hvd.Sum)
    score = float(totals[0] / totals[1])
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {score:.1%}, {rate:,.0f} samples/s")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": score, "samples_per_s": rate}))


if __name__ == "__main__":
    main()
