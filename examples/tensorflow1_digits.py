"""Trains a small network on scikit-learn's handwritten digits with a graph and a session of TensorFlow 1, and Horovod.

    python examples/tensorflow1_digits.py                      one process
    horovodrun -np 2 python examples/tensorflow1_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data. The lines that make a program for one process one for
many have `hvd.` in them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd


def load_data(batch_size: int) -> tuple[Any, Any]:
    """Return this process's next batch to train on, and all images and labels to test with: every fifth."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target.astype("int64")
    train = [i for i in range(len(images)) if i % 5]
    own = train[hvd.rank() :: hvd.size()]
    dataset = tf.data.Dataset.from_tensor_slices((images[own], labels[own]))
    dataset = dataset.repeat().shuffle(len(own), seed=0).batch(batch_size)
    return tf.data.make_one_shot_iterator(dataset).get_next(), (images[::5], labels[::5])


def scores_of(images: Any) -> Any:
    """Return the scores of the ten digits: a network with one hidden layer, whose variables are made once."""
    with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
        first = tf.get_variable("first", [64, 128])
        bias = tf.get_variable("bias", [128], initializer=tf.zeros_initializer())
        second = tf.get_variable("second", [128, 10])
    return tf.matmul(tf.nn.relu(tf.matmul(images, first) + bias), second)


class Test(tf.train.SessionRunHook):  # type: ignore[misc]
    """Computes something when the training has ended."""

    def __init__(self, wanted: Any) -> None:
        """Take the tensor to compute."""
        self._wanted = wanted
        self.result: Any = None

    def end(self, session: Any) -> None:
        """Compute it, while the session still is there."""
        self.result = session.run(self._wanted)


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1200, help="steps of one process; several share them")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step for each process")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    tf.disable_v2_behavior()
    hvd.init()
    tf.set_random_seed(0)  # every run is the same
    config = tf.ConfigProto(intra_op_parallelism_threads=1)  # one core for each process
    config.gpu_options.visible_device_list = str(hvd.local_rank())  # and one GPU, if there are any

    (images, labels), (test_images, test_labels) = load_data(args.batch_size)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores_of(images)))
    right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores_of(test_images), axis=1), test_labels), tf.float32))

    # With more processes a step averages over more samples and can be larger.
    optimizer = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(0.05 * hvd.size()))
    train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    test = Test(right)
    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),  # all begin with the variables of rank 0, random or from a checkpoint
        tf.train.StopAtStepHook(last_step=args.steps // hvd.size()),
        test,
    ]
    # One process writes files.
    checkpoints = str(args.checkpoints) if args.checkpoints and hvd.rank() == 0 else None
    with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, config=config, hooks=hooks) as session:
        while not session.should_stop():
            session.run(train_op)

    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {test.result:.1%}")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": float(test.result)}))


if __name__ == "__main__":
    main()
