"""DistributedOptimizer: wrong use is an error that says what is wrong, on every rank, and training goes on."""

import copy
from typing import Any

import pytest
import torch
from cases import Cases, Outcomes, raises
from torch import nn
from torch_training import (
    check_same,
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


def _backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, own_part(joined_batch(step))).backward()


# ---- Arguments -------------------------------------------------------------------------------------------------------


@cases.add
def named_parameters_must_be_pairs_unique_and_complete() -> None:
    model: Any = mlp()
    optimizer = sgd(model.parameters())
    with raises(ValueError, "named_parameters should be a sequence of tuples (name, parameter)", "shape [16, 8]"):
        hvd.DistributedOptimizer(optimizer, named_parameters=model.parameters())
    with raises(ValueError, "must be unique", "Found duplicates: same"):
        hvd.DistributedOptimizer(optimizer, named_parameters=[("same", p) for p in model.parameters()])
    with raises(ValueError, "one or more model parameters were not named", "parameter 2 of group 0 (shape [4, 16])"):
        hvd.DistributedOptimizer(optimizer, named_parameters=model[0].named_parameters())


@cases.add
def arguments_that_make_no_sense_are_refused() -> None:
    model: Any = mlp()
    optimizer = sgd(model.parameters())
    wrong: Any
    for wrong in (0, -1, 1.5, None):
        with raises(ValueError, "backward_passes_per_step must be > 0"):
            hvd.DistributedOptimizer(optimizer, backward_passes_per_step=wrong)
    with raises(ValueError, "gradient_predivide_factor not supported with op != Average"):
        hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=2.0, op=hvd.Sum)
    with raises(ValueError, "gradient_predivide_factor must be > 0"):
        hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=0.0)
    with raises(ValueError, "op must be Average, Sum or Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Min)
    for wrong in (0, -2, "all", [model[0].weight], [[1]]):
        with raises(ValueError, "groups should be a non-negative integer or a list of list of torch.Tensor"):
            hvd.DistributedOptimizer(optimizer, groups=wrong)
    with raises(ValueError, "groups[1] holds a parameter that is in another group"):
        hvd.DistributedOptimizer(optimizer, groups=[[model[0].weight], [model[0].weight]])
    with raises(ValueError, "is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer))
    wrapped = hvd.DistributedOptimizer(optimizer)
    with raises(ValueError, "backward_passes_per_step must be > 0"):
        wrapped.set_backward_passes_per_step(0)


@cases.add
def names_that_are_taken_are_refused_later_too() -> None:
    one, two = mlp(seed=1), mlp(seed=2)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(one.named_parameters(), lr=0.1))
    with raises(ValueError, "Parameter names must be unique", "'0.weight'"):
        wrapped.add_param_group({"params": list(two.named_parameters())})


@cases.add
def a_copy_is_refused() -> None:
    for op in (hvd.Average, hvd.Adasum):
        wrapped = hvd.DistributedOptimizer(sgd(mlp().parameters()), op=op)
        with raises(TypeError, "can't be copied or pickled", "state_dict()"):
            copy.deepcopy(wrapped)


# ---- The order of calls ----------------------------------------------------------------------------------------------


@cases.add
def gradients_computed_too_often() -> None:
    for op in (hvd.Average, hvd.Adasum):
        model, wrapped, alone, plain = twins(mlp(), sgd, op=op, backward_passes_per_step=2)
        _backward(model)
        _backward(model)
        with raises(
            AssertionError, "Gradients were computed more than backward_passes_per_step times", "parameter '2."
        ):
            _backward(model)
        if op == hvd.Average:
            with raises(AssertionError, "'2.bias' (1 in all) was changed"):  # by the third pass, before its error
                wrapped.synchronize()
        wrapped.zero_grad()
        if op == hvd.Average:  # and training goes on
            wrapped.set_backward_passes_per_step(1)
            train_own(model, wrapped)
            train_joined(alone, plain)
            check_same(model, alone)


@cases.add
def zero_grad_between_backward_and_step() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd)
    _backward(model)
    for argument in ({}, {"set_to_none": False}):
        with raises(
            AssertionError, "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()"
        ):
            wrapped.zero_grad(**argument)
    wrapped.synchronize()
    wrapped.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    train_own(model, wrapped)
    train_joined(alone, plain)
    check_same(model, alone)


@cases.add
def a_step_that_skips_what_nobody_has_done() -> None:
    model = mlp()
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()))
    _backward(model)
    with raises(AssertionError, "before optimizer.synchronize()"), wrapped.skip_synchronize():
        wrapped.step()
    wrapped.step()  # the block has ended


@cases.add
def adasum_can_not_skip() -> None:
    wrapped = hvd.DistributedOptimizer(sgd(mlp().parameters()), op=hvd.Adasum)
    text = "Skipping synchronization is not supported when using Adasum optimizer"
    with raises(AssertionError, text), wrapped.skip_synchronize():
        pass


