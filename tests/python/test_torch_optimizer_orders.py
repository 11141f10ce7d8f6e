"""DistributedOptimizer in the loops that people write: clipping, mixed precision, closures, two networks in turn."""

import copy
import itertools
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
    twins,
)

import horovod.torch as hvd

cases = Cases()


@cases.add
def clipping_sees_the_reduced_gradients() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd)
    for step in range(3):
        batch = joined_batch(step)
        wrapped.zero_grad()
        loss_of(model, own_part(batch)).backward()
        wrapped.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with wrapped.skip_synchronize():
            wrapped.step()
        plain.zero_grad()
        loss_of(alone, batch).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        plain.step()
    check_same(model, alone)


@cases.add
def a_step_after_synchronize_warns_and_is_right() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd)
    loss_of(model, own_part(joined_batch(0))).backward()
    wrapped.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped.step()
    assert any("called without optimizer.skip_synchronize() context" in str(w.message) for w in caught)
    train_joined(alone, plain, 1)
    check_same(model, alone)


def _scaled_step(trained: Any, scaler: Any, batch: Any, bad: bool, short: bool) -> None:
    model, optimizer = trained
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    scaler.scale(loss * float("inf") if bad else loss).backward()
    if short:  # as with one process
        scaler.step(optimizer)
    elif hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
    scaler.update()


@cases.add
def a_grad_scaler_skips_the_same_steps_on_all_ranks() -> None:
    for fused, short in itertools.product((False, True), (False, True)):
        model = mlp(torch.float32)
        alone = copy.deepcopy(model)
        plain = torch.optim.Adam(alone.parameters(), lr=0.01, fused=fused)
        wrapped = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01, fused=fused), named_parameters=model.named_parameters()
        )
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        for step in range(4):
            batch = joined_batch(step, dtype=torch.float32)
            # In the second step one rank alone has an overflow.
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                bad = step == 1 and hvd.rank() == 1
                _scaled_step((model, wrapped), scalers[0], own_part(batch), bad, short)
            _scaled_step((alone, plain), scalers[1], batch, step == 1, short)
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert scalers[0].get_scale() == 1024.0  # halved once, doubled once
        check_same(model, alone, 1e-4)


@cases.add
def autocast_models_are_trained_alike() -> None:
    model, wrapped, alone, plain = twins(mlp(torch.float32), sgd)

    def loss(one: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(one, batch)

    for step in range(2):
        batch = joined_batch(step, dtype=torch.float32)
        for one, optimizer, part in ((model, wrapped, own_part(batch)), (alone, plain, batch)):
            optimizer.zero_grad()
            loss(one, part).backward()
            optimizer.step()
    check_same(model, alone, 1e-2)


@cases.add
def closures_are_reduced_whenever_they_are_called() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    for make in (sgd, lbfgs):
        model, wrapped, alone, plain = twins(mlp(), make)
        for step in range(2):
            batch = joined_batch(step)
            losses = []
            for one, optimizer, part in ((model, wrapped, own_part(batch)), (alone, plain, batch)):

                def closure(one: Any = one, optimizer: Any = optimizer, part: Any = part) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(one, part)
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure)))
            assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        check_same(model, alone)


@cases.add
def a_closure_that_only_tells_the_loss() -> None:
    model, wrapped, alone, plain = twins(mlp(), sgd)
    loss = loss_of(model, own_part(joined_batch(0)))
    loss.backward()
    told = wrapped.step(lambda: loss)
    train_joined(alone, plain, 1)
    check_same(model, alone)
    check_same_on_all_ranks([told])


def _train_gan(nets: Any, optimizers: Any, part: Any) -> None:
    """The usual loop: the discriminator learns from real and generated samples, then the generator through it."""
    generator, discriminator = nets
    generates, discriminates = optimizers
    for step in range(3):
        real, _ = part(joined_batch(step))
        noise, _ = part(joined_batch(100 + step))
        discriminates.zero_grad()
        fake = generator(noise)
        loss = (discriminator(real) - 1).square().mean() + discriminator(fake.detach()).square().mean()
        loss.backward()
        discriminates.step()

        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        generates.zero_grad()
        (discriminator(generator(noise)) - 1).square().mean().backward()
        generates.step()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)


@cases.add
def two_networks_learn_in_turn() -> None:
    for named in (True, False):
        torch.manual_seed(7)
        # Both have parameters of the same names, one of them even of the same shape.
        nets = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, out)).double() for out in (8, 1)]
        alone = copy.deepcopy(nets)
        wrapped = [
            hvd.DistributedOptimizer(
                torch.optim.Adam(net.parameters(), lr=0.01), named_parameters=net.named_parameters() if named else None
            )
            for net in nets
        ]
        _train_gan(nets, wrapped, own_part)
        _train_gan(alone, [torch.optim.Adam(net.parameters(), lr=0.01) for net in alone], lambda batch: batch)
        for net, expected in zip(nets, alone, strict=True):
            check_same(net, expected)


@cases.add
def one_loss_for_two_optimizers() -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    wrapped = [
        hvd.DistributedOptimizer(sgd(model[i].parameters()), named_parameters=model[i].named_parameters(f"layer{i}"))
        for i in (0, 2)
    ]
    for step in range(2):
        for optimizer in wrapped:
            optimizer.zero_grad()
        loss_of(model, own_part(joined_batch(step))).backward()
        for optimizer in wrapped:
            optimizer.step()
    train_joined(alone, sgd(alone.parameters()), 2)
    check_same(model, alone)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2, start)


@pytest.mark.parametrize("case", cases.names())
def test_two_ranks(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
