"""Allgather: the rows of all ranks, one after the other."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sweeps import CHUNK_BYTES, MAIN, MOVED, Array, check, start, values

import horovod.numpy as hvd
from horovod import _core

pytestmark = pytest.mark.usefixtures("transport")

RANKS = [1, 2, 3, 4, 7]


def rows_of(rank: int, case: int) -> int:
    """How many rows a rank sends: other numbers on each, often none."""
    return [rank, 0, 3, 2 * rank + 1, 1 if rank == 0 else 0, 7 - rank][case]


def gather_case(members: Any, dtype: Any, case: int, tail: tuple[int, ...]) -> None:
    inputs = [values(dtype, (rows_of(rank, case), *tail), rank) for rank in members.ranks]
    own = inputs[members.rank()]
    result = hvd.allgather(own, name=f"{np.dtype(dtype).name}.{len(tail)}", process_set=members)
    check(result, np.concatenate(inputs), f"allgather {np.dtype(dtype).name} case {case} {tail} of {members.ranks}")


def sweep(size: int) -> None:
    for members in start(size):
        for dtype in MOVED:
            # Of a type only its width matters; the widths of training are swept.
            for case in range(6) if dtype in MAIN else (3,):
                for tail in ((), (3,), (2, 5), (1000,), (0,), (1, 0, 2)):
                    gather_case(members, dtype, case, tail)
        for width in (CHUNK_BYTES // 4 // 8, CHUNK_BYTES // 4 + 1):  # more than a chunk a rank, and a row
            gather_case(members, np.float32, 3, (width,))
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_allgather(size: int) -> None:
    run_ranks(size, sweep, size, timeout=240)


def forms(size: int) -> None:
    """Ways to call that the sweep does not have."""
    hvd.init()
    rank = hvd.rank()
    assert hvd.allgather([rank]).tolist() == list(range(size))
    # Layouts that are not dense are copied.
    inputs = [values(np.float32, (6, 4), other) for other in range(size)]
    check(hvd.allgather(inputs[rank].T), np.concatenate([array.T for array in inputs]), "transposed")
    # The input is not changed, the result is an ordinary array: writable, of its own memory.
    own = inputs[rank].copy()
    result = hvd.allgather(own, name="own")
    result[:] = 0
    check(own, inputs[rank], "the input")
    # Many at once, waited for in another order; small neighbours run as one batch, whatever their dtype and width.
    handles = []
    for i in range(60):
        dtype = (np.float32, np.int64, np.uint8)[i % 3]
        handles.append(hvd.allgather_async(values(dtype, (rank + i % 4, 1 + i % 5), rank, i), name=f"many{i}"))
    for i in reversed(range(60)):
        dtype = (np.float32, np.int64, np.uint8)[i % 3]
        want = np.concatenate([values(dtype, (other + i % 4, 1 + i % 5), other, i) for other in range(size)])
        check(hvd.synchronize(handles[i]), want, f"many{i}")
    assert hvd.synchronize(handles[0]) is None
    # The same name with other numbers of rows each time.
    for step in range(20):
        result = hvd.allgather(np.full((rank + step) % 4, rank), name="again")
        assert result.tolist() == [other for other in range(size) for _ in range((other + step) % 4)]


@pytest.mark.parametrize(
    "variables",
    [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_CACHE_CAPACITY": "0"}, {"HOROVOD_CACHE_CAPACITY": "8"}],
)
def test_forms(variables: dict[str, str]) -> None:
    run_ranks(3, forms, 3, env=variables)


def two_threads_wait_for_one_handle() -> None:
    """Both get the result: the engine gives it once, the extension keeps it for the other."""
    hvd.init()
    handle = hvd.allgather_async(np.full(5, hvd.rank()), name="x") if hvd.rank() == 0 else 0
    if hvd.rank() == 1:
        hvd.barrier()
        assert hvd.allgather(np.full(5, 1), name="x").tolist() == [0] * 5 + [1] * 5
        return
    results: list[Array] = []
    waiters = [threading.Thread(target=lambda: results.append(hvd.synchronize(handle))) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    hvd.barrier()
    for waiter in waiters:
        waiter.join()
    # The second may also have come after the first had taken it away; then it is told that the handle is unknown.
    arrays = [result for result in results if result is not None]
    assert arrays
    for array in arrays:
        assert array.tolist() == [0] * 5 + [1] * 5


def test_two_threads_wait_for_one_handle() -> None:
    run_ranks(2, two_threads_wait_for_one_handle)


def results_outlive_the_engine() -> tuple[list[Array], list[int]]:
    hvd.init()
    early = hvd.allgather(np.full(3, hvd.rank()))
    ended = hvd.allgather_async(np.full(2, 10 + hvd.rank()))
    while not hvd.poll(ended):
        pass
    hvd.barrier()
    hvd.shutdown()
    late = hvd.synchronize(ended)  # it had ended before
    early += 1
    return [early, late], [int(early.sum()), int(late.sum())]


def test_results_outlive_the_engine() -> None:
    for (early, late), sums in run_ranks(2, results_outlive_the_engine):
        assert early.tolist() == [1, 1, 1, 2, 2, 2]
        assert late.tolist() == [10, 10, 11, 11]
        assert sums == [9, 42]


def memory_use() -> list[int]:
    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    hvd.init()
    own = np.ones((1024, 1024))  # 8 MiB, so 16 gathered
    view = hvd.allgather(own, name="x")[:1]
    before = resident_kib()
    for i in range(20):
        hvd.allgather(own, name="x")
        hvd.synchronize(hvd.allgather_async(own, name="y"))
        _core.forget(hvd.allgather_async(own, name=f"z{i}"))
    hvd.barrier()
    hvd.allgather(own[:1], name="x")
    assert float(view.sum()) == 1024
    gc.collect()
    return [resident_kib() - before]


def test_memory_is_freed_with_the_last_view() -> None:
    # malloc gives such blocks back to the system at once, and does not keep them for a thread's next ones.
    for (more,) in run_ranks(2, memory_use, env={"MALLOC_MMAP_THRESHOLD_": "1000000"}):
        assert more < 48 * 1024, f"{more} KiB more after 60 results of 16 MiB"


def mistakes() -> None:
    hvd.init()
    rank = hvd.rank()
    mismatches: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.allgather(1.0, name="scalar"), "Process-set rank zero tried to ALLGATHER a rank-zero tensor"),
        (lambda: hvd.allgather(np.ones((2, 3 + rank)), name="tail"), "Mismatched ALLGATHER tensor shapes"),
        (lambda: hvd.allgather(np.ones((2,) * (1 + rank)), name="dims"), "Mismatched ALLGATHER tensor shapes"),
        (lambda: hvd.allgather(np.ones(2, (np.int32, np.int64)[rank % 2]), name="dtype"), "Mismatched data types"),
    ]
    for call, words in mismatches:
        for _ in range(2):
            with pytest.raises(hvd.HorovodMismatchError, match=words):
                call()
    # One rank has a scalar, the others have not.
    with pytest.raises(hvd.HorovodMismatchError):
        hvd.allgather(1.0 if rank == 1 else [1.0], name="scalar on one")
    for array in (np.array(["a"]), np.array([None]), np.ones(2, ">f4")):
        with pytest.raises(ValueError, match=r"^Tensor type .* is not supported\."):
            hvd.allgather(array)
    # After an error the same name works, also where it worked before.
    assert hvd.allgather([rank], name="dtype").tolist() == list(range(hvd.size()))
    assert hvd.allgather([rank], name="tail").tolist() == list(range(hvd.size()))
    with pytest.raises(hvd.HorovodMismatchError):
        hvd.allgather(np.ones((1, 1 + rank)), name="tail")
    assert hvd.allgather([rank]).tolist() == list(range(hvd.size()))


def test_mistakes() -> None:
    run_ranks(2, mistakes)
    run_ranks(3, mistakes)
