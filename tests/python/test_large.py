"""More elements than 32 bits can count."""

from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd

COUNT = 2**31 + 12_345
GIB = 2**30


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def reduce_many() -> list[int]:
    hvd.init()
    array = np.full(COUNT, 1 + hvd.rank(), np.uint8)
    array[-1] = 100
    assert hvd.allreduce_(array, op=hvd.Sum, name="large") is array
    places = [0, 2**31 - 1, 2**31, 2**31 + 1, COUNT - 2, COUNT - 1]
    found = [int(array[place]) for place in places]
    # 3 everywhere but at the end; counted in parts, so that no second array of that size is needed.
    wrong = sum(int(np.count_nonzero(array[start : start + 2**26] != 3)) for start in range(0, COUNT, 2**26))
    return [*found, wrong]


@pytest.mark.skipif(available_bytes() < 8 * GIB, reason="needs 8 GiB of free memory")
def test_more_than_2_to_the_31_elements() -> None:
    assert run_ranks(2, reduce_many, timeout=180) == [[3, 3, 3, 3, 3, 200, 1]] * 2
