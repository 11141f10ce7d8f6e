"""DistributedOptimizer: what is reduced, when, and what each argument does."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from cases import Cases, Outcomes
from torch import nn
from torch_training import (
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
from waiting import wait_until

import horovod.torch as hvd

cases = Cases()


# ---- The optimizer is still the user's -------------------------------------------------------------------------------


def _optimizers() -> dict[str, Any]:
    """All of torch.optim, with arguments that work for a matrix and a vector."""
    made: dict[str, Any] = {}
    for name in torch.optim.__all__ if hasattr(torch.optim, "__all__") else dir(torch.optim):
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            made[name] = cls
    assert len(made) >= 13
    return made


@cases.add
def every_optimizer_of_torch_keeps_its_class_state_and_state_dict() -> None:
    for name, cls in _optimizers().items():
        sparse = name == "SparseAdam"
        model: nn.Module = nn.Embedding(8, 4, sparse=True) if sparse else nn.Linear(4, 3, bias=False)
        nn.init.constant_(next(model.parameters()), 0.5)
        plain = cls(model.parameters(), lr=0.01)
        wrapped = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        assert isinstance(wrapped, cls), name
        assert type(wrapped).__name__ == name
        assert wrapped.param_groups[0] is plain.param_groups[0], name
        assert wrapped.defaults == plain.defaults

        def closure(model: nn.Module = model, wrapped: Any = wrapped, sparse: bool = sparse) -> Any:
            wrapped.zero_grad()
            out = model(torch.tensor([1, 3])) if sparse else model(torch.ones(2, 4) * (1 + hvd.rank()))
            loss = out.square().sum()
            loss.backward()
            return loss

        wrapped.step(closure)
        saved = wrapped.state_dict()
        alone = cls(copy.deepcopy(model).parameters(), lr=0.01)
        alone.load_state_dict(saved)
        assert alone.state_dict().keys() == saved.keys(), name
        wrapped.load_state_dict(alone.state_dict())
        wrapped.step(closure)
        check_same_on_all_ranks(list(model.parameters()))


@cases.add
def a_state_that_exists_is_kept() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_joined(model, optimizer, 1)
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train_own(model, wrapped)
    train_joined(alone, plain)
    check_same(model, alone)


@cases.add
def learning_rate_schedulers_work_whether_made_before_or_after() -> None:
    for before in (True, False):
        model = mlp()
        alone = copy.deepcopy(model)
        optimizer = sgd(model.parameters())
        early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        scheduler = early if before else torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.5)
        plain = sgd(alone.parameters())
        other = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                train_own(model, wrapped, 1)
                scheduler.step()
                train_joined(alone, plain, 1)
                other.step()
                wrapped.load_state_dict(wrapped.state_dict())  # the scheduler still acts on it
        assert wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.025
        check_same(model, alone)


@cases.add
def hooks_of_the_optimizer_run_once_a_step() -> None:
    model = mlp()
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    calls: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("before"))
    wrapped.register_step_post_hook(lambda *_: calls.append("after"))
    train_own(model, wrapped, 2)
    assert calls == ["before", "after"] * 2


@cases.add
def nothing_is_left_of_an_optimizer_that_is_gone() -> None:
    model = mlp()
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    gc.collect()
    # Were its hooks still there, both would start the same names.
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    train_own(model, wrapped, 2)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())


# ---- When it is reduced ----------------------------------------------------------------------------------------------


class _WaitInBackward(torch.autograd.Function):
    """A slow backward pass: it goes on only when a condition has come true."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, condition: Any) -> torch.Tensor:
        ctx.condition = condition
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.condition()
        return grads[0], None


@cases.add
def the_first_gradients_are_reduced_before_the_last_exist() -> None:
    first: Any = nn.Linear(8, 8)
    last: Any = nn.Linear(8, 4)
    model = nn.Sequential(first, last)
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    seen = []

    def reduced_while_others_do_not_exist() -> None:
        # Nobody waits for the reduction; backward is still in this function.
        handles = [slot.handle for slot in wrapped._reducer._slots if slot.name.startswith("1.")]
        assert None not in handles
        wait_until(lambda: all(hvd.poll(handle) for handle in handles), "the gradients of the last layer are reduced")
        assert first.weight.grad is None
        assert last.weight.grad is not None
        seen.append(last.weight.grad.clone())

    apply: Any = _WaitInBackward.apply
    inputs = torch.full((2, 8), float(1 + hvd.rank()))
    hidden = apply(first(inputs), reduced_while_others_do_not_exist)
    last(hidden).sum().backward()
    assert len(seen) == 1
    check_same_on_all_ranks(seen)
    wrapped.synchronize()
    assert torch.equal(seen[0], last.weight.grad)
    check_same_on_all_ranks([p.grad for p in (first.weight, first.bias, last.weight, last.bias)])


@cases.add
def a_regular_step_costs_one_small_message_besides_the_gradients() -> None:
    from horovod import _core

    model = mlp()
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    train_own(model, wrapped, 2)
    before = _core.counters()
    train_own(model, wrapped, 5)
    after = _core.counters()
    assert after["requests_submitted"] - before["requests_submitted"] == 5 * (4 + 1)
    assert after["request_messages"] == before["request_messages"]  # all by bits


