"""One collective, on buffers that rotate: what a rank does for it.

There are as many buffers as it takes for all of them together to have the wanted size, which should exceed the last
cache twice; at least two. (Tiny ones can't: their number is limited.) A buffer is checked and rewritten right after its
iteration, so that all others have been through the cache before its next turn.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from peers import Array, Peer, Unsupported
from subject import ALLGATHER, ALLTOALL, BROADCAST, REDUCESCATTER, Subject

_MOST_BUFFERS = 4096
_LEAST_BUFFERS = 2
_OF_ROOT = 5


class Collective:
    """The buffers of a subject, and an action for each way."""

    gated = True

    def __init__(self, subject: Subject, rank: int, peers: dict[str, Peer], footprint: int) -> None:
        """Makes buffers of the first peer's memory for all peers; a peer with memory of its own gets others."""
        self._kind = subject.kind
        ranks = subject.ranks
        dtype = element_type(subject.dtype)
        row = ranks * dtype.itemsize  # whole rows, so that every rank's part is as large
        elements = -(-subject.bytes // row) * ranks if self._splits() else max(1, subject.bytes // dtype.itemsize)
        self._buffers = min(_MOST_BUFFERS, max(_LEAST_BUFFERS, -(-footprint // (elements * dtype.itemsize))))
        part = elements // ranks
        inputs = part if self._kind == ALLGATHER else elements
        outputs = {ALLGATHER: elements, ALLTOALL: elements, REDUCESCATTER: part}.get(self._kind)
        self._own = {ALLGATHER: rank + 1, ALLTOALL: rank + 1, BROADCAST: _OF_ROOT if rank == 0 else 1}.get(
            self._kind, 1
        )
        self._first, self._last = {
            ALLGATHER: (1, ranks),
            ALLTOALL: (1, ranks),
            BROADCAST: (_OF_ROOT, _OF_ROOT),
        }.get(self._kind, (ranks, ranks))
        self._arenas: dict[int, tuple[Array, Array]] = {}
        self._calls: dict[str, list[Callable[[], Array]]] = {}
        self._sources: dict[str, Array] = {}
        for way, peer in peers.items():
            memory = id(peer) if peer.has_own_memory else 0
            if memory not in self._arenas:
                source = peer.allocate((self._buffers, inputs), dtype)
                source[:] = self._own
                target = source if outputs is None else peer.allocate((self._buffers, outputs), dtype)
                self._arenas[memory] = source, target
            source, target = self._arenas[memory]
            name = f"{self._kind}.{subject.bytes}.{subject.dtype}"
            self._sources[way] = source
            self._calls[way] = [peer.bind(self._kind, source[i], target[i], name) for i in range(self._buffers)]
        self._result: Array | None = None

    def _splits(self) -> bool:
        return self._kind in (ALLGATHER, ALLTOALL, REDUCESCATTER)

    def action(self, way: str) -> Callable[[int], None]:
        """What is timed."""
        calls, buffers = self._calls[way], self._buffers

        def act(iteration: int) -> None:
            self._result = calls[iteration % buffers]()

        return act

    def after(self, way: str) -> Callable[[int], None]:
        """Checks the result and rewrites the buffer."""
        source = self._sources[way]

        def check_and_rewrite(iteration: int) -> None:
            result = self._result
            assert result is not None
            if result[0] != self._first or result[-1] != self._last:
                raise RuntimeError(
                    f"{self._kind} by {way}: the result begins with {result[0]} and ends with {result[-1]}; expected "
                    f"{self._first} and {self._last}."
                )
            self._result = None
            source[iteration % self._buffers].fill(self._own)

        return check_and_rewrite


def element_type(name: str) -> "np.dtype[Any]":
    """NumPy's dtype of this name; bfloat16 comes from ml_dtypes.

    Raises:
        Unsupported: Ranks of MPI don't have that.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise Unsupported("no bfloat16 without ml_dtypes") from None
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
