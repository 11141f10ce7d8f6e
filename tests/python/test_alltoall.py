"""Alltoall: some rows to every rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sweeps import CHUNK_BYTES, MAIN, MOVED, Array, check, start, values

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")

RANKS = [1, 2, 3, 4, 7]


def split_table(count: int, seed: int, most: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """How many rows each member sends to each: the same table on all ranks."""
    return np.random.default_rng(seed).integers(0, most, (count, count))


def part(array: Array, splits: Any, to: int) -> Array:
    first = int(np.sum(splits[:to]))
    return array[first : first + int(splits[to])]


def exchange_case(
    members: Any, dtype: Any, seed: int, tail: tuple[int, ...], *, most: int = 4, unsent: int = 0
) -> None:
    table = split_table(len(members.ranks), seed, most)
    inputs = [
        values(dtype, (int(splits.sum()) + unsent, *tail), rank)
        for splits, rank in zip(table, members.ranks, strict=True)
    ]
    me = members.rank()
    what = f"alltoall {np.dtype(dtype).name} {tail} by {table.tolist()} of {members.ranks}"
    name = f"{np.dtype(dtype).name}.{len(tail)}"
    result, received = hvd.alltoall(inputs[me], splits=table[me], name=name, process_set=members)
    assert received.tolist() == table[:, me].tolist(), what
    check(result, np.concatenate([part(a, s, me) for a, s in zip(inputs, table, strict=True)]), what)


def sweep(size: int) -> None:
    for members in start(size):
        count = len(members.ranks or ())
        for dtype in MOVED:
            # Of a type only its width matters; the widths of training are swept.
            for tail in ((), (3,), (2, 5), (0,)) if dtype in MAIN else ((3,),):
                for seed in range(3):
                    exchange_case(members, dtype, seed, tail)
                exchange_case(members, dtype, 3, tail, unsent=2)
                exchange_case(members, dtype, 4, tail, most=1)  # no rows at all
                # Equal parts.
                inputs = [values(dtype, (2 * count, *tail), rank) for rank in members.ranks or ()]
                me = members.rank() or 0
                result = hvd.alltoall(inputs[me], name="equal", process_set=members)
                check(np.asarray(result), np.concatenate([a[2 * me : 2 * me + 2] for a in inputs]), "equal parts")
        for width in (CHUNK_BYTES // 4 // 8, CHUNK_BYTES // 4 + 1):
            exchange_case(members, np.float32, 5, (width,))
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_alltoall(size: int) -> None:
    run_ranks(size, sweep, size, timeout=240)


def forms(size: int) -> None:
    hvd.init()
    rank = hvd.rank()
    # Back and forth: what was received is what has to be sent back.
    table = split_table(size, 9, 5)
    own = values(np.float64, (int(table[rank].sum()), 3), rank)
    there, received = hvd.alltoall(own, splits=table[rank])
    back, again = hvd.alltoall(there, splits=received)
    check(back, own, "back again")
    assert again.tolist() == table[rank].tolist()
    # Splits as list, tuple and array of any integer type.
    for splits in ([1] * size, (1,) * size, np.ones(size, np.int32), np.ones(size, np.uint8)):
        result, received = hvd.alltoall(np.full(size, rank), splits)
        assert result.tolist() == list(range(size))
        assert received.tolist() == [1] * size
    assert hvd.alltoall([[rank]] * size).tolist() == [[other] for other in range(size)]  # type: ignore[union-attr]
    # Everything to one rank.
    splits = [0] * (size - 1) + [2]
    result, received = hvd.alltoall(np.full(2, rank), splits, name="to the last")
    assert result.tolist() == ([other for other in range(size) for _ in range(2)] if rank == size - 1 else [])
    # Handles.
    handles = [hvd.alltoall_async(np.full(size, rank + i), name=f"async{i}") for i in range(30)]
    with_splits = hvd.alltoall_async(np.full(size, rank), [1] * size)
    for i in reversed(range(30)):
        assert hvd.synchronize(handles[i]).tolist() == [other + i for other in range(size)]
    result, received = hvd.synchronize(with_splits)
    assert result.tolist() == list(range(size))
    assert received.tolist() == [1] * size


@pytest.mark.parametrize("variables", [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_CACHE_CAPACITY": "0"}])
def test_forms(variables: dict[str, str]) -> None:
    run_ranks(3, forms, 3, env=variables)


def mistakes() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for splits in ([1] * (size - 1), [1] * (size + 1), [size + 1] + [0] * (size - 1), [-1] + [1] * (size - 1)):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(np.ones(size), splits, name="splits")
    for wrong in ([], 3, [[1] * size], [0.5] * size, ["1"] * size):
        with pytest.raises(ValueError, match="splits must be one-dimensional integers"):
            hvd.alltoall(np.ones(size), wrong, name="splits")
    with pytest.raises(ValueError, match="divisible"):
        hvd.alltoall(np.ones(size + 1), name="indivisible")
    mismatches: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.alltoall(1.0, name="scalar"), "Process-set rank zero tried to ALLTOALL a rank-zero tensor"),
        (lambda: hvd.alltoall(np.ones((size, 3 + rank)), name="tail"), "Mismatched ALLTOALL tensor shapes"),
        (lambda: hvd.alltoall(np.ones(size, ("f4", "f8")[rank % 2]), name="dtype"), "Mismatched data types"),
    ]
    for call, words in mismatches:
        with pytest.raises(hvd.HorovodMismatchError, match=words):
            call()
    with pytest.raises(ValueError, match=r"^Tensor type .* is not supported\."):
        hvd.alltoall(np.array(["a"] * size))
    assert hvd.alltoall(np.full(size, rank), name="tail").tolist() == list(range(size))  # type: ignore[union-attr]


def test_mistakes() -> None:
    run_ranks(2, mistakes)
    run_ranks(3, mistakes)
