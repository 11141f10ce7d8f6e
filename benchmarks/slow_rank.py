"""What waiting costs: the processor time of ranks that wait in a small allreduce for one that is late."""

import resource
import time

import numpy as np
from measure import Gate
from peers import Peer
from summary import Waiting

import horovod.numpy as hvd


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_waiting(peer: Peer, gate: Gate, rank: int, ranks: int, seconds: float) -> Waiting:
    """Lets the last rank come late by so many seconds. Every rank calls it."""
    view = peer.view(np.ones(1, np.float32))
    peer.allreduce(view, "waiting")
    gate.wait()
    before = _cpu_seconds()
    late = rank == ranks - 1
    if late:
        time.sleep(seconds)
    peer.allreduce(view, "waiting")
    burnt = _cpu_seconds() - before
    waiting = [spent for is_late, spent in hvd.allgather_object((late, burnt)) if not is_late]
    return Waiting(peer.name, ranks, seconds, max(waiting))
