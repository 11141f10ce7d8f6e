"""Trains a small network on scikit-learn's handwritten digits, with nothing but NumPy and Horovod.

    python examples/numpy_digits.py                      one process
    horovodrun -np 2 python examples/numpy_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data; after every step the gradients are averaged over all
processes, so the networks stay equal. The lines that make a program for one process one for many begin with `hvd.`.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

# One core for each process; NumPy would otherwise start a thread per core in every one. It reads this when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tqdm import tqdm

import horovod.numpy as hvd

Array = NDArray[np.float32]
Labels = NDArray[np.int64]

LAYERS = (64, 1024, 512, 10)  # pixels, two hidden layers, classes
LEARNING_RATE = 0.02
MOMENTUM = 0.9


class Network:
    """Fully connected layers with ReLU between them and a softmax at the end."""

    def __init__(self, layers: tuple[int, ...], seed: int) -> None:
        """Begin with random weights."""
        random = np.random.default_rng(seed)
        self.parameters: dict[str, Array] = {}
        for i, (inputs, outputs) in enumerate(itertools.pairwise(layers)):
            scale = np.sqrt(2.0 / inputs)
            self.parameters[f"weight{i}"] = (random.standard_normal((inputs, outputs)) * scale).astype(np.float32)
            self.parameters[f"bias{i}"] = np.zeros(outputs, np.float32)
        self._depth = len(layers) - 1

    def forward(self, images: Array) -> list[Array]:
        """Return the input of every layer, and last the scores of the classes."""
        values = [images]
        for i in range(self._depth):
            output = values[-1] @ self.parameters[f"weight{i}"] + self.parameters[f"bias{i}"]
            values.append(np.maximum(output, 0) if i < self._depth - 1 else output)
        return values

    def gradients(self, images: Array, labels: Labels) -> dict[str, Array]:
        """Return the gradients of the mean cross-entropy, by parameter."""
        values = self.forward(images)
        scores = np.exp(values[-1] - values[-1].max(axis=1, keepdims=True))
        delta = scores / scores.sum(axis=1, keepdims=True)
        delta[np.arange(len(labels)), labels] -= 1
        delta /= len(labels)
        gradients: dict[str, Array] = {}
        for i in reversed(range(self._depth)):
            gradients[f"weight{i}"] = values[i].T @ delta
            gradients[f"bias{i}"] = delta.sum(axis=0)
            if i > 0:
                delta = (delta @ self.parameters[f"weight{i}"].T) * (values[i] > 0)
        return gradients


def load_data() -> tuple[Array, Labels, Array, Labels]:
    """Return images and labels to train on, and those to test with: every fifth."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    test = np.arange(len(images)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def train(network: Network, images: Array, labels: Labels, epochs: int, batch_size: int) -> float:
    """Train the network and return how many samples all processes together did in a second."""
    velocity = {name: np.zeros_like(value) for name, value in network.parameters.items()}
    # With more processes a step averages over more samples and can be larger.
    learning_rate = LEARNING_RATE * hvd.size()
    step_size = batch_size * hvd.size()
    steps = len(images) // step_size

    progress: Any = range(epochs)
    if hvd.rank() == 0:
        progress = tqdm(progress, desc="training", unit="epoch", ncols=80)
    hvd.barrier()
    start = time.perf_counter()
    for epoch in progress:
        order = np.random.default_rng(epoch).permutation(len(images))  # the same on every process
        for step in range(steps):
            begin = step * step_size + hvd.rank() * batch_size
            own = order[begin : begin + batch_size]
            gradients = network.gradients(images[own], labels[own])
            # Start to average all gradients, in place; then wait for each. The name tells which belong together.
            handles = [hvd.allreduce_async_(gradient, name=name) for name, gradient in gradients.items()]
            for handle in handles:
                hvd.synchronize(handle)
            for name, gradient in gradients.items():
                velocity[name] *= MOMENTUM
                velocity[name] -= learning_rate * gradient
                network.parameters[name] += velocity[name]
    return epochs * steps * step_size / (time.perf_counter() - start)


def accuracy(network: Network, images: Array, labels: Labels) -> float:
    """Return the share of correctly read digits; each process tests its part."""
    own = slice(hvd.rank(), None, hvd.size())
    correct = network.forward(images[own])[-1].argmax(axis=1) == labels[own]
    right, total = hvd.allreduce(np.array([correct.sum(), correct.size], np.float64), op=hvd.Sum)
    return float(right / total)


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step for each process")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    hvd.init()
    images, labels, test_images, test_labels = load_data()
    if len(images) < args.batch_size * hvd.size():
        parser.error(f"{hvd.size()} processes x {args.batch_size} samples are more than the {len(images)} that exist")
    network = Network(LAYERS, seed=hvd.rank())
    for name, value in network.parameters.items():
        hvd.broadcast_(value, root_rank=0, name=name)  # all begin with the weights of rank 0

    rate = train(network, images, labels, args.epochs, args.batch_size)
    score = accuracy(network, test_images, test_labels)
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {score:.1%}, {rate:,.0f} samples/s")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": score, "samples_per_s": rate}))


if __name__ == "__main__":
    main()
