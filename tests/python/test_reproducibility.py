"""The same inputs give the same bits, whatever was fused with what, whoever came first and in which order."""

import hashlib
import random
import time

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks
from sweeps import values

import horovod.numpy as hvd

JOBS = [
    {"HOROVOD_FUSION_THRESHOLD": "0"},
    {"HOROVOD_FUSION_THRESHOLD": "4096"},
    {"HOROVOD_FUSION_THRESHOLD": "300000"},
    {"HOROVOD_CACHE_CAPACITY": "0"},
    {"HOROVOD_CACHE_CAPACITY": "8"},
]
RUNS = 20  # of each job
# Around the thresholds between the algorithms; sums of these depend on the order of their terms.
SIZES = [1, 7, 28, 57, 500, 3001, 40_000, 131_077]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def runs(job: int) -> list[str]:
    """Digests of the results of every run, with delays and orders of this rank's own."""
    hvd.init()
    rank = hvd.rank()
    chance = random.Random(f"{job} {rank}")
    inputs = {
        (op, dtype, size): values(dtype, size, rank)
        for op in (hvd.Sum, hvd.Average, hvd.Adasum)
        for dtype in DTYPES
        for size in (SIZES if op == hvd.Sum else SIZES[::3])
    }
    digests = []
    for _ in range(RUNS):
        order = list(inputs)
        chance.shuffle(order)
        handles = {}
        for case in order:
            op, dtype, size = case
            if chance.random() < 0.02:
                time.sleep(chance.random() * 0.003)
            name = f"{op} {np.dtype(dtype).name} {size}"
            handles[case] = hvd.allreduce_async(inputs[case], op=op, name=name, prescale_factor=0.7)
            if chance.random() < 0.05:
                hvd.poll(handles[case])
        digest = hashlib.sha256()
        for case in inputs:
            digest.update(hvd.synchronize(handles[case]).tobytes())
        digests.append(digest.hexdigest())
    return digests


@pytest.mark.parametrize("hosts", [[3], [1, 1], [2, 1], [2, 2]], ids=str)
def test_100_runs_give_the_same_bits(hosts: list[int]) -> None:
    digests: set[str] = set()
    count = 0
    for job, variables in enumerate(JOBS):
        for result in run_ranks(sum(hosts), runs, job, hosts=hosts, env=variables, timeout=120):
            digests.update(result)
            count += len(result)
    assert count == len(JOBS) * RUNS * sum(hosts)
    assert len(digests) == 1
