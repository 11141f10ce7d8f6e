"""NumPy arrays as the engine takes them.

An array that is C-contiguous and in native byte order is handed to the engine as it is, without a copy. The engine
knows nothing of strides, and ranks can't see each other's: so any other layout is copied into C order first where the
result is a new array, and refused where the operation is in place.
"""

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horovod import _core
from horovod.common.process_sets import global_process_set

# The arguments of the engine's buffer functions.
BufferRequest = tuple[int, str, int, Any, Any, int, int, int, float, float]

# dtype: its code in the engine. Those that are not NumPy's own (see _FOREIGN) join when they are first seen.
CODES: dict[Any, int] = {
    np.dtype(np.uint8): _core.UINT8,
    np.dtype(np.int8): _core.INT8,
    np.dtype(np.uint16): _core.UINT16,
    np.dtype(np.int16): _core.INT16,
    np.dtype(np.uint32): _core.UINT32,
    np.dtype(np.int32): _core.INT32,
    np.dtype(np.uint64): _core.UINT64,
    np.dtype(np.int64): _core.INT64,
    np.dtype(np.float16): _core.FLOAT16,
    np.dtype(np.float32): _core.FLOAT32,
    np.dtype(np.float64): _core.FLOAT64,
    np.dtype(np.bool_): _core.BOOL,
    np.dtype(np.complex64): _core.COMPLEX64,
    np.dtype(np.complex128): _core.COMPLEX128,
}
# Bound once: this is on the way of every small operation.
known_code = CODES.get
_ndarray = np.ndarray
# The short way of small operations (src/api/python_plain.h): two arrays show it that it can read them. The module with
# NumPy's C functions was imported with NumPy; its name was another one in 1.x.
_other = np.zeros((3, 2), np.int16).T
_other.flags.writeable = False
_c_functions = sys.modules.get("numpy._core.multiarray") or sys.modules.get("numpy.core.multiarray")
_array_api = getattr(_c_functions, "_ARRAY_API", None)
plain = _core.plain_arrays(np.zeros((2, 3), np.float32), _other, _array_api, CODES, global_process_set)
# Names of dtypes of the package ml_dtypes: size in bytes, code.
_FOREIGN = {
    "bfloat16": (2, _core.BFLOAT16),
    "float8_e4m3fn": (1, _core.FLOAT8_E4M3FN),
    "float8_e5m2": (1, _core.FLOAT8_E5M2),
}


def find_code(dtype: "np.dtype[Any]") -> int:
    """The code of a dtype that is not in the table.

    Raises:
        ValueError: There is none.
    """
    size, code = _FOREIGN.get(dtype.name, (0, 0))
    if dtype.itemsize == size and dtype.isnative:
        CODES[dtype] = code
        return code
    supported = ", ".join(sorted({known.name for known in CODES} | set(_FOREIGN)))
    order = "" if dtype.isnative else " in foreign byte order"
    raise ValueError(f"Tensor type {dtype.name}{order} is not supported. (Arrays may have the types {supported}.)")


def code_of(array: "NDArray[Any]") -> int:
    """The engine's code for the array's dtype.

    Raises:
        ValueError: There is none.
    """
    code = known_code(array.dtype)
    return find_code(array.dtype) if code is None else code


def check_in_place(array: Any, what: str) -> None:
    """Refuses what can't be written to in place, before an unnamed operation is counted.

    Raises:
        ValueError: Not an array, or not a dense and writable one.
    """
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{what} works in place and needs a NumPy array, got {type(array).__name__}.")
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError(f"Tensor is required to be contiguous. ({what} works in place, on arrays in C order.)")
    if not flags.writeable:
        raise ValueError(f"Tensor is read-only. ({what} writes its result into it.)")


def dense_and_output(array: ArrayLike) -> "tuple[NDArray[Any], NDArray[Any]]":
    """The input in C order, copied only if need be, and a new array for a result of the same shape."""
    dense = np.asarray(array, order="C")
    return dense, np.empty(dense.shape, dense.dtype)


def from_rows(dtype: "np.dtype[Any]", rows: _core.Rows) -> "NDArray[Any]":
    """The array over memory that the engine has made; it keeps that memory alive."""
    memory: Any = rows
    return _ndarray(rows.shape, dtype, memory)
