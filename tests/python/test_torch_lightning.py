"""HorovodStrategy: Lightning's loop on several ranks learns what one process learns."""

import copy
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Cases, Outcomes
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_training import check_same, check_same_on_all_ranks, mlp, start

import horovod.torch as hvd

lightning = pytest.importorskip("lightning.pytorch")
strategies = pytest.importorskip("horovod.lightning")

cases = Cases()

SAMPLES, BATCH, EPOCHS = 24, 4, 2


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(4, (SAMPLES,), generator=generator))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A small network; what a case wants different is given to it."""

    def __init__(self, seed: int = 1, batch_norm: bool = False) -> None:
        super().__init__()
        self.net: nn.Module = mlp(seed=seed)
        if batch_norm:
            self.net = nn.Sequential(nn.BatchNorm1d(8).double(), self.net)
        self.losses: list[float] = []

    def training_step(self, batch: Any, _number: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer(strategy: Any, folder: str | None = None, **arguments: Any) -> Any:
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=arguments.pop("max_epochs", EPOCHS),
        logger=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fit(strategy: Any, module: Any, ckpt_path: str | None = None, **arguments: Any) -> Any:
    """Trains on all ranks, or by this process alone on batches as large as all of theirs."""
    alone = strategy == "auto"
    data = dataset()
    # Both see the same samples in a step: Lightning's sampler takes every size-th of them for a rank.
    sampler: Any = DistributedSampler(data, 1 if alone else hvd.size(), 0 if alone else hvd.rank(), shuffle=False)
    loader = DataLoader(data, BATCH * (hvd.size() if alone else 1), sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers and logging
        one = trainer(strategy, **arguments)
        one.fit(module, loader, ckpt_path=ckpt_path)
    return one


def compare(module: Any, **arguments: Any) -> tuple[Any, Any]:
    """Fails unless all ranks together learn what this process learns alone."""
    alone = copy.deepcopy(module)
    options = arguments.pop("options", {})
    ours = fit(strategies.HorovodStrategy(**options), module, **arguments)
    theirs = fit("auto", alone, **arguments)
    check_same(module, alone)
    return ours, theirs


@cases.add
def lightning_learns_the_same_on_all_ranks() -> None:
    ours, theirs = compare(Module())
    assert (ours.world_size, ours.global_rank, ours.is_global_zero) == (hvd.size(), hvd.rank(), hvd.rank() == 0)
    assert ours.global_step == theirs.global_step
    assert float(ours.callback_metrics["loss"]) == pytest.approx(float(theirs.callback_metrics["loss"]))
    lr = ours.optimizers[0].param_groups[0]["lr"]
    assert lr == theirs.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**EPOCHS


@cases.add
def the_strategy_has_a_name_and_shares_out_the_data() -> None:
    seen: list[torch.Tensor] = []

    class Watching(Module):
        def training_step(self, batch: Any, number: int) -> Any:
            seen.append(batch[0])
            return super().training_step(batch, number)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer("horovod", max_epochs=1).fit(Watching(), DataLoader(dataset(), BATCH, shuffle=True))
    everything = torch.cat([torch.cat(part) for part in hvd.allgather_object(seen)])
    assert len(everything) == len(everything.unique(dim=0)) == SAMPLES


@cases.add
def a_trainer_can_fit_again() -> None:
    module = Module()
    alone = copy.deepcopy(module)
    for strategy, one in ((strategies.HorovodStrategy(), module), ("auto", alone)):
        used = fit(strategy, one)
        used.fit_loop.max_epochs = 2 * EPOCHS
        sampler: Any = DistributedSampler(dataset(), used.world_size, used.global_rank, shuffle=False)
        batch = BATCH * hvd.size() // used.world_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            used.fit(one, DataLoader(dataset(), batch, sampler=sampler))
    check_same(module, alone)


@cases.add
def all_ranks_begin_with_the_weights_of_rank_0() -> None:
    module = Module(seed=10 + hvd.rank())
    fit(strategies.HorovodStrategy(), module)
    check_same_on_all_ranks(list(module.parameters()))


@cases.add
def gradients_are_clipped_after_they_were_reduced() -> None:
    compare(Module(), gradient_clip_val=0.05)
    compare(Module(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


@cases.add
def gradients_are_accumulated_over_batches() -> None:
    compare(Module(), accumulate_grad_batches=2)
    compare(Module(), accumulate_grad_batches=2, options={"groups": 2})


@cases.add
def batch_normalization_is_over_all_ranks() -> None:
    module = Module(batch_norm=True)
    alone = copy.deepcopy(module)
    fit(strategies.HorovodStrategy(), module, sync_batchnorm=True)
    fit("auto", alone)
    check_same(module, alone)


@cases.add
def steps_can_be_combined_by_adasum() -> None:
    module = Module()
    fit(strategies.HorovodStrategy(op=hvd.Adasum), module, accumulate_grad_batches=1)
    check_same_on_all_ranks(list(module.parameters()))


class Manual(Module):
    """Two optimizers that the module steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]

    def training_step(self, batch: Any, _number: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@cases.add
def manual_optimization_of_two_optimizers() -> None:
    compare(Manual())


@cases.add
def collectives_of_the_strategy() -> None:
    strategy = strategies.HorovodStrategy()
    rank, size = hvd.rank(), hvd.size()
    own = torch.tensor([1.0 + rank])
    op = torch.distributed.ReduceOp
    for name, expected in (("mean", 1.5), (None, 1.5), ("sum", 3.0), (op.SUM, 3.0), (op.MAX, 2.0), ("min", 1.0)):
        assert strategy.reduce(own, reduce_op=name).item() == expected, name
    assert strategy.reduce("text") == "text"
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(rank == 0)
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert strategy.broadcast({"rank": rank}, src=size - 1) == {"rank": size - 1}
    values = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = strategy.all_gather(values, sync_grads=True)
    assert gathered.shape == (size, 2, 3)
    (gathered * torch.arange(1.0, 1 + size)[:, None, None]).sum().backward()
    assert values.grad is not None
    assert values.grad.unique().tolist() == [size * (1.0 + rank)]
    with pytest.raises(ValueError, match="there are no groups"):
        strategy.reduce(own, group="some")
    with pytest.raises(ValueError, match="expected one of"):
        strategy.reduce(own, reduce_op="median")
    strategy.barrier()


@cases.add
def a_checkpoint_is_written_by_rank_0_and_continued_by_all() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    module = Module()
    straight = copy.deepcopy(module)
    first = fit(strategies.HorovodStrategy(), module, folder=folder, max_epochs=1)
    path = str(Path(folder) / "one.ckpt")
    first.save_checkpoint(path)
    again = Module(seed=5)
    second = fit(strategies.HorovodStrategy(), again, path, max_epochs=3)
    third = fit(strategies.HorovodStrategy(), straight, max_epochs=3)
    check_same(again, straight, 0.0)
    # The scheduler goes on from where it was, on the optimizer that is used.
    assert second.optimizers[0].param_groups[0]["lr"] == third.optimizers[0].param_groups[0]["lr"] == 0.0125
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
