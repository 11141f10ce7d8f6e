"""Layouts of tensors: dense ones are used where they lie, any other gets the right result too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from waiting import wait_until

import horovod.torch as hvd

Make = Callable[[Tensor], Tensor]

# Each makes a tensor in some layout with the values of one that is contiguous, of four dimensions.
DENSE: dict[str, Make] = {
    "contiguous": lambda t: t.clone(),
    "channels last": lambda t: t.clone(memory_format=torch.channels_last),
    "channels last 3d": lambda t: t.unsqueeze(-1).expand(-1, -1, -1, -1, 2).clone(memory_format=torch.channels_last_3d),
    "transposed matrix": lambda t: t.reshape(t.shape[0], -1).t().clone().t(),
    "one of several": lambda t: torch.stack([t, t, t])[1],
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "scalar": lambda t: t.sum(),
}
OTHERS: dict[str, Make] = {
    "permuted": lambda t: t.permute(3, 0, 1, 2).clone(memory_format=torch.contiguous_format).permute(1, 2, 3, 0),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "reversed blocks": lambda t: t.repeat(1, 1, 1, 2)[..., 1::2],
}


def values(rank: int) -> Tensor:
    return torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5) * (rank + 1)


def total(make: Make) -> Tensor:
    return sum((make(values(rank)).detach() for rank in range(hvd.size())), torch.tensor(0.0))


def every_layout() -> None:
    hvd.init()
    own = values(hvd.rank())
    for name, make in {**DENSE, **OTHERS}.items():
        want = total(make)
        tensor = make(own)
        result = hvd.allreduce(tensor.detach(), op=hvd.Sum, name=name)
        assert torch.equal(result, want), name
        if name in DENSE:
            assert result.stride() == tensor.stride(), name
        assert torch.equal(tensor, make(own)), f"{name}: the input was changed"
        assert torch.equal(hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum, name=name)), want), name
        in_place = make(own)
        pointer = in_place.data_ptr()
        assert hvd.allreduce_(in_place, op=hvd.Sum, name=name) is in_place
        assert in_place.data_ptr() == pointer
        assert torch.equal(in_place, want), f"{name} in place"
        in_place = make(own)
        assert hvd.synchronize(hvd.allreduce_async_(in_place, op=hvd.Sum, name=name)) is in_place
        assert torch.equal(in_place, want), f"{name} in place, async"
        members = [make(own), make(own)]
        hvd.grouped_allreduce_(members, op=hvd.Sum, name=name)
        assert all(torch.equal(member, want) for member in members), f"{name} grouped"
        root = make(values(hvd.size() - 1))
        assert torch.equal(hvd.broadcast_(make(own), hvd.size() - 1, name=name), root), name
        assert torch.equal(hvd.broadcast(make(own).detach(), hvd.size() - 1, name=name), root), name
        if tensor.dim():
            parts = [make(values(rank)).detach() for rank in range(hvd.size())]
            assert torch.equal(hvd.allgather(make(own).detach(), name=name), torch.cat(parts)), name
            scattered = hvd.reducescatter(make(own).detach(), op=hvd.Sum, name=name)
            assert torch.equal(hvd.allgather(scattered), want), name
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_layout_gives_the_same(size: int) -> None:
    run_ranks(size, every_layout)


def in_their_memory() -> None:
    """Without a copy there is nothing left to do once the operation has ended, before anybody waits for it."""
    hvd.init()
    for name, make in {**DENSE, **OTHERS}.items():
        tensor = make(values(hvd.rank()))
        before = tensor.detach().clone()
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)
        wait_until(functools.partial(hvd.poll, handle), "the operation ends", 30)
        assert torch.equal(tensor, total(make) if name in DENSE else before), name
        hvd.synchronize(handle)
        assert torch.equal(tensor, total(make)), name


def test_dense_tensors_are_reduced_where_they_lie() -> None:
    run_ranks(2, in_their_memory)


def different_layouts() -> list[str]:
    hvd.init()
    texts = []
    cubes: list[Make] = [DENSE["contiguous"], DENSE["channels last"]]
    # Of equal extents no shape tells the order of memory.
    cube = torch.arange(81.0).view(3, 3, 3, 3)
    for call in (hvd.allreduce, hvd.allreduce_, lambda t, name: hvd.broadcast_(t, 0, name)):
        with pytest.raises(hvd.HorovodMismatchError) as caught:
            call(cubes[hvd.rank()](cube), name="cube")
        texts.append(str(caught.value))
    with pytest.raises(hvd.HorovodMismatchError):
        hvd.allreduce([cube[0, 0], cube[0, 0].t()][hvd.rank()], name="matrix")
    # The job goes on, and a copy helps.
    assert torch.equal(hvd.allreduce(cubes[hvd.rank()](cube).contiguous(), name="cube"), cube)
    # One that is not dense goes as contiguous: it fits a contiguous one.
    mixed = [cube.clone(), OTHERS["strided"](cube)][hvd.rank()]
    assert torch.equal(hvd.allreduce_(mixed, name="mixed"), cube)
    # Where an extent is 1 both orders may be the same memory.
    flat = torch.arange(6.0).view(2, 1, 3, 1)
    assert torch.equal(hvd.allreduce(cubes[hvd.rank()](flat), name="flat"), flat)
    return texts


def test_layouts_that_differ_between_ranks_are_an_error() -> None:
    for texts in run_ranks(2, different_layouts):
        for text in texts:
            assert "tensor shapes" in text
            assert "[3, 3, 3, 3]" in text
            assert "[3, 3, 3, 3, 1]" in text


def lazy_values() -> None:
    """Tensors whose memory holds the conjugate or the negative of their values."""
    hvd.init()
    number = torch.tensor([1 + 2j, 3 - 4j]) * (hvd.rank() + 1)
    factor = sum(range(1, hvd.size() + 1))
    want = torch.tensor([1 - 2j, 3 + 4j]) * factor
    assert torch.equal(hvd.allreduce(number.conj(), op=hvd.Sum), want)
    assert torch.equal(hvd.allreduce(number.conj().imag, op=hvd.Sum), want.imag)
    assert hvd.allgather(number.conj())[0] == 1 - 2j
    conjugate = number.conj()
    assert hvd.allreduce_(conjugate, op=hvd.Sum) is conjugate
    assert torch.equal(conjugate, want)
    assert torch.equal(number, want.conj().resolve_conj())


def test_conjugates_and_negatives() -> None:
    run_ranks(2, lazy_values)


def autograd_knows() -> None:
    """What was needed as it was must not be changed in place unnoticed."""
    hvd.init()
    for make in (DENSE["contiguous"], DENSE["channels last"], OTHERS["strided"]):
        for change in (hvd.allreduce_, lambda t: hvd.broadcast_(t, 0), lambda t: hvd.grouped_allreduce_([t])):
            source, weight = make(values(hvd.rank())), torch.ones(1, requires_grad=True)
            product: Any = (source * weight).sum()
            change(source)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def test_autograd_is_told_of_changes_in_place() -> None:
    run_ranks(2, autograd_knows)
