"""Steps of training with TensorFlow: Horovod's tape against MultiWorkerMirroredStrategy, in the same processes.

    horovodrun -np 2 python benchmarks/tensorflow_steps.py [--rounds 8] [--steps 10] [--report FILE]

Three ways train their own copy of a Keras model on the same data, each in a tf.function: ranks that do not talk,
DistributedGradientTape, and MultiWorkerMirroredStrategy (over gRPC, which is what it has on CPUs). Rounds of them
alternate, so that the machine's noise hits all alike. A time is the mean of the ranks' times for a step.
"""

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from measure import Gate, time_action

import horovod.tensorflow as hvd

ALONE, HOROVOD, STRATEGY = "alone", "horovod", "MultiWorkerMirroredStrategy"
SMALL, LARGE, CNN = "200 small tensors", "29 M parameters", "CNN"
_WARM_UP = 3

Step = Callable[[int], None]


def join_strategy() -> Any:
    """Returns a strategy of all ranks; before TensorFlow has run anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        addresses = hvd.allgather_object(f"127.0.0.1:{listener.getsockname()[1]}")
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def make_model(name: str) -> tuple[Any, Any, int]:
    """Returns a model, the shape of a sample and the number of classes."""
    layers = tf.keras.layers
    if name == SMALL:
        return tf.keras.Sequential([layers.Dense(64, use_bias=False) for _ in range(200)]), (64,), 64
    if name == LARGE:
        return tf.keras.Sequential([layers.Dense(2048, activation="relu") for _ in range(7)]), (2048,), 2048
    convolutions = []
    for width in (32, 64, 128):
        convolutions += [layers.Conv2D(width, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    return tf.keras.Sequential([*convolutions, layers.Flatten(), layers.Dense(64)]), (32, 32, 3), 64


def make_step(way: str, name: str, strategy: Any, batch: int) -> Step:
    """Returns a step of training in one of the ways."""
    tf.keras.utils.set_random_seed(1)
    scope = strategy if way == STRATEGY else tf.distribute.get_strategy()  # the default one
    with scope.scope():
        model, shape, classes = make_model(name)
        model.build((batch, *shape))
        optimizer = tf.keras.optimizers.SGD(0.001)
        optimizer.build(model.trainable_variables)
    random = np.random.default_rng(hvd.rank())
    images = tf.constant(random.standard_normal((batch, *shape)), tf.float32)
    labels = tf.constant(random.integers(0, classes, batch))

    def train() -> Any:
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
            # The strategy adds up the gradients of its replicas, and Horovod averages them.
            loss = tf.reduce_mean(losses) / (hvd.size() if way == STRATEGY else 1)
        if way == HOROVOD:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = tf.function(lambda: scope.run(train))

    def run(_iteration: int) -> None:
        step().numpy()  # until it is done

    return run


def measure(name: str, strategy: Any, gate: Gate, args: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the milliseconds of all steps of each way."""
    steps = {way: make_step(way, name, strategy, args.batch_size) for way in (ALONE, HOROVOD, STRATEGY)}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for step in steps.values():
        for i in range(_WARM_UP):
            step(i)
    for turn in range(args.rounds):
        for way in steps if turn % 2 == 0 else reversed(steps):
            starts, ends, _ = time_action(steps[way], lambda _: None, gate, range(args.steps), gated=False)
            own = (np.asarray(ends) - np.asarray(starts)) / 1e6
            times[way] += np.mean(hvd.allgather_object(own), axis=0).tolist()
    return times


def main() -> None:
    """Measures all models."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8, help="alternating rounds of each way")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=[SMALL, LARGE, CNN], default=[SMALL, LARGE, CNN])
    parser.add_argument("--report", type=Path, help="JSON file for the medians")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks already use the cores there are
    strategy = join_strategy()
    medians: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(hvd.rank(), hvd.size(), Path(hvd.broadcast_object(folder)) / "gate")
        for name in args.models:
            times = measure(name, strategy, gate, args)
            medians[name] = {way: float(np.median(times[way])) for way in times}
            if hvd.rank() == 0:
                told = ", ".join(f"{way} {value:.2f} ms" for way, value in medians[name].items())
                ratio = medians[name][STRATEGY] / medians[name][HOROVOD]
                print(f"{hvd.size()} ranks, {name}: {told}; the strategy takes {ratio:.2f} times as long", flush=True)
        hvd.broadcast_object(None)  # nobody needs the folder any more
    if hvd.rank() == 0 and args.report:
        args.report.write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
