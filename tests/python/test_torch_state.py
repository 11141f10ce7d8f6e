"""State from one rank to all: parameters, optimizers, objects; and what differs is named."""

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import horovod.torch as hvd


def seeded(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def same_everywhere(values: Any) -> bool:
    everyone = hvd.allgather_object(values)
    return all(_equal(values, other) for other in everyone)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def parameters() -> None:
    hvd.init()
    root = hvd.size() - 1
    want = seeded(root).state_dict()
    for given in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: dict(reversed(model.state_dict().items())),  # the order of a dictionary does not matter
    ):
        model = seeded(hvd.rank())
        model[1].running_mean.copy_(torch.full((4,), float(hvd.rank())))  # type: ignore[operator]
        hvd.broadcast_parameters(given(model), root)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, want[name]), name
        assert same_everywhere([p.detach() for p in model.parameters()])
    # Every dtype and layout that a model may have, buffers of integers among them.
    mixed = {"half": torch.full((3,), hvd.rank(), dtype=torch.bfloat16), "flag": torch.tensor(hvd.rank() == root)}
    mixed["last"] = torch.full((2, 3, 4, 5), float(hvd.rank())).to(memory_format=torch.channels_last)
    mixed["none"] = torch.empty(0)
    hvd.broadcast_parameters(mixed, root)
    assert mixed["half"].tolist() == [float(root)] * 3
    assert mixed["flag"].item()
    assert (mixed["last"] == root).all()
    for wrong in (3, "model", torch.ones(3), {"count": 3}, [("a", None)]):
        with pytest.raises(ValueError):
            hvd.broadcast_parameters(wrong, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_parameters(size: int) -> None:
    run_ranks(size, parameters)


def different_models() -> list[str]:
    hvd.init()
    width = 5 if hvd.rank() == 1 else 4
    models: list[nn.Module] = [
        nn.ModuleDict({"encoder": nn.Linear(4, width), "head": nn.Linear(4, 2)}),
        nn.ModuleDict({"encoder": nn.Linear(4, 4), **({"extra": nn.Linear(1, 1)} if hvd.rank() == 1 else {})}),
        nn.Linear(4, 4, dtype=torch.float64 if hvd.rank() == 1 else torch.float32),
    ]
    texts = []
    for model in models:
        with pytest.raises(ValueError) as caught:
            hvd.broadcast_parameters(model.state_dict(), 0)
        texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        hvd.broadcast_optimizer_state(torch.optim.SGD(models[0].parameters(), lr=0.1), 0)
    texts.append(str(caught.value))
    hvd.barrier()
    return texts


def test_models_that_differ_are_described_on_every_rank() -> None:
    results = run_ranks(2, different_models)
    assert results[0] == results[1]
    shapes, names, dtypes, optimizers = results[0]
    assert "encoder.weight: torch.float32 (4, 4)" in shapes
    assert "encoder.weight: torch.float32 (5, 4)" in shapes
    assert "head" not in shapes
    assert "Only on rank 0: nothing; only on rank 1: extra.bias" in names
    assert "torch.float64 (4, 4)" in dtypes
    assert "parameter 0 of group 0" in optimizers


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Adamax": torch.optim.Adamax,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, only: int | None = None) -> None:
    """A step, by all parameters or by one of them."""
    optimizer.zero_grad()
    for i, parameter in enumerate(model.parameters()):
        if only is None or i == only:
            parameter.grad = torch.ones_like(parameter) * (i + 1)
    optimizer.step()


def optimizers() -> None:
    hvd.init()
    rank, root = hvd.rank(), hvd.size() - 1
    for name, make in OPTIMIZERS.items():
        # Who has made steps: only the root, only the others, all, nobody; or each of another parameter.
        for stepped in (rank == root, rank != root, True, False, "one"):
            model: Any = seeded(0)
            model.to(memory_format=torch.channels_last)
            optimizer = make(model.parameters())
            if stepped:
                for _ in range(rank + 1):
                    step(model, optimizer, only=rank if stepped == "one" else None)
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = 0.25 if rank == root else 0.5
            mine = copy.deepcopy(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root)
            if rank == root:
                assert _equal(optimizer.state_dict(), mine), name
            assert same_everywhere(optimizer.state_dict()), f"{name}, steps: {stepped}"
            hvd.broadcast_parameters(model.state_dict(), root)
            step(model, optimizer)
            assert same_everywhere([p.detach() for p in model.parameters()]), f"{name}, steps: {stepped}"
    with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(seeded(0).parameters()), 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_optimizer_state(size: int) -> None:
    run_ranks(size, optimizers, timeout=120)


def objects() -> None:
    hvd.init()
    tensor = torch.arange(6.0).view(2, 3).t()
    sent = hvd.broadcast_object({"epoch": 3, "best": tensor} if hvd.rank() == 1 else None, root_rank=1)
    assert sent["epoch"] == 3
    assert torch.equal(sent["best"], tensor)
    gathered = hvd.allgather_object((hvd.rank(), torch.ones(hvd.rank())))
    assert [rank for rank, _ in gathered] == list(range(hvd.size()))
    assert [len(ones) for _, ones in gathered] == list(range(hvd.size()))


def test_objects_with_tensors_in_them() -> None:
    run_ranks(2, objects)
