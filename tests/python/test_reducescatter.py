"""Reducescatter: every rank gets its rows of the reduction."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sweeps import CHUNK_BYTES, MAIN, REDUCED, SUMS, check, expected, ops_for, own_rows, start, values

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")

RANKS = [1, 2, 3, 4, 7]


def scatter_case(members: Any, dtype: Any, shape: tuple[int, ...], op: int, scale: float = 1.0) -> None:
    inputs = [values(dtype, shape, rank) for rank in members.ranks]
    own = inputs[members.rank()].copy()
    what = f"reducescatter {np.dtype(dtype).name} {shape} op {op} scale {scale} of {members.ranks}"
    name = f"{np.dtype(dtype).name}.{len(shape)}"
    result = hvd.reducescatter(
        own, name=name, op=op, process_set=members, prescale_factor=scale, postscale_factor=1 / scale
    )
    parts = [own_rows(array, members.rank(), len(members.ranks)) for array in inputs]
    check(result, expected(parts, op, scale, 1 / scale, ranks=members.ranks), what)
    check(own, inputs[members.rank()], what + ": the input")


def sweep(size: int) -> None:
    for members in start(size):
        count = len(members.ranks or ())
        for dtype in REDUCED:
            ops = [op for op in SUMS if op in ops_for(dtype)]  # innermost: their inputs are drawn once
            tails = ((), (3,), (2, 5), (0,)) if dtype in MAIN else ((3,),)
            for rows, tail in itertools.product((0, 1, count - 1, count, count + 1, 2 * count, 5 * count - 1), tails):
                for op in ops:
                    scatter_case(members, dtype, (rows, *tail), op)
            for op in ops:
                scatter_case(members, dtype, (1001, 7), op)
            if dtype is not np.bool_:
                for scale, op in itertools.product((0.5, 3.0), ops):
                    scatter_case(members, dtype, (31, 3), op, scale)
        for rows in (count, 2 * count - 1):  # several chunks
            scatter_case(members, np.float32, (rows, CHUNK_BYTES // 4 + 1), hvd.Sum)
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_reducescatter(size: int) -> None:
    run_ranks(size, sweep, size, timeout=240)


def forms(size: int) -> None:
    hvd.init()
    rank = hvd.rank()
    assert hvd.reducescatter([float(rank)] * size).tolist() == [(size - 1) / 2]  # Average unless told otherwise
    inputs = [values(np.float32, (5, 8), other) for other in range(size)]
    want = own_rows(expected([array.T for array in inputs], hvd.Sum), rank, size)
    check(hvd.reducescatter(inputs[rank].T, op=hvd.Sum), want, "transposed")
    handles = [hvd.reducescatter_async(np.full(size + i, rank), name=f"many{i}", op=hvd.Sum) for i in range(40)]
    for i in reversed(range(40)):
        total = np.full(size + i, size * (size - 1) // 2)
        check(hvd.synchronize(handles[i]), own_rows(total, rank, size), f"many{i}")
    # The other way round by allgather.
    scattered = hvd.reducescatter(inputs[rank], op=hvd.Sum)
    check(hvd.allgather(scattered), expected(inputs, hvd.Sum), "gathered again")


@pytest.mark.parametrize("variables", [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_CACHE_CAPACITY": "0"}])
def test_forms(variables: dict[str, str]) -> None:
    run_ranks(3, forms, 3, env=variables)


def mistakes() -> None:
    hvd.init()
    rank = hvd.rank()
    with pytest.raises(ValueError, match="Reducescatter does not support scalar inputs"):
        hvd.reducescatter(1.0, name="scalar")
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(hvd.HorovodInternalError, match=r"^Reducescatter currently only supports AVERAGE and SUM\."):
            hvd.reducescatter([1.0, 2.0], name="op", op=op)
    with pytest.raises(ValueError, match="not supported for bool"):
        hvd.reducescatter(np.ones(4, np.bool_), name="bool", op=hvd.Average)
    with pytest.raises(ValueError):
        hvd.reducescatter(np.ones(3), process_set=hvd.ProcessSet([0]))
    mismatches: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.reducescatter(np.ones((2, 3 + rank)), name="tail"), "Mismatched REDUCESCATTER tensor shapes"),
        (lambda: hvd.reducescatter(np.ones(2 + rank), name="rows"), "Mismatched REDUCESCATTER tensor shapes"),
        (lambda: hvd.reducescatter(np.ones(2, ("f4", "f8")[rank % 2]), name="dtype"), "Mismatched data types"),
        (lambda: hvd.reducescatter(np.ones(2), name="op", op=SUMS[rank % 2]), "Mismatched reduction operation"),
        (
            lambda: hvd.reducescatter(np.ones(2), name="factor", prescale_factor=1.0 + rank),
            "Mismatched prescale and/or postscale factors",
        ),
    ]
    for call, words in mismatches:
        with pytest.raises(hvd.HorovodMismatchError, match=words):
            call()
    assert hvd.reducescatter(np.ones(hvd.size()), name="rows", op=hvd.Sum).tolist() == [hvd.size()]


def test_mistakes() -> None:
    run_ranks(2, mistakes)
    run_ranks(3, mistakes)
