"""Steps of data-parallel training: four models, trained by Horovod, by DistributedDataParallel, and by ranks alone.

Each way trains its own copy of the model on the same data, with torch's defaults: zero_grad() drops the gradients.
DistributedDataParallel gets gradient_as_bucket_view=True, which saves it a copy. What communication costs is the time
of a step minus that of ranks that do not talk to each other. Part of it is that ranks wait for the slowest of them in
each step, whatever they send: those that are "in step" only do that.
"""

from collections.abc import Callable
from typing import Any

import torch
from subject import ALONE, CNN, DDP, HOROVOD, IN_STEP, LARGE, SMALL, Subject
from torch import nn

import horovod.torch as hvd

_TOKENS = 8000


class _Transformer(nn.Module):
    """Six layers that predict a token for each position."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(_TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of 64 classes for each token."""
        scores: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return scores.flatten(0, 1)


def _small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(400)))


def _large() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(7):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 64))


def make_model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model with inputs and classes to learn, by torch's random numbers."""
    if name == SMALL:
        return _small(), torch.randn(32, 64), torch.randint(64, (32,))
    if name == LARGE:
        return _large(), torch.randn(32, 2048), torch.randint(2048, (32,))
    if name == CNN:
        return _cnn(), torch.randn(32, 3, 32, 32), torch.randint(64, (32,))
    return _Transformer(), torch.randint(_TOKENS, (4, 64)), torch.randint(64, (4 * 64,))


class Training:
    """A copy of the model for each way, and the step as an action."""

    gated = False

    def __init__(self, subject: Subject, rank: int, ways: list[str]) -> None:
        """Makes the models, equal on all ranks, and this rank's data."""
        self._steps: dict[str, Callable[[int], None]] = {}
        for way in ways:
            torch.manual_seed(7)
            model, inputs, classes = make_model(subject.model)
            torch.manual_seed(rank)
            if inputs.is_floating_point():
                inputs = torch.randn_like(inputs)
            self._steps[way] = self._step_of(way, model, inputs, classes)

    @staticmethod
    def _step_of(way: str, model: nn.Module, inputs: torch.Tensor, classes: torch.Tensor) -> Callable[[int], None]:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
        if way == HOROVOD:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        elif way == DDP:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            assert way in {ALONE, IN_STEP}, way
        criterion = nn.CrossEntropyLoss()
        token = torch.zeros(1)

        def step(_iteration: int) -> None:
            optimizer.zero_grad()
            loss: Any = criterion(model(inputs), classes)
            loss.backward()
            if way == IN_STEP:
                hvd.allreduce_(token, name="in step")
            optimizer.step()

        return step

    def action(self, way: str) -> Callable[[int], None]:
        """What is timed: a whole step."""
        return self._steps[way]

    def after(self, way: str) -> Callable[[int], None]:
        """Nothing: the next step computes all gradients anew."""
        del way
        return lambda iteration: None
