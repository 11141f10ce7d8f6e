"""The acceptance of horovod.torch: N ranks learn what one process learns from the batches of all of them together.

The weights are the same up to rounding, bit by bit the same on all ranks, and bit by bit the same in every run.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch_training import BATCH, check_same_on_all_ranks, fingerprint, mlp, start

import horovod.torch as hvd

STEPS = 4
TOLERANCE = 1e-7  # relative and absolute, in float64


def cnn() -> nn.Module:
    """Convolutions with batch normalization, over the batch of all ranks."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).double()


class Transformer(nn.Module):
    """Tokens, two layers of attention, classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classes = nn.Linear(16, 4)
        self.double()

    def forward(self, tokens: Tensor) -> Any:
        return self.classes(self.layers(self.tokens(tokens)).mean(dim=1))


class Bag(nn.Module):
    """An embedding with sparse gradients before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tokens = nn.Embedding(12, 8, sparse=True)
        self.classes = nn.Linear(8, 4)
        self.double()

    def forward(self, tokens: Tensor) -> Any:
        return self.classes(torch.tanh(self.tokens(tokens)).mean(dim=1))


def _numbers(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randn(rows, 8, generator=generator, dtype=torch.float64)


def _images(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randint(12, (rows, 5), generator=generator)


Make = Callable[[Any], list[torch.optim.Optimizer]]

DENSE: dict[str, Make] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "Adam": lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)],
    "Adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.05)],
}
SPARSE: dict[str, Make] = {
    "SGD": DENSE["SGD"],
    "Adagrad": DENSE["Adagrad"],
    "SparseAdam": lambda model: [
        torch.optim.SparseAdam(model.tokens.parameters(), lr=0.01),
        torch.optim.Adam(model.classes.parameters(), lr=0.01),
    ],
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Tensor], dict[str, Make]]] = {
    "mlp": (mlp, _numbers, DENSE),
    "cnn": (cnn, _images, DENSE),
    "transformer": (Transformer, _tokens, DENSE),
    "sparse embedding": (Bag, _tokens, SPARSE),
}


def train(model: nn.Module, optimizers: list[Any], inputs: Any, own: slice) -> None:
    """Some steps on a part of the joined batches."""
    model.train()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = BATCH * hvd.size()
        values, labels = inputs(generator, rows), torch.randint(4, (rows,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(values[own]), labels[own])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def with_synchronized_normalization(model: nn.Module) -> nn.Module:
    """The model with SyncBatchNorm for BatchNorm."""
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(model, name, hvd.SyncBatchNorm(child.num_features).double())
    return model


def learn(model_name: str, optimizer_name: str) -> str:
    """Trains on all ranks, and on rank 0 alone, compares, and returns the fingerprint of the weights."""
    make_model, inputs, makers = MODELS[model_name]
    model = make_model()
    alone = copy.deepcopy(model)
    model = with_synchronized_normalization(model)
    optimizers = [
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for optimizer in makers[optimizer_name](model)
    ]
    train(model, optimizers, inputs, slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH))
    if hvd.rank() == 0:
        train(alone, makers[optimizer_name](alone), inputs, slice(None))
        for (name, value), expected in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
            difference = (value - expected).abs().max().item()
            what = f"{model_name}, {optimizer_name}, {hvd.size()} ranks: {name} is off by {difference}"
            assert torch.allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE), what
    weights = list(model.state_dict().values())
    check_same_on_all_ranks(weights)
    return fingerprint(weights)


def learn_all() -> dict[tuple[str, str], str]:
    start()
    return {(model, optimizer): learn(model, optimizer) for model in MODELS for optimizer in MODELS[model][2]}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_learn_what_one_process_learns_in_every_run(size: int) -> None:
    first = run_ranks(size, learn_all, timeout=180)
    assert all(result == first[0] for result in first)
    if size == 2:
        assert run_ranks(size, learn_all, timeout=180) == first
