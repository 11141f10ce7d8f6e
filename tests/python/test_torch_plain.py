"""The short way of operations on plain tensors: which go it, and that they end as on the long one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from references import check_balanced
from torch.overrides import TorchFunctionMode

import horovod.torch as hvd
from horovod import _core
from horovod.common.handles import group_of
from horovod.torch.tensors import CODES, plain

IN_PLACE = (plain.run_in_place, plain.submit_in_place)
INTO_NEW = (plain.run_into_new, plain.submit_into_new)
ALLREDUCE = ("x", hvd.global_process_set, hvd.Sum, 1.0, 1.0)
NOT_INITIALIZED = "has not been initialized"

has_exchange_interface = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch has no DLPack exchange interface"
)


class Text(str):
    """A name that is not plain: operations with it go the long way."""


class Subclass(torch.Tensor):
    pass


def ask(functions: tuple[Callable[..., Any], ...], tensor: Any) -> list[Any]:
    return [function(_core.ALLREDUCE, tensor, *ALLREDUCE) for function in functions]


@pytest.mark.parametrize(
    "tensor",
    [
        [1.0, 2.0],
        torch.zeros(4).numpy(),
        torch.zeros(4, 4).t(),
        torch.zeros(8)[::2],
        torch.zeros(1).expand(4),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(4).to_sparse(),
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(4)),
        torch.zeros(1, dtype=torch.complex64).conj().imag,
        torch.zeros(4).as_subclass(Subclass),
        None,
    ],
    ids=lambda tensor: str(getattr(tensor, "layout", type(tensor).__name__)),
)
def test_other_tensors_are_not_plain(tensor: Any) -> None:
    assert ask((*IN_PLACE, *INTO_NEW), tensor) == [NotImplemented] * 4


@has_exchange_interface
def test_a_tensor_that_needs_a_gradient_is_plain_in_place_only() -> None:
    for tensor in (torch.zeros(4, requires_grad=True), torch.nn.Parameter(torch.zeros(4))):
        assert ask(INTO_NEW, tensor) == [NotImplemented] * 2
        for function in IN_PLACE:
            with pytest.raises(hvd.HorovodInternalError, match=NOT_INITIALIZED):
                function(_core.ALLREDUCE, tensor, *ALLREDUCE)


@has_exchange_interface
def test_while_pytorch_traces_nothing_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert ask((*IN_PLACE, *INTO_NEW), torch.zeros(4)) == [NotImplemented] * 4


@has_exchange_interface
def test_autograd_is_told_of_a_change_in_place() -> None:
    values = torch.ones(3, requires_grad=True)
    squares = values * values
    product = squares * squares
    with pytest.raises(hvd.HorovodInternalError, match=NOT_INITIALIZED):
        hvd.allreduce_(squares, name="x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@has_exchange_interface
def test_every_dtype_is_plain_but_complex_ones() -> None:
    for dtype in CODES:
        tensor = torch.zeros(4).to(dtype)
        if dtype.is_complex:
            assert ask(INTO_NEW, tensor) == [NotImplemented] * 2
        else:
            with pytest.raises((hvd.HorovodInternalError, ValueError), match=NOT_INITIALIZED):
                plain.run_into_new(_core.BROADCAST, tensor, "x", hvd.global_process_set, 0)


def forms_of(own: torch.Tensor, rank: int) -> dict[str, Callable[[str], Any]]:
    return {
        "broadcast": lambda name: hvd.broadcast(own, 1, name),
        "broadcast_": lambda name: hvd.broadcast_(own.clone(), 1, name),
        "broadcast_async": lambda name: hvd.synchronize(hvd.broadcast_async(own, 1, name)),
        "broadcast_async_": lambda name: hvd.synchronize(hvd.broadcast_async_(own.clone(), 1, name)),
        "allgather": lambda name: hvd.allgather(own[: rank + 3], name),
        "allgather of nothing": lambda name: hvd.allgather(own[:0], name),
        "alltoall": lambda name: hvd.alltoall(own[:4], name=name),
    }


def reductions_of(own: torch.Tensor) -> dict[str, Callable[[str], Any]]:
    return {
        "allreduce": lambda name: hvd.allreduce(own, name=name, op=hvd.Sum),
        "allreduce_": lambda name: hvd.allreduce_(own.clone(), name=name, op=hvd.Sum),
        "allreduce_async": lambda name: hvd.synchronize(hvd.allreduce_async(own, name=name, op=hvd.Sum)),
        "allreduce_async_": lambda name: hvd.synchronize(hvd.allreduce_async_(own.clone(), name=name, op=hvd.Sum)),
        "scalar": lambda name: hvd.allreduce(own[1, 1], name=name, op=hvd.Sum),
        "reducescatter": lambda name: hvd.reducescatter(own, name, op=hvd.Sum),
        "reducescatter_async": lambda name: hvd.synchronize(hvd.reducescatter_async(own, name, hvd.Sum)),
        "group": lambda name: hvd.grouped_allreduce([own, own], name=name, op=hvd.Sum)[1],
        "group in place": lambda name: hvd.grouped_allreduce_([own.clone(), own.clone()], name=name, op=hvd.Sum)[1],
    }


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().view(torch.uint8).tolist() if tensor.numel() else []


def both_ways() -> None:
    hvd.init()
    rank = hvd.rank()
    for dtype in CODES:
        own = (torch.arange(15).reshape(5, 3) * (rank + 1)).to(dtype)
        reductions = {} if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else reductions_of(own)
        for form, call in (forms_of(own, rank) | reductions).items():
            name = f"{form}.{dtype}"
            short, long = call(name), call(Text(name))
            what = f"{name}: {short} and {long}"
            assert type(short) is torch.Tensor and short.dtype == dtype and short.shape == long.shape, what
            assert short.is_contiguous() and not short.requires_grad and short.device == long.device, what
            assert bytes_of(short) == bytes_of(long), what
            short.fill_(1)
    # The rows' memory belongs to the tensor, and to views of it.
    gathered = [hvd.allgather(torch.full((1000,), rank + 1.0), f"kept.{i}")[500:1500] for i in range(20)]
    assert all(part.sum() == 1500 for part in gathered)
    hvd.barrier()
    hvd.shutdown()
    assert all(part.sum() == 1500 for part in gathered)


def test_both_ways_give_the_same() -> None:
    run_ranks(2, both_ways)


def submit_each(tensors: Any, names: Any) -> Any:
    return plain.submit_each_in_place(_core.ALLREDUCE, tensors, names, *ALLREDUCE[1:])


@has_exchange_interface
def test_what_is_not_plain_in_a_list_leaves_all_of_it_alone() -> None:
    tensors = [torch.zeros(4), torch.zeros(4)]
    for others, names in (
        (tensors, ["a"]),
        (tensors, ["a", None]),
        (tensors, ["a", Text("b")]),
        (tensors, ["a", "b" * 300]),
        (iter(tensors), ["a", "b"]),
        ([*tensors, torch.zeros(4, 4).t()], ["a", "b", "c"]),
        ([*tensors, None], ["a", "b", "c"]),
    ):
        assert submit_each(others, names) is NotImplemented
    assert [tensor._version for tensor in tensors] == [0, 0]


def each_by_its_name() -> None:
    hvd.init()
    tensors = [torch.full((3,), float(i)) for i in range(5)]
    handles = submit_each(tensors, [f"x{i}" for i in range(5)])
    # The others may have them one by one, in any order.
    if hvd.rank() == 1:
        for handle in handles:
            hvd.synchronize(handle)
        more = [hvd.allreduce_async_(tensors[i], name=f"y{i}", op=hvd.Sum) for i in (3, 1, 4, 0, 2)]
    else:
        hvd.synchronize(group_of(handles))
        more = submit_each(tensors, [f"y{i}" for i in range(5)])
    for handle in more:
        hvd.synchronize(handle)
    assert [tensor.tolist() for tensor in tensors] == [[4.0 * i] * 3 for i in range(5)]
    assert [tensor._version for tensor in tensors] == [2] * 5
    # One that is refused: those before it go on, and nobody gets their results.
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="same name"):
            submit_each([torch.ones(1), torch.ones(1)], ["twice", "twice"])
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.allreduce_(torch.ones(1), name="twice", op=hvd.Sum)
    hvd.barrier()


@has_exchange_interface
def test_each_of_a_list_by_its_name() -> None:
    run_ranks(2, each_by_its_name)


def more_tensors() -> None:
    hvd.init()
    # Memory that two tensors share until one is written to.
    original = torch.ones(1000)
    clone = original._lazy_clone()
    hvd.allreduce_(clone, name="clone", op=hvd.Sum)
    assert (original == 1).all() and (clone == 2).all()
    # No memory at all.
    empty = torch.ones(8)
    empty.untyped_storage().resize_(0)
    for form in (hvd.reducescatter, hvd.allreduce, hvd.allreduce_, hvd.allgather):
        with pytest.raises(ValueError, match="8 elements but no memory"):
            form(empty, name="none")
    # An interruption while PyTorch runs code of others is not dropped.
    for form in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
        with pytest.raises(KeyboardInterrupt), Interrupted():
            form(torch.ones(4), name="interrupted")
    hvd.barrier()


class Interrupted(TorchFunctionMode):
    """As if Ctrl-C were pressed when anything is asked of a tensor."""

    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


@has_exchange_interface
def test_tensors_without_memory_and_with_shared_memory() -> None:
    run_ranks(2, more_tensors)


def references_are_balanced() -> None:
    hvd.init()
    tensor = torch.ones(4, 3)
    uses: dict[str, Callable[[], Any]] = {
        "run": lambda: [hvd.allreduce_(tensor, name="a"), hvd.allreduce(tensor, name="b"), hvd.allgather(tensor, "c")],
        "more": lambda: [hvd.reducescatter(tensor, "d"), hvd.alltoall(tensor, name="e"), hvd.broadcast(tensor, 0, "f")],
        "submit": lambda: hvd.synchronize(hvd.allreduce_async(tensor, name="g")),
        "group": lambda: hvd.grouped_allreduce([tensor, tensor], name="h"),
        "group that is not plain": lambda: hvd.grouped_allreduce([tensor, tensor.t()], name="i"),
        "each": lambda: hvd.synchronize(group_of(submit_each([tensor, tensor.clone()], ["j", "k"]))),
        "each, not plain": lambda: submit_each([tensor, tensor.t()], ["j", "k"]),
    }
    check_balanced(uses, [tensor], hvd.barrier)


@has_exchange_interface
def test_references_are_given_back() -> None:
    run_ranks(2, references_are_balanced)
