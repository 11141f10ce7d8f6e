"""DistributedOptimizer when ranks have different gradients: what any rank has all get, whoever has what; no hang.

And when ranks are missing: sets of them, and ranks that die.
"""

import copy
import os
import random
from typing import Any

import pytest
import torch
from cases import Cases, Outcomes
from ranks import start_ranks
from torch import nn
from torch_training import (
    check_same_on_all_ranks,
    joined_batch,
    loss_of,
    mlp,
    own_part,
    sgd,
    train_own,
)

import horovod.torch as hvd

cases = Cases()

PAIR = hvd.ProcessSet([0, 2])
RANKS = 3


def start() -> None:
    hvd.init(process_sets=[PAIR])


# ---- Who has what ----------------------------------------------------------------------------------------------------

NONE, DENSE, SPARSE = range(3)
ROWS, COLUMNS = 5, 2


def gradient_of(step: int, rank: int, index: int, kind: int) -> torch.Tensor | None:
    """What a rank's gradient of a parameter is in a step; any rank can compute it. Whole numbers, for exact sums."""
    generator = torch.Generator().manual_seed(step * 10000 + rank * 100 + index)
    if kind == NONE:
        return None
    if kind == DENSE:
        return torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator).double()
    rows = torch.randint(ROWS, (1, 3), generator=generator)
    values = torch.randint(-8, 8, (3, COLUMNS), generator=generator).double()
    return torch.sparse_coo_tensor(rows, values, (ROWS, COLUMNS))


def make_gradients(parameters: list[nn.Parameter], kinds: list[int], step: int) -> None:
    """A backward pass that gives each parameter the gradient of its kind."""
    loss: Any = torch.zeros((), dtype=torch.float64)
    for index, (parameter, kind) in enumerate(zip(parameters, kinds, strict=True)):
        wanted = gradient_of(step, hvd.rank(), index, kind)
        if wanted is None:
            continue
        if kind == DENSE:
            loss = loss + (parameter * wanted).sum()
        else:
            lookup: Any = nn.functional.embedding
            loss = loss + (lookup(wanted._indices()[0], parameter, sparse=True) * wanted._values()).sum()
    if loss.requires_grad:
        loss.backward()


def run_random_patterns(steps: int, seed: int, **arguments: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64)) for _ in range(6)]
    if arguments.pop("grouped", False):
        arguments["groups"] = [parameters[:2], parameters[2:5]]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    wrapped = hvd.DistributedOptimizer(sgd(parameters), named_parameters=named, op=hvd.Sum, **arguments)
    choice = random.Random(seed)  # the same on all ranks
    for step in range(steps):
        usual = choice.random() < 0.3
        patterns = [
            [DENSE if usual else choice.choice((NONE, DENSE, SPARSE)) for _ in parameters] for _ in range(RANKS)
        ]
        if not usual and choice.random() < 0.5:  # a parameter that nobody uses
            for pattern in patterns:
                pattern[step % len(parameters)] = NONE
        wrapped.zero_grad()
        make_gradients(parameters, patterns[hvd.rank()], step)
        wrapped.synchronize()
        for index, parameter in enumerate(parameters):
            kinds = [pattern[index] for pattern in patterns]
            what = f"step {step}, parameter {index}: ranks had {kinds}"
            given = [gradient_of(step, rank, index, kind) for rank, kind in enumerate(kinds)]
            present = [gradient.to_dense() for gradient in given if gradient is not None]
            if not present:
                assert parameter.grad is None, what
                continue
            assert parameter.grad is not None, what
            dense = DENSE in kinds or arguments.get("sparse_as_dense", False)
            assert parameter.grad.is_sparse != dense, what
            assert torch.equal(parameter.grad.to_dense(), torch.stack(present).sum(dim=0)), what


@cases.add
def any_pattern_of_gradients_gives_their_sum_everywhere() -> None:
    run_random_patterns(150, seed=1)


@cases.add
def any_pattern_in_groups() -> None:
    run_random_patterns(80, seed=2, grouped=True)


@cases.add
def any_pattern_as_dense_gradients() -> None:
    run_random_patterns(80, seed=3, sparse_as_dense=True)


@cases.add
def a_pattern_that_is_the_same_everywhere_is_agreed_on_by_one_message() -> None:
    from horovod import _core

    parameters = [nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64)) for _ in range(3)]
    wrapped = hvd.DistributedOptimizer(sgd(parameters))
    for kinds, started in (([DENSE, NONE, DENSE], 2), ([DENSE, SPARSE, NONE], 3), ([NONE, NONE, NONE], 0)):
        before = _core.counters()["requests_submitted"]
        wrapped.zero_grad()
        make_gradients(parameters, kinds, 0)
        wrapped.synchronize()
        assert _core.counters()["requests_submitted"] - before == started + 1


# ---- Part of the ranks -----------------------------------------------------------------------------------------------


@cases.add
def a_process_set_trains_by_itself() -> None:
    for op in (hvd.Average, hvd.Adasum):
        model = mlp()
        alone = copy.deepcopy(model)
        plain = sgd(alone.parameters())
        wrapped = hvd.DistributedOptimizer(
            sgd(model.parameters()), named_parameters=model.named_parameters(), process_set=PAIR, op=op
        )
        train_own(model, wrapped, 2)
        members = [1] if hvd.rank() == 1 else [0, 2]  # who is no member trains by itself
        for step in range(2):
            plain.zero_grad()
            batch = joined_batch(step)
            loss: Any = sum(loss_of(alone, own_part(batch, rank)) for rank in members) / len(members)
            loss.backward()
            plain.step()
        if op == hvd.Average or hvd.rank() == 1:
            assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        check_same_on_all_ranks(list(model.parameters()), PAIR)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(RANKS, start)


@pytest.mark.parametrize("case", cases.names())
def test_three_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


def _lose_a_rank() -> str:
    hvd.init()
    model = mlp()
    wrapped = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    train_own(model, wrapped, 2)
    loss_of(model, own_part(joined_batch(2))).backward()
    if hvd.rank() == 1:
        os._exit(7)
    try:
        wrapped.step()
    except hvd.HorovodInternalError as error:
        wrapped.zero_grad()  # nothing is pending any more
        return str(error)
    return "no error"


def test_a_lost_rank_is_an_error_of_the_step() -> None:
    with start_ranks(2, _lose_a_rank) as group:
        survivor, victim = group.wait(90)
    assert victim.returncode == 7
    assert survivor.error is None, str(survivor)
    assert "rank 1" in survivor.value
