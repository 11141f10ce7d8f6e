"""Trains a small network on scikit-learn's handwritten digits with PyTorch and Horovod.

    python examples/pytorch_digits.py                      one process
    horovodrun -np 2 python examples/pytorch_digits.py     two processes, which share the work of every step

Each process trains the same network on its own part of the data. The lines that make a program for one process one for
many begin with `hvd.`, and there is the sampler, which gives each process its part.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import horovod.torch as hvd

LEARNING_RATE = 0.02
MOMENTUM = 0.9


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return images and labels to train on, and those to test with: every fifth."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    test = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Return a network with two hidden layers."""
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def train(model: nn.Module, optimizer: Any, data: TensorDataset, epochs: int, batch_size: int) -> float:
    """Train the model and return how many samples all processes together did in a second."""
    sampler: Any = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    progress: Any = range(epochs)
    if hvd.rank() == 0:
        progress = tqdm(progress, desc="training", unit="epoch", ncols=80)
    hvd.barrier()
    start = time.perf_counter()
    for epoch in progress:
        sampler.set_epoch(epoch)  # another order in every epoch
        for images, labels in loader:
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # starts to average each gradient as soon as it is there
            optimizer.step()  # waits for the averages
    return epochs * len(loader) * batch_size * hvd.size() / (time.perf_counter() - start)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of correctly read digits; each process tests its part."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in data.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum()
    totals = hvd.allreduce(torch.tensor([float(right), len(labels)]), op=hvd.Sum)
    return float(totals[0] / totals[1])


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step for each process")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)  # one core for each process
    torch.manual_seed(hvd.rank())
    train_data, test_data = load_data()
    if len(train_data) < args.batch_size * hvd.size():
        parser.error(
            f"{hvd.size()} processes x {args.batch_size} samples are more than the {len(train_data)} that exist"
        )
    model = make_model()
    # With more processes a step averages over more samples and can be larger.
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with the weights of rank 0
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    rate = train(model, optimizer, train_data, args.epochs, args.batch_size)
    score = accuracy(model, test_data)
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es): accuracy {score:.1%}, {rate:,.0f} samples/s")
        if args.report:
            args.report.write_text(json.dumps({"processes": hvd.size(), "accuracy": score, "samples_per_s": rate}))


if __name__ == "__main__":
    main()
