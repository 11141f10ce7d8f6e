"""Timing in one rank: the gate where ranks meet, and the loop around what is timed.

Before and after each iteration all ranks meet at a gate that belongs to none of the peers. The time of an iteration
runs from the moment when the last rank calls until the last rank returns: ranks share a host and therefore a clock.
"""

import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

_LINE_WORDS = 16  # int64 words: two cache lines, so that ranks do not write into each other's
_SLEEP_WHEN_CROWDED = 50e-6
# Ranks that were woken by the same process may begin on the same core. In this time the kernel spreads them.
_SETTLE_NANOSECONDS = 3_000_000


class Gate:
    """Where all ranks of a team wait for each other, by counters in a shared file."""

    def __init__(self, rank: int, size: int, path: Path, progress: Callable[[], object] | None = None) -> None:
        """Joins the gate of the ranks that use this file.

        Args:
            rank: This one.
            size: How many there are.
            path: The file.
            progress: Called while this rank waits. An MPI may leave the rest of a message to its next call, and the
                rank that waits for it would never come to the gate.
        """
        with open(path, "ab") as file:
            file.truncate(size * _LINE_WORDS * 8)  # every rank does; the content stays zero
        shared = np.memmap(path, np.int64, "r+", shape=(size, _LINE_WORDS))
        self._mine = shared[rank]
        self._all = shared[:, 0]
        self._passed = 0
        self._progress = progress
        # Ranks that spin would take the cores from those that still work.
        self._crowded = len(os.sched_getaffinity(0)) < size

    def wait(self) -> None:
        """Returns when all ranks have called it equally often."""
        self._passed += 1
        self._mine[0] = self._passed
        while self._all.min() < self._passed:
            if self._progress is not None:
                self._progress()
            if self._crowded:
                time.sleep(_SLEEP_WHEN_CROWDED)
            else:
                os.sched_yield()


def cpu_seconds() -> float:
    """Processor time of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def time_action(
    action: Callable[[int], None],
    after: Callable[[int], None],
    gate: Gate,
    iterations: range,
    *,
    gated: bool,
    pause: float = 0.0,
) -> tuple[list[int], list[int], float]:
    """Times an action in each of some iterations; every rank calls it with the same ones.

    Args:
        action: What is timed; called with the iteration's number.
        after: Called outside of the timed section after each iteration: checks the result and rewrites the buffers.
        gate: The ranks' gate.
        iterations: Their numbers, which go on counting from round to round, so that buffers rotate.
        gated: Whether the ranks meet before and after each iteration, or before the first only.
        pause: Seconds between two iterations in which nothing is sent, at least.

    Returns:
        The nanoseconds when each iteration began and ended on this rank, and its processor time of an iteration, in
        seconds.
    """
    starts, ends = [], []
    gc.collect()
    gc.disable()
    clock = time.perf_counter_ns
    try:
        gate.wait()
        settled = clock() + _SETTLE_NANOSECONDS
        while clock() < settled:
            pass
        cpu = cpu_seconds()
        for iteration in iterations:
            if pause > 0:
                time.sleep(pause)
            if gated:
                gate.wait()
            start = clock()
            action(iteration)
            end = clock()
            starts.append(start)
            ends.append(end)
            if gated:
                gate.wait()  # what comes after must not take the cores from those that still work
            after(iteration)
        cpu = (cpu_seconds() - cpu) / len(iterations)
    finally:
        gc.enable()
    return starts, ends, cpu
