"""What leaves a host: the bytes of an allreduce, and the messages of a repeated step, asserted by counters."""

import statistics
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd
from horovod import _core

PAYLOAD = 12 << 20
TENSORS, STEPS = 100, 15


def by_host(counts: list[int], hosts: list[int]) -> list[int]:
    """What the ranks of each host have counted together."""
    ends = np.cumsum(hosts)
    return [sum(counts[end - count : end]) for end, count in zip(ends, hosts, strict=True)]


def sent(counter: str, action: Any) -> int:
    """By how much an action raises a counter of this rank; barriers keep other traffic out of it."""
    hvd.barrier()
    before = _core.counters()[counter]
    action()
    return int(_core.counters()[counter] - before)


def reduce_payload(pieces: int) -> int:
    hvd.init()
    arrays = [np.full(PAYLOAD // 4 // pieces, hvd.rank() + 1.0, np.float32) for _ in range(pieces)]
    bytes_out = sent("net_bytes_out", lambda: hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="payload"))
    total = hvd.size() * (hvd.size() + 1) / 2
    assert all((array == total).all() for array in arrays)
    return bytes_out


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [3, 1], [1, 1, 1], [2, 1, 2], [1, 2, 1, 1]], ids=str)
@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_an_allreduce_sends_no_more_than_it_must_out_of_any_host(hosts: list[int], algorithm: str) -> None:
    counts = run_ranks(sum(hosts), reduce_payload, 3, hosts=hosts, env={"HOROVOD_ALLREDUCE": algorithm})
    least = 2 * (len(hosts) - 1) / len(hosts) * PAYLOAD
    for host, count in enumerate(by_host(counts, hosts)):
        assert least * 0.5 < count <= least * 1.05, f"host {host} sent {count / PAYLOAD:.3f} of the payload: {counts}"


def repeat_step() -> float:
    """The control records that this rank sends in a step whose tensors all ranks know: those of the usual step."""
    hvd.init()
    records = []
    for step in range(STEPS + 2):
        hvd.barrier()
        before = _core.counters()["control_records"]
        handles = [
            hvd.allreduce_async(np.full(10, hvd.rank()), op=hvd.Sum, name=f"gradient {i}") for i in range(TENSORS)
        ]
        for handle in handles:
            assert hvd.synchronize(handle)[0] == hvd.size() * (hvd.size() - 1) // 2
        if step >= 2:  # the first defines the names, the second may learn
            records.append(_core.counters()["control_records"] - before)
    return statistics.median(records)


@pytest.mark.parametrize("hosts", [[1, 1], [3, 3], [2, 1, 2], [1, 2, 1, 1]], ids=str)
def test_the_messages_of_a_repeated_step_grow_with_hosts_not_with_ranks_and_tensors(hosts: list[int]) -> None:
    leaders = [sum(hosts[:host]) for host in range(len(hosts))]
    for rank, records in enumerate(run_ranks(sum(hosts), repeat_step, hosts=hosts)):
        # One record would do. Who is interrupted while it submits sends another; a host has to do so ten times.
        peers = 0 if rank not in leaders else len(hosts) - 1 if rank == 0 else 1
        assert records <= 10 * peers, f"rank {rank} sends {records} records a step"


def repeat_alone() -> tuple[int, int]:
    """Of 200 blocking allreduces of a name: how many needed no agreement, and the control records of this rank."""
    hvd.init()
    for step in range(240):
        if step == 40:  # by now it stands
            before = _core.counters()
        total = hvd.allreduce(np.full(10, hvd.rank() + step), op=hvd.Sum, name="metric")
        assert (total == hvd.size() * (hvd.size() - 1) // 2 + hvd.size() * step).all()
    after = _core.counters()
    standing, records = (int(after[name] - before[name]) for name in ("requests_standing", "control_records"))
    return standing, records


@pytest.mark.parametrize("hosts", [[1, 1], [1, 1, 1], [3], [2, 2]], ids=str)
def test_a_small_allreduce_that_is_repeated_alone_needs_no_agreement(hosts: list[int]) -> None:
    for standing, records in run_ranks(sum(hosts), repeat_alone, hosts=hosts):
        # Who is stopped for seconds in between ends the order; heartbeats are records too.
        assert standing >= 150
        assert records < 100
