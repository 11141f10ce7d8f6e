"""What leaves a host: the bytes of an allreduce, and the messages of a repeated step, asserted by counters."""

from typing import Any

import numpy as np
import pytest
from ranks import host_of, run_ranks

import horovod.numpy as hvd
from horovod import _core

PAYLOAD = 12 << 20
CONTROL = {"HOROVOD_FUSION_THRESHOLD": str(1 << 20)}


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
