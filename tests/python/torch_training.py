"""Small models, data and training loops for the tests of horovod.torch: every rank can also be the one process."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import horovod.torch as hvd

BATCH = 6  # samples of a step on each rank

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Batch], Any]


def start() -> None:
    """Begins a group of ranks."""
    torch.use_deterministic_algorithms(True)
    hvd.init()


def mlp(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def joined_batch(step: int, size: int | None = None, dtype: torch.dtype = torch.float64) -> Batch:
    """The samples of all ranks of a step: any rank can make it."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = BATCH * (hvd.size() if size is None else size)
    return torch.randn(rows, 8, generator=generator, dtype=dtype), torch.randint(4, (rows,), generator=generator)


def own_part(batch: Batch, rank: int | None = None) -> Batch:
    """This rank's samples of a joined batch."""
    first = BATCH * (hvd.rank() if rank is None else rank)
    images, labels = batch
    return images[first : first + BATCH], labels[first : first + BATCH]


def loss_of(model: nn.Module, batch: Batch) -> Any:
    """The mean cross-entropy. (Any: torch's backward has no types.)"""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_joined(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, loss: Loss = loss_of) -> None:
    """What one process does with the samples of all."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, joined_batch(step)).backward()
        optimizer.step()


def train_own(model: nn.Module, optimizer: Any, steps: int = 3, loss: Loss = loss_of) -> None:
    """What each rank does with its part."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, own_part(joined_batch(step))).backward()
        optimizer.step()


def twins(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], **arguments: Any) -> Any:
    """The model with a DistributedOptimizer, and a copy with a plain optimizer, to compare with."""
    alone = copy.deepcopy(model)
    plain = make(alone.parameters())
    wrapped = hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters(), **arguments)
    return model, wrapped, alone, plain


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check_same(model: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    """The parameters are close to the expected ones, and bit by bit the same on all ranks."""
    for (name, value), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert value.shape == wanted.shape, name
        assert torch.allclose(value, wanted, rtol=tolerance, atol=tolerance), f"{name} is {value}, expected {wanted}"
    check_same_on_all_ranks(list(model.parameters()))


def check_same_on_all_ranks(tensors: Sequence[Tensor], members: Any = hvd.global_process_set) -> None:
    digests = hvd.allgather_object(fingerprint(tensors))
    chosen = [digests[rank] for rank in members.ranks]
    assert len(set(chosen)) == 1, f"the ranks have different bits: {chosen}"


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Of all bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class Branches(nn.Module):
    """Three layers, of which a rank uses some."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Embedding(6, 4, sparse=True) if sparse else nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor, use: bool) -> torch.Tensor:
        out: torch.Tensor = self.always(values)
        if use:
            extra = torch.tensor([1, 1, 4]) if isinstance(self.sometimes, nn.Embedding) else values
            out = out + self.sometimes(extra).sum()
        return out
