"""DistributedOptimizer: what each argument does."""

import copy
import warnings
from typing import Any

import pytest
import torch
from cases import Cases, Outcomes
from torch import nn
from torch_training import (
    Branches,
    check_same,
    check_same_on_all_ranks,
    joined_batch,
    loss_of,
    mlp,
    own_part,
    sgd,
    start,
    train_joined,
    train_own,
    twins,
)

import horovod.torch as hvd

cases = Cases()


@cases.add
def several_backward_passes_make_a_step() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd, backward_passes_per_step=2)

    def steps(passes: int, times: int) -> None:
        for step in range(times):
            wrapped.zero_grad()
            plain.zero_grad()
            for part in range(passes):
                batch = joined_batch(10 * step + part)
                loss_of(model, own_part(batch)).backward()
                loss_of(alone, batch).backward()
            wrapped.step()
            plain.step()

    steps(2, 2)
    steps(1, 1)  # fewer than announced, as at the end of an epoch
    loss_of(model, own_part(joined_batch(1))).backward()
    loss_of(model, own_part(joined_batch(1))).backward()
    wrapped.set_backward_passes_per_step(3)  # from the next step on
    wrapped.synchronize()
    steps(3, 2)
    check_same(model, alone)


@cases.add
def passes_without_synchronization_are_not_counted() -> None:
    for groups in (None, 2):
        model, wrapped, alone, plain = twins(mlp(), sgd, groups=groups)
        for passes in (3, 1, 2):
            wrapped.zero_grad()
            plain.zero_grad()
            with wrapped.no_sync():
                for part in range(passes - 1):
                    loss_of(model, own_part(joined_batch(part))).backward()
            assert not wrapped._reducer.has_started()
            loss_of(model, own_part(joined_batch(passes))).backward()
            assert wrapped._reducer.has_started()
            wrapped.step()
            for part in (*range(passes - 1), passes):
                loss_of(alone, joined_batch(part)).backward()
            plain.step()
        check_same(model, alone)


@cases.add
def sum_adds_the_gradients() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd, op=hvd.Sum)
    train_own(model, wrapped)
    train_joined(alone, plain, loss=lambda model, batch: 2 * loss_of(model, batch))
    check_same(model, alone)


@cases.add
def dividing_before_the_sum_changes_nothing_but_rounding() -> None:
    for groups in (None, 2):
        model, wrapped, alone, plain = twins(mlp(), sgd, gradient_predivide_factor=4.0, groups=groups)
        train_own(model, wrapped)
        train_joined(alone, plain)
        check_same(model, alone)


@cases.add
def groups_are_reduced_when_their_last_gradient_is_ready() -> None:
    def layers(model: nn.Sequential) -> Any:
        return [list(model[0].parameters()), [model[2].weight]]  # one parameter is in no group

    for groups in (1, 3, 100, layers):
        model = mlp()
        alone = copy.deepcopy(model)
        wrapped = hvd.DistributedOptimizer(
            sgd(model.parameters()),
            named_parameters=model.named_parameters(),
            groups=groups(model) if callable(groups) else groups,
        )
        train_own(model, wrapped)
        train_joined(alone, sgd(alone.parameters()))
        check_same(model, alone)


@cases.add
def num_groups_is_the_old_name_of_groups() -> None:
    model = mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=2)
    assert any(w.category is DeprecationWarning and "num_groups" in str(w.message) for w in caught)
    assert len(wrapped._reducer._groups) == 2


@cases.add
def a_group_with_unused_members_is_reduced_without_them() -> None:
    model = Branches()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), groups=[list(model.parameters())]
    )
    for user in (0, 1, None):
        wrapped.zero_grad()
        model(torch.ones(3, 4) * (hvd.rank() + 1), use=hvd.rank() == user).sum().backward()
        wrapped.step()
        assert model.always.weight.grad is not None
        assert (next(model.sometimes.parameters()).grad is None) == (user is None)
        assert model.never.weight.grad is None
    check_same_on_all_ranks(list(model.parameters()))


class _Halved:
    """A user's own compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 2, "context"

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert ctx == "context"
        return tensor * 2


@cases.add
def compressed_gradients_come_back_in_their_own_dtype() -> None:
    for compression, tolerance in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2), (_Halved, 1e-9)):
        model, wrapped, alone, plain = twins(mlp(), sgd, compression=compression)
        train_own(model, wrapped)
        train_joined(alone, plain)
        check_same(model, alone, tolerance)
        grads = [p.grad for p in model.parameters()]
        assert all(grad is not None and grad.dtype == torch.float64 for grad in grads)


@cases.add
def sparse_gradients_can_be_reduced_as_dense_ones() -> None:
    torch.manual_seed(5)
    model = nn.Embedding(6, 3, sparse=True).double()
    alone = copy.deepcopy(model)
    wrapped = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), sparse_as_dense=True
    )
    rows = torch.tensor([[1, 1, 2], [0, 2, 5]])
    model(rows[hvd.rank()]).square().mean().backward()
    wrapped.step()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_sparse
    plain = sgd(alone.parameters())
    alone(rows).square().mean().backward()
    plain.step()
    check_same(model, alone)


def _adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


@cases.add
def adasum_combines_the_steps_of_the_ranks() -> None:
    model = mlp()
    copies = [copy.deepcopy(model) for _ in range(2)]
    wrapped = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    plains = [torch.optim.Adam(one.parameters(), lr=0.01) for one in copies]
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        train_own(model, wrapped, 1)
        for rank, (one, plain) in enumerate(zip(copies, plains, strict=True)):
            plain.zero_grad()
            loss_of(one, own_part(joined_batch(0), rank)).backward()
            plain.step()
        with torch.no_grad():
            for start_at, value, *ends in zip(
                before, model.parameters(), *(one.parameters() for one in copies), strict=True
            ):
                expected = start_at + _adasum(ends[0] - start_at, ends[1] - start_at)
                assert torch.allclose(value, expected, rtol=1e-7, atol=1e-9), (
                    f"step {step}: {value}, expected {expected}"
                )
                start_at.copy_(value)
                for end in ends:
                    end.copy_(value)
    check_same_on_all_ranks(list(model.parameters()))


@cases.add
def adasum_takes_zero_from_a_rank_without_a_gradient() -> None:
    model = Branches()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = copy.deepcopy(model)
    wrapped = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2
    )
    for _ in range(2):
        model(torch.ones(3, 4), use=hvd.rank() == 1).sum().backward()
    wrapped.step()
    assert torch.equal(model.never.weight, before.never.weight)
    # Equal steps are averaged, a step of one rank alone is taken.
    torch.testing.assert_close(model.always.weight, before.always.weight - 0.1 * 2 * 3)
    torch.testing.assert_close(model.sometimes.weight, before.sometimes.weight - 0.1 * 2 * 3 * 12)
    check_same_on_all_ranks(list(model.parameters()))


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
