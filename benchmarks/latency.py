"""Blocking allreduce in place of float32, by size.

Buffers rotate: as many as it takes for all of them together to exceed the last cache twice, at least four. (Tiny ones
can't: their number is limited.) A buffer is checked and rewritten right after its iteration, so that all others have
been through the cache before its next turn.
"""

from typing import Any

import numpy as np
from measure import Gate, time_actions
from peers import Peer
from summary import Comparison, Subject, compare

_FOOTPRINT_BYTES = 64 << 20
_MOST_BUFFERS = 4096
_LEAST_BUFFERS = 4


def iterations_of(size_bytes: int) -> int:
    """How many iterations a round has: fewer of the long ones."""
    for limit, iterations in ((64 << 10, 200), (1 << 20, 50), (16 << 20, 10)):
        if size_bytes <= limit:
            return iterations
    return 4


def measure_size(peers: list[Peer], gate: Gate, ranks: int, size_bytes: int, rounds: int) -> list[Comparison]:
    """Compares the first peer, horovod, with each other one at one size. Every rank calls it.

    Raises:
        RuntimeError: A peer's result is wrong.
    """
    buffers = min(_MOST_BUFFERS, max(_LEAST_BUFFERS, -(-_FOOTPRINT_BYTES // size_bytes)))
    arena = np.ones((buffers, size_bytes // 4), np.float32)
    views: list[list[Any]] = [[peer.view(array) for array in arena] for peer in peers]
    name = f"latency.{size_bytes}"

    def action_of(index: int) -> Any:
        allreduce, mine = peers[index].allreduce, views[index]
        return lambda iteration: allreduce(mine[iteration % buffers], name)

    def check_and_rewrite(iteration: int) -> None:
        array = arena[iteration % buffers]
        if array[0] != ranks or array[-1] != ranks:
            raise RuntimeError(f"Allreduce of {size_bytes} bytes gave {array[0]} and {array[-1]}, expected {ranks}.")
        array.fill(1)

    actions = [action_of(index) for index in range(len(peers))]
    seconds = time_actions(actions, check_and_rewrite, gate, rounds, iterations_of(size_bytes))
    what = Subject("allreduce", ranks, size_bytes)
    return [compare(what, seconds[0], peers[index].name, seconds[index]) for index in range(1, len(peers))]