@cases.add
def gradients_changed_while_they_are_reduced() -> None:
    def clip(model: nn.Module, _optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def forget(model: nn.Module, _optimizer: Any) -> None:
        model.zero_grad()

    for change in (clip, forget):
        model, wrapped, alone, plain = twins(mlp(torch.float32), sgd)
        _backward_32(model)
        change(model, wrapped)
        with raises(AssertionError, "The gradient of parameter '0.bias' (4 in all) was changed", "Call optimizer.sync"):
            wrapped.step()
        wrapped.zero_grad()
        model.load_state_dict(alone.state_dict())
        _backward_32(model)
        wrapped.step()
        loss_of(alone, joined_batch(0, dtype=torch.float32)).backward()
        plain.step()
        check_same(model, alone, 1e-5)


def _backward_32(model: nn.Module) -> None:
    loss_of(model, own_part(joined_batch(0, dtype=torch.float32))).backward()


@cases.add
def two_optimizers_that_use_a_name_at_once() -> None:
    one, two = mlp(seed=1), mlp(seed=2)
    first, second = (
        hvd.DistributedOptimizer(sgd(m.parameters()), named_parameters=m.named_parameters()) for m in (one, two)
    )
    _backward(one)
    with raises(ValueError, "with the same name as another tensor", "'allreduce.0.bias'", "prefix="):
        _backward(two)
    first.step()
    second.zero_grad()  # nothing of it was started
    _backward(two)
    second.step()


# ---- Models that differ ----------------------------------------------------------------------------------------------


def _differ(texts: list[str], mine: nn.Module, **arguments: Any) -> None:
    """The ranks' models are not the same: an error on all of them, and then the job goes on."""
    model, wrapped, alone, plain = twins(mlp(), sgd)
    train_own(model, wrapped, 1)
    train_joined(alone, plain, 1)
    wrong = hvd.DistributedOptimizer(sgd(mine.parameters()), named_parameters=mine.named_parameters(), **arguments)
    loss: Any = sum(parameter.sum() for parameter in mine.parameters())
    loss.backward()
    with raises(hvd.HorovodMismatchError, "the ranks have different models", *texts):
        wrong.step()
    train_own(model, wrapped, 2)
    train_joined(alone, plain, 2)
    check_same(model, alone)


@cases.add
def models_with_another_shape_say_which_parameter() -> None:
    texts = ["parameter 'weight'", "shape [4, 3]", "on rank 0", "shape [4, 5]", "on rank 1"]
    _differ(texts, nn.Linear(3 if hvd.rank() == 0 else 5, 4))


@cases.add
def models_with_another_dtype_say_which_parameter() -> None:
    model = nn.Linear(3, 4)
    if hvd.rank() == 1:
        model.bias = nn.Parameter(model.bias.detach().double())
    _differ(["parameter 'bias'", "torch.float32", "torch.float64"], model)


@cases.add
def models_with_one_parameter_more_say_which() -> None:
    for richer in (0, 1):
        texts = ["parameter 'extra.weight'", f"of rank {richer} is not on rank {1 - richer}"]
        model = nn.Sequential()
        model.add_module("common", nn.Linear(3, 4))
        if hvd.rank() == richer:
            model.add_module("extra", nn.Linear(4, 4, bias=False))
        _differ(texts, model)


@cases.add
def models_with_other_names_say_which() -> None:
    model = nn.Sequential()
    model.add_module("left" if hvd.rank() == 0 else "right", nn.Linear(3, 4, bias=False))
    _differ(["parameter 'left.weight'", "of rank 0 is not on rank 1"], model)


@cases.add
def models_with_other_groups_say_which() -> None:
    model = nn.Linear(3, 4)
    _differ(["parameter 'bias'", "reduced in group"], model, groups=1 + hvd.rank())


@cases.add
def a_rank_without_any_parameters_is_told() -> None:
    model = nn.Linear(3, 4, bias=False)
    extra = nn.Parameter(torch.zeros(1))
    named = [("extra", extra)] if hvd.rank() else [("weight", model.weight)]
    wrapped = hvd.DistributedOptimizer(sgd([p for _, p in named]), named_parameters=named)
    with raises(hvd.HorovodMismatchError, "parameter 'weight'", "is not on rank 1"):
        wrapped.step()  # although no rank has a gradient


@cases.add
def ranks_that_step_different_optimizers_are_told() -> None:
    one, two = mlp(seed=1), mlp(seed=2)
    # The same names and shapes: as far as the ranks can see, it is the same model, and the gradients are averaged.
    optimizers = [
        hvd.DistributedOptimizer(sgd(m.parameters()), named_parameters=m.named_parameters()) for m in (one, two)
    ]
    different = nn.Linear(2, 2)
    other = hvd.DistributedOptimizer(sgd(different.parameters()), named_parameters=different.named_parameters())
    del optimizers[1]
    with raises(hvd.HorovodMismatchError, "is not on rank"):
        (optimizers[0] if hvd.rank() == 0 else other).step()


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


def test_before_init() -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
