"""The short way of operations on plain arrays: which go it, and that they end as on the long one."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks
from references import check_balanced
from sweeps import MAIN, check, values
from waiting import wait_until

import horovod.numpy as hvd
from horovod import _core
from horovod.common import names
from horovod.numpy.arrays import plain

IN_PLACE = (plain.run_in_place, plain.submit_in_place)
INTO_NEW = (plain.run_into_new, plain.submit_into_new)
ALLREDUCE = (_core.ALLREDUCE, "x", hvd.global_process_set, hvd.Sum, 1.0, 1.0)


class Text(str):
    """A name that is not plain: operations with it go the long way."""


def ask(functions: tuple[Callable[..., Any], ...], array: Any, arguments: tuple[Any, ...]) -> list[Any]:
    op, *others = arguments
    return [function(op, array, *others) for function in functions]


def read_only() -> Any:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        [1.0, 2.0],
        np.float32(1),
        np.zeros((4, 4), np.float32).T,
        np.zeros(8, np.float32)[::2],
        np.zeros(4, ">f4"),
        np.zeros(4, object),
        np.zeros(4, "datetime64[s]"),
        np.zeros(4, [("a", "f4")]),
        np.zeros(4, np.float32).view(np.recarray),
        np.ma.masked_array(np.zeros(4, np.float32)),
        memoryview(b"1234"),
        None,
    ],
    ids=lambda array: type(array).__name__,
)
def test_other_arrays_are_not_plain(array: Any) -> None:
    assert ask((*IN_PLACE, *INTO_NEW), array, ALLREDUCE) == [NotImplemented] * 4


def test_what_is_written_to_must_be_writable() -> None:
    assert ask(IN_PLACE, read_only(), ALLREDUCE) == [NotImplemented] * 2
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        plain.run_into_new(_core.ALLREDUCE, read_only(), *ALLREDUCE[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        (_core.ALLREDUCE, None, hvd.global_process_set, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, Text("x"), hvd.global_process_set, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, 5, hvd.global_process_set, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, "\ud800", hvd.global_process_set, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, "x" * 300, hvd.global_process_set, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.ProcessSet([0]), hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, "x", None, hvd.Sum, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, 6, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, -1, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, True, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, 1 << 32, 1.0, 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, hvd.Sum, "1", 1.0),
        (_core.ALLREDUCE, "x", hvd.global_process_set, hvd.Sum, 1.0, None),
        (_core.ALLREDUCE, "x", hvd.global_process_set),
        (_core.REDUCESCATTER, "x", hvd.global_process_set, None, 1.0, 1.0),
        (_core.BROADCAST, "x", hvd.global_process_set, 1 << 40),
        (_core.BROADCAST, "x", hvd.global_process_set, 0.0),
        (_core.BROADCAST, "x", hvd.global_process_set),
        (_core.BARRIER, "x", hvd.global_process_set, 0),
    ],
    ids=repr,
)
def test_other_arguments_are_not_plain(arguments: tuple[Any, ...]) -> None:
    array = np.ones(4, np.float32)
    assert ask((*IN_PLACE, *INTO_NEW), array, arguments) == [NotImplemented] * 4
    assert (array == 1).all()


def test_only_what_keeps_its_size_runs_in_place() -> None:
    reduction = ("x", hvd.global_process_set, hvd.Sum, 1.0, 1.0)
    for op, arguments in ((_core.REDUCESCATTER, reduction), (_core.ALLGATHER, reduction[:2])):
        assert ask(IN_PLACE, np.ones(4), (op, *arguments)) == [NotImplemented] * 2


def test_an_operation_that_is_not_plain_is_counted_once() -> None:
    names.restart_counting()
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            hvd.allreduce_(np.zeros(4, np.float32))
    assert names.operation_name("allreduce", None, 0) == "allreduce.noname.2"


def forms_of(own: Any, rank: int) -> dict[str, Callable[[str], Any]]:
    return {
        "broadcast": lambda name: hvd.broadcast(own, 1, name),
        "broadcast_": lambda name: hvd.broadcast_(own.copy(), 1, name),
        "broadcast_async": lambda name: hvd.synchronize(hvd.broadcast_async(own, 1, name)),
        "broadcast_async_": lambda name: hvd.synchronize(hvd.broadcast_async_(own.copy(), 1, name)),
        "allgather": lambda name: hvd.allgather(own[: rank + 3], name),
        "allgather of nothing": lambda name: hvd.allgather(own[:0], name),
        "alltoall": lambda name: hvd.alltoall(own[:4], name=name),
    }


def reductions_of(own: Any) -> dict[str, Callable[[str], Any]]:
    return {
        "allreduce": lambda name: hvd.allreduce(own, name=name, op=hvd.Sum),
        "allreduce_": lambda name: hvd.allreduce_(own.copy(), name=name, op=hvd.Sum),
        "allreduce_async": lambda name: hvd.synchronize(hvd.allreduce_async(own, name=name, op=hvd.Sum)),
        "allreduce_async_": lambda name: hvd.synchronize(hvd.allreduce_async_(own.copy(), name=name, op=hvd.Sum)),
        "scalar": lambda name: hvd.allreduce(own[1, 1:2].reshape(()), name=name, op=hvd.Sum),
        "reducescatter": lambda name: hvd.reducescatter(own, name, hvd.Sum),
        "reducescatter_async": lambda name: hvd.synchronize(hvd.reducescatter_async(own, name, hvd.Sum)),
        "group": lambda name: hvd.grouped_allreduce([own, own], name=name, op=hvd.Sum)[1],
        "group in place": lambda name: hvd.grouped_allreduce_([own.copy(), own.copy()], name=name, op=hvd.Sum)[1],
    }


def both_ways() -> None:
    lonely = hvd.ProcessSet([0])
    hvd.init(process_sets=[lonely])
    rank = hvd.rank()
    for dtype in (*MAIN, np.bool_, np.uint64, np.complex64, ml_dtypes.float8_e5m2):
        own, kind = values(dtype, (5, 3), rank), np.dtype(dtype).name
        reductions = {} if dtype is ml_dtypes.float8_e5m2 else reductions_of(own)
        for form, call in (forms_of(own, rank) | reductions).items():
            name = f"{form}.{kind}"
            short, long = call(name), call(Text(name))
            assert type(short) is np.ndarray and short.dtype == long.dtype and short.flags.writeable, name
            check(short, long, name)
    # One that is not a member of a set is told so.
    for name in ("lonely", Text("lonely")):
        if rank == 0:
            assert hvd.reducescatter(np.ones(5), name, hvd.Sum, lonely).shape == (5,)
        else:
            for refused in (hvd.reducescatter, hvd.allgather, hvd.allreduce_):
                with pytest.raises(ValueError, match="not a member"):
                    refused(np.ones(5), name=name, process_set=lonely)
    hvd.barrier()


def test_both_ways_give_the_same() -> None:
    run_ranks(2, both_ways)


def references_are_balanced() -> None:
    hvd.init()
    array, dtype = np.ones((4, 3), np.float32), np.dtype(np.float32)

    def refused() -> None:
        for function in (hvd.allreduce_, hvd.allreduce, hvd.reducescatter):
            with pytest.raises(ValueError, match="not a number"):
                function(array, name="r", op=hvd.Sum, prescale_factor=float("nan"))
        with pytest.raises(ValueError, match="not a number"):
            hvd.grouped_allreduce([array, array], name="r", op=hvd.Sum, prescale_factor=float("nan"))

    def left_alone() -> None:
        handle = hvd.allreduce_async(array, name="left alone")
        wait_until(lambda: hvd.poll(handle), "the end of it", 20)
        _core.forget(handle)

    uses: dict[str, Callable[[], Any]] = {
        "run": lambda: [hvd.allreduce_(array, name="a"), hvd.allreduce(array, name="b"), hvd.allgather(array, "c")],
        "more": lambda: [hvd.reducescatter(array, "d"), hvd.alltoall(array, name="e"), hvd.broadcast(array, 0, "f")],
        "submit": lambda: hvd.synchronize(hvd.allreduce_async(array, name="g")),
        "group": lambda: hvd.grouped_allreduce([array, array], name="h"),
        "group in place": lambda: hvd.grouped_allreduce_([array, array.copy()], name="i"),
        "group that is not plain": lambda: hvd.grouped_allreduce([array, array[:, :2]], name="j"),
        "refused": refused,
        "left alone": left_alone,
    }
    check_balanced(uses, [array, dtype], hvd.barrier)


def test_references_are_given_back() -> None:
    run_ranks(2, references_are_balanced)
