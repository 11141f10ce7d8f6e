"""What a benchmark needs of a peer. There is one small class for each, in a module that only its ranks import.

All peers work on arrays that the benchmark owns, those of one team on the same memory.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Peer(Protocol):
    """A way to run collectives. All reductions are sums; the root of broadcasts is rank 0."""

    has_own_memory: bool  # whether its arrays are made by itself

    def allocate(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """A new array."""

    def bind(self, kind: str, source: Array, target: Array, name: str) -> Callable[[], Array]:
        """A function that runs a collective and returns an array with its result.

        Args:
            kind: Which one.
            source: This rank's values. Allreduce and broadcast replace them by the result.
            target: Of other collectives: room for the result, for peers that need it.
            name: For peers that match operations by names.
        """

    def close(self) -> None:
        """Leaves the job."""


class Unsupported(Exception):
    """A peer has no such operation."""


class NumpyMemory:
    """For peers that take any memory."""

    has_own_memory = False

    def allocate(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """As numpy.empty."""
        return np.empty(shape, dtype)

    def close(self) -> None:
        """Has nothing to leave."""
