"""Arrays on shared memory: reduced where they lie, and theirs to keep."""

import gc
import os

import numpy as np
import pytest
from ranks import run_ranks

COUNT = 1_000_003


def _reduce_in_shared_memory(shared_ranks: tuple[int, ...]) -> tuple[int, bool]:
    import horovod.numpy as hvd
    from horovod import _core

    hvd.init()
    array = hvd.zeros(COUNT, np.float32) if hvd.rank() in shared_ranks else np.zeros(COUNT, np.float32)
    assert not array.any()
    for _ in range(3):
        array[:] = np.arange(COUNT) % 1000 + hvd.rank()
        assert hvd.allreduce_(array, op=hvd.Sum, name="x") is array
    ranks = np.arange(hvd.size()).sum()
    right = bool((array == (np.arange(COUNT) % 1000) * hvd.size() + ranks).all())
    placed = _core.counters()["bytes_placed"]
    hvd.barrier()
    hvd.shutdown()
    array += 1  # still ours
    return placed, right


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_arrays_are_reduced_without_copying_them_in(size: int) -> None:
    results = run_ranks(size, _reduce_in_shared_memory, tuple(range(size)))
    assert results == [(3 * COUNT * 4, True)] * size


def test_one_array_elsewhere_makes_all_ranks_copy() -> None:
    assert run_ranks(3, _reduce_in_shared_memory, (0, 2)) == [(0, True)] * 3


def _allocate_and_drop() -> list[int]:
    import horovod.numpy as hvd

    def shared_kib() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss_Shmem"))

    before = shared_kib()
    array = hvd.zeros((1024, 1024), np.float64)
    array[:] = 1
    view = array[10:20]
    del array
    gc.collect()
    held = shared_kib()
    assert view.sum() == 10 * 1024
    del view
    gc.collect()
    return [held - before, shared_kib() - before]


def test_memory_goes_back_to_the_system_with_the_last_view() -> None:
    ((held, after),) = run_ranks(1, _allocate_and_drop)
    assert held >= 8 * 1024
    assert after < 1024


def test_more_than_there_is_is_a_memory_error() -> None:
    import horovod.numpy as hvd

    with pytest.raises(MemoryError, match="shared pages"):
        hvd.zeros(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2, np.uint8)
