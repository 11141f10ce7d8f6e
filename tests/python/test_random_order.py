"""Ranks submit in any order, from several threads, and every operation still finds its own."""

import random
import threading

import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")


def submit_shuffled(rounds: int, tensors: int, threads: int, seed: int) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    failures: list[str] = []

    def work(thread: int) -> None:
        # Every rank shuffles in its own way; threads hold disjoint names.
        shuffle = random.Random(f"{seed} {rank} {thread}")
        for round_ in range(rounds):
            order = list(range(tensors))
            shuffle.shuffle(order)
            arrays = {i: np.full(1 + 37 * i, float(rank + i + round_), np.float32) for i in order}
            handles = {}
            for i in order:
                handles[i] = hvd.allreduce_async_(arrays[i], name=f"t{thread}.{i}", op=hvd.Sum)
            shuffle.shuffle(order)
            for i in order:
                hvd.synchronize(handles[i])
                want = sum(other + i + round_ for other in range(size))
                if not (arrays[i] == want).all():
                    failures.append(f"thread {thread} round {round_} tensor {i}: {arrays[i][:3]}, expected {want}")

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[:3]


@pytest.mark.parametrize(("size", "threads"), [(2, 1), (3, 4), (5, 3)])
def test_random_order(size: int, threads: int) -> None:
    run_ranks(size, submit_shuffled, 10, 20, threads, 1234, timeout=180)


@pytest.mark.parametrize(
    "variables", [{"HOROVOD_CACHE_CAPACITY": "0"}, {"HOROVOD_CACHE_CAPACITY": "8"}, {"HOROVOD_FUSION_THRESHOLD": "0"}]
)
def test_random_order_without_cache_or_fusion(variables: dict[str, str]) -> None:
    run_ranks(3, submit_shuffled, 6, 20, 2, 99, env=variables, timeout=180)


def mixed(rounds: int) -> None:
    """Blocking calls of threads while another thread has operations of other kinds under way."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    rank, size = hvd.rank(), hvd.size()
    failures: list[str] = []

    def blocking(thread: int) -> None:
        for i in range(rounds):
            result = hvd.allreduce([float(i)], name=f"blocking{thread}", op=hvd.Sum)
            if result[0] != i * size:
                failures.append(f"blocking {thread} {i}: {result}")

    def broadcasting() -> None:
        for i in range(rounds):
            result = hvd.broadcast(np.full(1000, rank + i), i % size, name="broadcasting")
            if not (result == i % size + i).all():
                failures.append(f"broadcasting {i}: {result[:3]}")

    def in_the_set() -> None:
        for i in range(rounds if pair.included() else 0):
            result = hvd.allreduce([float(rank + i)], name="in the set", op=hvd.Max, process_set=pair)
            if result[0] != 1 + i:
                failures.append(f"set {i}: {result}")

    workers = [threading.Thread(target=blocking, args=(thread,)) for thread in range(2)]
    workers += [threading.Thread(target=broadcasting), threading.Thread(target=in_the_set)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[:3]


def test_blocking_calls_of_several_threads() -> None:
    run_ranks(3, mixed, 100, timeout=180)
