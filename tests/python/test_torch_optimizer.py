"""DistributedOptimizer: it is still the user's optimizer; what is reduced, and when."""

import copy
import gc
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


@cases.add
def a_new_optimizer_takes_the_place_of_one_that_still_lives() -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    old = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    train_own(model, old, 1)
    loss_of(model, own_part(joined_batch(9))).backward()  # of which nobody wants to know any more
    hvd.barrier()
    model.zero_grad()
    new = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    train_own(model, new, 2)
    del old
    train_own(model, new, 1)
    plain = sgd(alone.parameters())
    for steps in (1, 2, 1):
        train_joined(alone, plain, steps)
    check_same(model, alone)


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
    last: Any = nn.Linear(8, 1 << 18)  # small ones are started together with those that come next
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


@cases.add
def gradients_on_some_ranks_only_become_zeros_elsewhere_and_none_stays_none() -> None:
    for sparse in (False, True):
        model = Branches(sparse)
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


def _loss_of_two(kind: str, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
    if kind == "added":  # both gradients are the same memory
        return ((a.view(-1) + b.view(-1)) * x[: a.numel()]).sum()
    together = torch.stack([a, b]).flatten() if kind == "stacked" else torch.cat([a, b])
    return (together * x).sum()


@cases.add
def gradients_that_share_memory_are_reduced_once_each() -> None:
    for elements in (4, 300_000):  # these are queued, those are started at once
        for groups in (None, 1):
            for kind in ("concatenated", "stacked", "added", "one buffer"):
                a, b = (nn.Parameter(torch.ones(elements)) for _ in range(2))
                named = [(f"{kind}.{name}", parameter) for name, parameter in (("a", a), ("b", b))]
                optimizer = hvd.DistributedOptimizer(sgd([a, b]), named, groups=groups)
                buffer = torch.zeros(2 * elements)
                x = torch.arange(2.0 * elements)
                for _ in range(2):
                    optimizer.zero_grad()
                    if kind == "one buffer":
                        buffer.zero_()
                        a.grad, b.grad = buffer[:elements], buffer[elements:]
                    _loss_of_two(kind, a, b, x * (hvd.rank() + 1)).backward()
                    optimizer.synchronize()
                    of_a, of_b = x[:elements] * 1.5, x[:elements] * 1.5 if kind == "added" else x[elements:] * 1.5
                    gradients: Any = (a.grad, b.grad)
                    for gradient, expected in zip(gradients, (of_a, of_b), strict=True):
                        assert torch.equal(gradient, expected), (kind, elements, groups)
                    assert kind != "one buffer" or torch.equal(buffer, x * 1.5)
                    with optimizer.skip_synchronize():
                        optimizer.step()


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
