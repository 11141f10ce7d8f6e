"""What waiting costs: the processor time of ranks that wait in a small allreduce for one that is late."""

import time

import numpy as np
from measure import Gate, cpu_seconds
from peers import Peer
from subject import ALLREDUCE


def cpu_of_waiting(peer: Peer, gate: Gate, late: bool, seconds: float) -> float:
    """The seconds of processor time (user and system, all threads) that this rank needs. Every rank calls it."""
    array = np.ones(1, np.float32)
    allreduce = peer.bind(ALLREDUCE, array, array, "waiting")
    allreduce()
    gate.wait()
    before = cpu_seconds()
    if late:
        time.sleep(seconds)
    allreduce()
    return cpu_seconds() - before
