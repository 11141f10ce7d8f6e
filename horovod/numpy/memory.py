"""Arrays on memory that the ranks of a host can read from each other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from horovod import _core


def zeros(shape: int | Sequence[int], dtype: DTypeLike = np.float64) -> "NDArray[Any]":
    """As numpy.zeros, on shared memory: a large array of it is reduced in place without copying it anywhere first.

    That is so where the array is in such memory on all ranks; otherwise it is an array like any other. The memory
    belongs to the array, also after shutdown. A forked child shares it with its parent.

    Raises:
        MemoryError: There is not so much.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    element = np.dtype(dtype)
    memory: Any = _core.SharedMemory(math.prod(extents) * element.itemsize)
    return np.ndarray(extents, element, buffer=memory)
