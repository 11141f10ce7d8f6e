"""Tensors with the values of the sweeps, which are NumPy's: what NumPy says of results then holds for torch too."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from sweeps import MOVED, REDUCED, values
from torch import Tensor

# torch's dtype, and one of the same size that both NumPy and torch have.
_CARRIERS = {
    "bfloat16": (torch.bfloat16, np.int16),
    "float8_e4m3fn": (torch.float8_e4m3fn, np.int8),
    "float8_e5m2": (torch.float8_e5m2, np.int8),
    "bool": (torch.bool, np.uint8),
}
assert set(REDUCED) < set(MOVED)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A new tensor with the array's values."""
    if array.dtype.name not in _CARRIERS:
        return torch.from_numpy(array.copy())
    dtype, carrier = _CARRIERS[array.dtype.name]
    return torch.from_numpy(np.ascontiguousarray(array).view(carrier).copy()).view(dtype).reshape(array.shape)


def to_array(tensor: Tensor) -> NDArray[Any]:
    """An array with the tensor's values."""
    for name, (dtype, carrier) in _CARRIERS.items():
        if tensor.dtype == dtype:
            kind = getattr(ml_dtypes, name) if name != "bool" else np.bool_
            carried = torch.uint8 if name == "bool" else {1: torch.int8, 2: torch.int16}[np.dtype(carrier).itemsize]
            return np.asarray(tensor.detach().contiguous().view(carried).numpy().view(kind)).copy()
    return np.asarray(tensor.detach().numpy()).copy()


def tensor_of(dtype: Any, shape: int | tuple[int, ...], rank: int, seed: int = 0) -> Tensor:
    """A rank's input: any rank can make any other's."""
    return to_tensor(values(dtype, shape, rank, seed))