# ---- What is reduced -------------------------------------------------------------------------------------------------


class _Branches(nn.Module):
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


@cases.add
def gradients_on_some_ranks_only_become_zeros_elsewhere_and_none_stays_none() -> None:
    for sparse in (False, True):
        model = _Branches(sparse)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        alone = copy.deepcopy(model)
        wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
        for user in (0, 1, 0, None):  # which rank uses it; at last none
            wrapped.zero_grad()
            model(torch.ones(3, 4) * (hvd.rank() + 1), use=hvd.rank() == user).sum().backward()
            wrapped.synchronize()
            assert all(p.grad is None for p in model.never.parameters())
            with wrapped.skip_synchronize():
                wrapped.step()
            grad = next(model.sometimes.parameters()).grad
            if user is None:
                assert grad is None
                continue
            alone.zero_grad()
            alone(torch.ones(3, 4) * (user + 1), use=True).sum().backward()
            expected = next(alone.sometimes.parameters()).grad
            assert grad is not None and expected is not None
            assert grad.is_sparse == sparse
            torch.testing.assert_close(grad.to_dense(), expected.to_dense() / 2)
        check_same_on_all_ranks(list(model.parameters()))


@cases.add
def a_gradient_dense_on_one_rank_and_sparse_on_another_is_the_sum_of_both() -> None:
    weight: Any = nn.Parameter(torch.ones(4, 3))
    wrapped = hvd.DistributedOptimizer(sgd([weight]), op=hvd.Sum)
    lookup: Any = nn.functional.embedding
    used = weight * 2 if hvd.rank() == 0 else lookup(torch.tensor([1, 1]), weight, sparse=True)
    used.sum().backward()
    wrapped.synchronize()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0] * 3, [4.0] * 3, [2.0] * 3, [2.0] * 3]


@cases.add
def parameters_may_be_in_another_order_on_another_rank() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd)
    pairs = list(model.named_parameters())
    if hvd.rank() == 1:
        pairs.reverse()
    del wrapped
    wrapped = hvd.DistributedOptimizer(sgd([p for _, p in pairs]), named_parameters=pairs)
    train_own(model, wrapped)
    train_joined(alone, plain)
    check_same(model, alone)


@cases.add
def a_parameter_that_is_unfrozen_later_is_reduced() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    alone = copy.deepcopy(model)
    plain = sgd(alone.parameters())
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    for frozen in (True, False, False):
        for one in (model, alone):
            one[0].weight.requires_grad_(not frozen)
        train_own(model, wrapped, 1)
        train_joined(alone, plain, 1)
        check_same(model, alone)


@cases.add
def parameter_groups_added_later_are_reduced() -> None:
    for named in (True, False):
        model = mlp()
        alone = copy.deepcopy(model)
        plain = torch.optim.SGD(alone[0].parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            named_parameters=model.named_parameters() if named else None,
        )
        train_own(model, wrapped, 1)
        train_joined(alone, plain, 1)
        model.zero_grad()
        alone.zero_grad()
        wrapped.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        plain.add_param_group({"params": list(alone[2].parameters()), "lr": 0.05})
        train_own(model, wrapped, 2)
        train_joined(alone, plain, 2)
        check_same(model, alone)


@cases.add
def names_given_to_the_optimizer_are_used() -> None:
    model = mlp()
    if not hasattr(torch.optim.SGD(model.named_parameters(), lr=0.1), "param_groups"):
        return
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    assert [slot.name for slot in wrapped._reducer._slots] == sorted(name for name, _ in model.named_parameters())


@cases.add
def several_models_in_one_optimizer() -> None:
    one, two = mlp(seed=1), mlp(seed=2)
    both = nn.ModuleDict({"one": one, "two": two})
    alone = copy.deepcopy(both)
    named = [*one.named_parameters("one"), *two.named_parameters("two")]
    wrapped = hvd.DistributedOptimizer(sgd([p for _, p in named]), named_parameters=named)

    def loss(model: Any, batch: Any) -> Any:
        return loss_of(model["one"], batch) + 2 * loss_of(model["two"], batch)

    train_own(both, wrapped, loss=loss)
    train_joined(alone, sgd(alone.parameters()), loss=loss)
    check_same(both, alone)


@cases.add
def channels_last_models_are_reduced_as_they_lie_in_memory() -> None:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()).double()
    model.to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    model(images[2 * hvd.rank() :][:2]).square().mean().backward()
    wrapped.step()
    plain = sgd(alone.parameters())
    alone(images).square().mean().backward()
    plain.step()
    check_same(model, alone)


# ---- Arguments -------------------------------------------------------------------------------------------------------


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
    wrapped.set_backward_passes_per_step(3)
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
    model = _Branches()
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
    model = _Branches()
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


@cases.add
def a_rank_that_has_joined_contributes_nothing() -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    batch = joined_batch(0)
    if hvd.rank() == 0:
        loss_of(model, own_part(batch)).backward()
        wrapped.step()
    hvd.join()
    plain = sgd(alone.parameters())
    (loss_of(alone, own_part(batch, 0)) / 2).backward()
    plain.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    check_same(model, alone)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
