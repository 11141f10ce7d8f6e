"""DistributedOptimizer with what else torch has: compiled models, data loaders, samplers, checkpoints."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import Cases, Outcomes
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_training import (
    check_same,
    check_same_on_all_ranks,
    joined_batch,
    loss_of,
    mlp,
    sgd,
    start,
    train_joined,
    train_own,
    twins,
)

import horovod.torch as hvd

cases = Cases()


@cases.add
def compiled_models_learn_the_same() -> None:
    compile_model: Any = torch.compile
    model, wrapped, alone, plain = twins(mlp(), sgd)
    train_own(compile_model(model, backend="aot_eager", fullgraph=True), wrapped)
    train_joined(alone, plain)
    check_same(model, alone)
    # Wrapped after it was compiled: the parameters have another prefix.
    model = mlp()
    alone = copy.deepcopy(model)
    compiled = compile_model(model, backend="aot_eager")
    wrapped = hvd.DistributedOptimizer(sgd(compiled.parameters()), named_parameters=compiled.named_parameters())
    train_own(compiled, wrapped)
    train_joined(alone, sgd(alone.parameters()))
    check_same(model, alone)


class _Checkpointed(nn.Module):
    """Computes its layers again in the backward pass instead of keeping what they gave."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = mlp()
        self.reentrant = reentrant

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.layers[0](values)
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda v: self.layers[2](self.layers[1](v)), values, use_reentrant=self.reentrant
        )
        return result


@cases.add
def activation_checkpoints_change_nothing() -> None:
    for reentrant in (False, True):
        model, wrapped, alone, plain = twins(_Checkpointed(reentrant), sgd)
        train_own(model, wrapped)
        train_joined(alone, plain)
        check_same(model, alone)


@cases.add
def data_loader_workers_and_the_distributed_sampler() -> None:
    inputs, labels = joined_batch(0, size=4)  # 24 samples
    dataset = TensorDataset(inputs, labels)
    model, wrapped, _, _ = twins(mlp(), sgd)
    for method in ("fork", "spawn"):
        sampler: Any = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=3)
        loader = DataLoader(dataset, 4, sampler=sampler, num_workers=1, multiprocessing_context=method)
        seen = []
        for epoch in range(2 if method == "fork" else 1):
            sampler.set_epoch(epoch)
            for batch in loader:
                wrapped.zero_grad()
                loss_of(model, batch).backward()
                wrapped.step()
                seen.append(batch[0])
        epochs = len(seen) // 3
        together = torch.cat([torch.cat(part) for part in hvd.allgather_object(seen)])
        assert len(together.unique(dim=0)) == len(dataset)
        assert len(together) == epochs * len(dataset)
    check_same_on_all_ranks(list(model.parameters()))


def _with_everything() -> tuple[nn.Module, Any, Any]:
    model = mlp(seed=10 + hvd.rank())
    wrapped = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    return model, wrapped, torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.5)


@cases.add
def a_checkpoint_of_rank_0_is_continued_everywhere() -> None:
    model, wrapped, scheduler = _with_everything()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train_own(model, wrapped, 2)
    scheduler.step()
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    path = Path(folder) / "checkpoint.pt"
    if hvd.rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": wrapped.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(saved, path)
    hvd.barrier()
    train_own(model, wrapped, 2)

    # Every rank loads it.
    again, wrapped_again, scheduler_again = _with_everything()
    loaded = torch.load(path)
    again.load_state_dict(loaded["model"])
    wrapped_again.load_state_dict(loaded["optimizer"])
    scheduler_again.load_state_dict(loaded["scheduler"])
    train_own(again, wrapped_again, 2)
    check_same(again, model, 0.0)

    # Rank 0 loads it and sends it to the others. (Optimizers keep the tensors that they load.)
    loaded = torch.load(path)
    third, wrapped_third, _ = _with_everything()
    if hvd.rank() == 0:
        third.load_state_dict(loaded["model"])
        wrapped_third.load_state_dict(loaded["optimizer"])
    hvd.broadcast_parameters(third.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(wrapped_third, root_rank=0)
    assert wrapped_third.param_groups[0]["lr"] == 0.005
    train_own(third, wrapped_third, 2)
    check_same(third, model, 0.0)

    # Without Horovod the same file is an ordinary checkpoint.
    loaded = torch.load(path)
    alone = mlp()
    alone.load_state_dict(loaded["model"])
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    plain.load_state_dict(loaded["optimizer"])
    train_joined(alone, plain, 2)
    check_same(model, alone)
    hvd.barrier()
    if hvd.rank() == 0:
        path.unlink()
        path.parent.rmdir()


@cases.add
def engine_after_shutdown_and_init_is_used_by_a_new_optimizer() -> None:
    hvd.shutdown()
    hvd.init()
    model, wrapped, alone, plain = twins(mlp(), sgd)
    train_own(model, wrapped)
    train_joined(alone, plain)
    check_same(model, alone)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


# ---- One process -----------------------------------------------------------------------------------------------------


def _train_alone() -> None:
    hvd.init()
    model, wrapped, alone, plain = twins(mlp(), sgd, backward_passes_per_step=2)
    is_sgd: bool = isinstance(wrapped, torch.optim.SGD)
    assert is_sgd
    train_own(model, wrapped)
    wrapped.synchronize()
    with wrapped.skip_synchronize():
        wrapped.step()
    wrapped.set_backward_passes_per_step(1)
    wrapped.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    train_joined(alone, plain)
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert isinstance(hvd.DistributedOptimizer(sgd(mlp().parameters()), op=hvd.Adasum), torch.optim.SGD)


def test_one_process_needs_no_hooks() -> None:
    run_ranks(1, _train_alone, timeout=120)
