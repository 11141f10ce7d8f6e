"""Allreduce, broadcast and barrier: every dtype, sizes around every threshold, process sets; one group per sweep."""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sweeps import (
    CHUNK_BYTES,
    LARGE_BYTES,
    MAIN,
    MOVED,
    REDUCED,
    check,
    expected,
    ops_for,
    sizes_for,
    start,
    values,
)

import horovod.numpy as hvd
from horovod.common.process_sets import ProcessSet

pytestmark = pytest.mark.usefixtures("transport")

RANKS = [1, 2, 3, 4, 7]
SWEEP_SECONDS = 240


# Of all results, by the ranks that should have the same ones.
Digests = dict[tuple[int, ...], str]


class Reductions:
    """Cases of allreduce, whose results one member compares with NumPy's and all members compare with each other's."""

    def __init__(self) -> None:
        self._cases: Counter[tuple[int, ...]] = Counter()
        self._digests: dict[tuple[int, ...], hashlib._Hash] = {}

    def check(self, members: ProcessSet, dtype: Any, shape: Any, *, op: int, name: str, scale: float = 1.0) -> None:
        ranks = tuple(members.ranks or ())
        own = values(dtype, shape, hvd.rank())
        result = hvd.allreduce(
            own, op=op, name=name, prescale_factor=scale, postscale_factor=1 / scale, process_set=members
        )
        what = f"allreduce {np.dtype(dtype).name} {shape} op {op} scale {scale} of ranks {list(ranks)}"
        assert np.array_equal(own, values(dtype, shape, hvd.rank())), f"{what}: changed its input"
        self._digests.setdefault(ranks, hashlib.sha256()).update(result.tobytes())
        self._cases[ranks] += 1
        if ranks[self._cases[ranks] % len(ranks)] == hvd.rank():
            inputs = [values(dtype, shape, rank) for rank in ranks]
            check(result, expected(inputs, op, scale, 1 / scale, ranks=ranks), what)

    def digests(self) -> Digests:
        return {ranks: digest.hexdigest() for ranks, digest in self._digests.items()}


