"""Fair timing of several peers in the same processes.

An *action* is what is timed, once an *iteration*, on all ranks together. A *round* is some iterations of one action.
Rounds alternate between the actions (A B, B A, A B, ...), so that the machine's noise hits all of them alike.

Before each iteration all ranks meet at a gate that belongs to none of the peers. The time of an iteration runs from the
moment when the last rank calls until the last rank returns. Ranks share a host and therefore a clock.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import horovod.numpy as hvd

Seconds = NDArray[np.float64]

_LINE_WORDS = 16  # int64 words: two cache lines, so that ranks do not write into each other's
_SLEEP_WHEN_CROWDED = 50e-6


class Gate:
    """Where all ranks of a host wait for each other, by counters in a shared file."""

    def __init__(self, rank: int, size: int, scratch: Path) -> None:
        """Joins the gate of the ranks that use this scratch directory."""
        path = scratch / "gate"
        with open(path, "ab") as file:
            file.truncate(size * _LINE_WORDS * 8)  # every rank does; the content stays zero
        shared = np.memmap(path, np.int64, "r+", shape=(size, _LINE_WORDS))
        self._mine = shared[rank]
        self._all = shared[:, 0]
        self._passed = 0
        # Ranks that spin would take the cores from those that still work.
        self._crowded = len(os.sched_getaffinity(0)) < size

    def wait(self) -> None:
        """Returns when all ranks have called it equally often."""
        self._passed += 1
        self._mine[0] = self._passed
        while self._all.min() < self._passed:
            if self._crowded:
                time.sleep(_SLEEP_WHEN_CROWDED)
            else:
                os.sched_yield()


def time_actions(
    actions: Sequence[Callable[[int], None]],
    after: Callable[[int], None],
    gate: Gate,
    rounds: int,
    iterations: int,
) -> Seconds:
    """Times actions in alternating rounds; every rank calls it with the same arguments.

    Args:
        actions: What is timed. Each is called with the number of the iteration, which counts through all actions.
        after: Called outside of the timed section after each iteration: checks the result and rewrites the buffers.
        gate: The ranks' gate.
        rounds: Timed rounds of each action; one more comes before, untimed.
        iterations: Iterations of a round.

    Returns:
        The seconds of each action, round and iteration, the same on all ranks.
    """
    starts = np.zeros((len(actions), rounds, iterations), np.int64)
    ends = np.zeros_like(starts)
    iteration = 0
    gc.collect()
    gc.disable()
    try:
        for turn in range(-1, rounds):
            order = range(len(actions)) if turn % 2 == 0 else reversed(range(len(actions)))
            for a in order:
                action = actions[a]
                for i in range(iterations):
                    gate.wait()
                    start = time.perf_counter_ns()
                    action(iteration)
                    end = time.perf_counter_ns()
                    if turn >= 0:
                        starts[a, turn, i], ends[a, turn, i] = start, end
                    after(iteration)
                    iteration += 1
    finally:
        gc.enable()
    gathered = hvd.allgather_object((starts, ends))
    last_start = np.max([start for start, _ in gathered], axis=0)
    last_end = np.max([end for _, end in gathered], axis=0)
    seconds: Seconds = (last_end - last_start) * 1e-9
    return seconds