def sweep_allreduce(size: int) -> Digests:
    """Every dtype, size, op and set."""
    reductions = Reductions()
    for members in start(size):
        for dtype in REDUCED:
            width = np.dtype(dtype).itemsize
            ops = ops_for(dtype)
            for i, count in enumerate(sizes_for(dtype) if dtype in MAIN else (1, 1001, CHUNK_BYTES // width + 1)):
                # All of them in the global set; in the others one for each size, in turn.
                for op in ops if members is hvd.global_process_set else [ops[i % len(ops)]]:
                    reductions.check(members, dtype, count, op=op, name=f"{np.dtype(dtype).name}.{count}.{op}")
            for count in (0, 5, 30, 5000) if dtype is not np.bool_ else ():
                reductions.check(members, dtype, count, op=hvd.Sum, name="scaled", scale=0.5)
                reductions.check(members, dtype, count, op=hvd.Average, name="scaled average", scale=3.0)
            for nbytes in LARGE_BYTES if members is hvd.global_process_set and dtype in MAIN else ():
                reductions.check(members, dtype, nbytes // width, op=hvd.Sum, name="large")
    hvd.barrier()  # a rank that ends shuts the others down, who may still be busy in their sets
    return reductions.digests()


def check_same_bits(by_rank: list[Digests]) -> None:
    for rank, digests in enumerate(by_rank):
        assert all(rank in ranks for ranks in digests)
        for ranks, digest in digests.items():
            assert digest == by_rank[ranks[0]][ranks], f"ranks {rank} and {ranks[0]} of {ranks}: not the same bits"


@pytest.mark.parametrize("size", RANKS)
def test_allreduce(size: int) -> None:
    check_same_bits(run_ranks(size, sweep_allreduce, size, timeout=SWEEP_SECONDS))


def sweep_broadcast(size: int) -> None:
    for members in start(size):
        assert members.ranks is not None
        for dtype in MOVED:
            large = LARGE_BYTES[1] // np.dtype(dtype).itemsize
            for count in (*sizes_for(dtype), large) if dtype in MAIN else (1, 1001, large):
                root = members.ranks[count % len(members.ranks)]
                own = values(dtype, count, hvd.rank(), seed=1)
                what = f"broadcast {np.dtype(dtype).name} [{count}] from {root} among {members.ranks}"
                result = hvd.broadcast(own, root, name=f"{np.dtype(dtype).name}.{count}", process_set=members)
                check(result, values(dtype, count, root, seed=1), what)
                in_place = own.copy()
                assert hvd.broadcast_(in_place, root, name="in place", process_set=members) is in_place
                check(in_place, result, what + " in place")
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_broadcast(size: int) -> None:
    run_ranks(size, sweep_broadcast, size, timeout=SWEEP_SECONDS)


def forms(size: int) -> Digests:
    """Shapes, layouts and ways to call that the sweep does not have."""
    hvd.init()
    rank = hvd.rank()
    reductions = Reductions()
    for shape in ((), (0,), (1, 0, 3), (2, 3), (4, 1, 5, 2)):
        for dtype in REDUCED:
            reductions.check(hvd.global_process_set, dtype, shape, op=hvd.Sum, name=f"shape{shape}")
    # Python's own numbers and lists.
    assert hvd.allreduce(2, op=hvd.Sum).item() == 2 * size
    assert hvd.allreduce([1.0, 2.0]).tolist() == [1.0, 2.0]
    # Layouts that are not dense are copied, and the result is in C order of the same shape.
    inputs = [values(np.float32, (30, 40), other) for other in range(size)]
    total = expected(inputs, hvd.Sum)
    for name, view in (
        ("transposed", lambda a: a.T),
        ("strided", lambda a: a[::2, ::-3]),
        ("fortran", np.asfortranarray),
    ):
        check(hvd.allreduce(view(inputs[rank]), op=hvd.Sum, name=name), view(total), name)
    # In place, into a view of a larger array that must keep the rest.
    whole = np.zeros((3, 30, 40), np.float32)
    whole[1] = inputs[rank]
    assert np.shares_memory(hvd.allreduce_(whole[1], op=hvd.Sum, name="middle"), whole)
    check(whole[1], total, "in place")
    assert not whole[0].any()
    assert not whole[2].any()
    # Handles: many at once, waited for in another order than they were started in, each with its own result.
    handles = [hvd.allreduce_async(np.full(i, rank + i), op=hvd.Max, name=f"async{i}") for i in range(50)]
    for i in reversed(range(50)):
        result = hvd.synchronize(handles[i])
        assert result is not None
        assert result.tolist() == [size - 1 + i] * i
    assert hvd.synchronize(handles[0]) is None
    array = np.full(7, float(rank))
    handle = hvd.broadcast_async_(array, size - 1)
    assert hvd.synchronize(handle) is array
    assert array.tolist() == [size - 1.0] * 7
    handle = hvd.broadcast_async(np.full(7, rank), 0)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [0] * 7
    # The deprecated spelling.
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce([1.0], average=False).tolist() == [size]
    return reductions.digests()


@pytest.mark.parametrize("size", [1, 3])
def test_forms(size: int) -> None:
    check_same_bits(run_ranks(size, forms, size, env={"PYTHONWARNINGS": "default"}))


def integer_averages(size: int) -> None:
    hvd.init()
    # The sum is -7 or 7, whatever the rank: -7 / 2 is -3, not -4.
    for total in (-7, 7, -1, 1):
        array = np.array([total if hvd.rank() == 0 else 0], np.int32)
        assert hvd.allreduce(array, name=f"average{total}").item() == int(total / size)


def test_integer_average_is_division_toward_zero() -> None:
    run_ranks(2, integer_averages, 2)
    run_ranks(3, integer_averages, 3)


def barriers(size: int) -> None:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    for _ in range(20):
        hvd.barrier()
    # A barrier passes while an allreduce is pending that not everyone has called.
    pending = hvd.allreduce_async(np.ones(3), name="pending", op=hvd.Sum) if hvd.rank() == 0 else None
    hvd.barrier()
    if pair.included():
        hvd.barrier(pair)
    result = hvd.synchronize(pending) if pending else hvd.allreduce(np.ones(3), name="pending", op=hvd.Sum)
    assert result is not None
    assert result.tolist() == [size] * 3


def test_barrier() -> None:
    run_ranks(3, barriers, 3)


def unnamed_in_sets(size: int) -> list[float]:
    """Ranks that run unnamed operations in a set of their own still match the others afterwards."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if pair.included():
        for _ in range(3):
            hvd.allreduce([1.0], process_set=pair)
    with pytest.raises(ValueError):
        hvd.allreduce_(np.ones((2, 2)).T[:1])  # a local error is not counted
    return [float(hvd.allreduce([float(hvd.rank())], op=hvd.Max)[0]) for _ in range(size)]


def test_unnamed_operations_are_counted_per_set() -> None:
    assert run_ranks(3, unnamed_in_sets, 3) == [[2.0] * 3] * 3
