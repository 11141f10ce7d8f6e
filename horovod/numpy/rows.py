"""Allgather, alltoall and reducescatter of NumPy arrays: the operations that move rows, along the first dimension.

How many rows the result of an allgather or alltoall has depends on the other ranks: the engine makes its memory. The
signatures are those of horovod.torch.
"""

# ruff: noqa: PLR0917

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horovod import _core
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, own_share, require_id
from horovod.common.reduce_ops import Average, Sum
from horovod.numpy.arrays import BufferRequest, code_of, from_rows, plain

# Bound once: these are on the way of every small operation.
_partial = functools.partial
_asarray = np.asarray
_ALLGATHER = _core.ALLGATHER
_ALLTOALL = _core.ALLTOALL
_REDUCESCATTER = _core.REDUCESCATTER
_run_into_new, _submit_into_new = plain.run_into_new, plain.submit_into_new


# ---- Allgather -------------------------------------------------------------------------------------------------------


def allgather_request(array: "NDArray[Any]", full_name: str, set_id: int) -> BufferRequest:
    """The arguments of the engine's buffer functions, for a dense array."""
    result = _partial(from_rows, array.dtype)
    return _ALLGATHER, full_name, code_of(array), array, result, Sum, 0, set_id, 1.0, 1.0


def _allgather_request(array: ArrayLike, name: str | None, process_set: ProcessSet) -> BufferRequest:
    dense = _asarray(array, order="C")
    code_of(dense)  # an error before an unnamed operation is counted
    set_id = require_id(process_set)
    return allgather_request(dense, operation_name("allgather", name, set_id), set_id)


def allgather(
    array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> "NDArray[Any]":
    """Concatenates the arrays of all ranks of a set, in the order of ranks, along the first dimension.

    Args:
        array: This rank's rows. Their number may differ between ranks, and be 0; the other dimensions may not.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Returns:
        A new array, the same on all ranks.

    Raises:
        ValueError: A wrong argument; nothing was started.
        HorovodMismatchError: The ranks disagree about the array, or it is a scalar. The job goes on.
        HorovodInternalError: A rank was lost or has joined, or Horovod is not running.
    """
    result = _run_into_new(_ALLGATHER, array, name, process_set)
    if result is not NotImplemented:
        return result  # type: ignore[no-any-return]
    return _core.run_buffers(*_allgather_request(array, name, process_set))  # type: ignore[no-any-return]


def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As allgather, but only starts it; returns a handle for poll and synchronize."""
    return _core.submit_buffers(*_allgather_request(array, name, process_set))


# ---- Alltoall --------------------------------------------------------------------------------------------------------


def _exchanged(dtype: "np.dtype[Any]", rows: _core.Rows) -> "tuple[NDArray[Any], NDArray[np.int64]]":
    return from_rows(dtype, rows), np.array(rows.received, np.int64)


def _alltoall_request(
    array: ArrayLike, splits: Sequence[int] | ArrayLike | None, name: str | None, process_set: ProcessSet
) -> tuple[*BufferRequest, list[int] | None]:
    dense = _asarray(array, order="C")
    code = code_of(dense)
    counts = None if splits is None else _checked_splits(splits)
    result = _partial(from_rows if splits is None else _exchanged, dense.dtype)
    set_id = require_id(process_set)
    full_name = operation_name("alltoall", name, set_id)
    return _ALLTOALL, full_name, code, dense, result, Sum, 0, set_id, 1.0, 1.0, counts


def _checked_splits(splits: Sequence[int] | ArrayLike) -> list[int]:
    """The splits as integers; what they add up to is the engine's business."""
    counts = np.asarray(splits)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":  # an empty list is float64
        raise ValueError(
            f"alltoall: splits must be one-dimensional integers, one for each rank of the process set, got {splits!r}."
        )
    return counts.tolist()  # type: ignore[no-any-return]


def alltoall(
    array: ArrayLike,
    splits: Sequence[int] | ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> "NDArray[Any] | tuple[NDArray[Any], NDArray[np.int64]]":
    """Sends some rows to each rank of a set, and returns what came from each.

    Args:
        array: This rank's rows, first those for the first rank of the set, then those for the second, and so on. All
            dimensions but the first must be the same on all ranks.
        splits: How many rows go to each rank. Rows beyond their sum are not sent. None: equal parts.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Returns:
        The received rows, in the order of ranks; if splits were given, also how many came from each rank.

    Raises:
        ValueError: A wrong argument, e.g. splits that don't fit, or no splits and a number of rows that can't be
            divided by the number of ranks. Nothing was started.
        HorovodMismatchError: The ranks disagree about the array, or it is a scalar. The job goes on.
        HorovodInternalError: A rank was lost or has joined, or Horovod is not running.
    """
    if splits is None:
        result = _run_into_new(_ALLTOALL, array, name, process_set)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    return _core.run_buffers(*_alltoall_request(array, splits, name, process_set))  # type: ignore[no-any-return]


def alltoall_async(
    array: ArrayLike,
    splits: Sequence[int] | ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As alltoall, but only starts it; returns a handle for poll and synchronize."""
    return _core.submit_buffers(*_alltoall_request(array, splits, name, process_set))


# ---- Reducescatter ---------------------------------------------------------------------------------------------------


def reducescatter_request(
    array: "NDArray[Any]",
    full_name: str,
    op: int,
    set_id: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> BufferRequest:
    """The arguments of the engine's buffer functions, for a dense array."""
    code = code_of(array)
    # A scalar has no rows; the engine will refuse it.
    shape = (own_share(array.shape[0], process_set), *array.shape[1:]) if array.ndim else ()
    output = np.empty(shape, array.dtype)
    return _core.REDUCESCATTER, full_name, code, array, output, op, 0, set_id, prescale_factor, postscale_factor


def _reducescatter_request(
    array: ArrayLike,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> BufferRequest:
    dense = np.asarray(array, order="C")
    code_of(dense)  # an error before an unnamed operation is counted
    set_id = require_id(process_set)
    full_name = operation_name("reducescatter", name, set_id)
    return reducescatter_request(dense, full_name, op, set_id, prescale_factor, postscale_factor, process_set)


def reducescatter(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> "NDArray[Any]":
    """Reduces an array over all ranks of a set, and gives each of them its own rows of the result.

    Of n rows, the r-th of s ranks gets n / s, and one more if r < n % s; the first rank has the first rows.

    Args:
        array: This rank's values; shape and dtype must be the same on all ranks.
        name: What matches the operation with the other ranks'; counted if None.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.

    Returns:
        A new array with this rank's rows.

    Raises:
        ValueError: A wrong argument, e.g. a scalar; nothing was started.
        HorovodMismatchError: The ranks disagree about the array. The job goes on.
        HorovodInternalError: Another op, a rank was lost or has joined, or Horovod is not running.
    """
    result = _run_into_new(_REDUCESCATTER, array, name, process_set, op, prescale_factor, postscale_factor)
    if result is not NotImplemented:
        return result  # type: ignore[no-any-return]
    request = _reducescatter_request(array, name, op, process_set, prescale_factor, postscale_factor)
    return _core.run_buffers(*request)  # type: ignore[no-any-return]


def reducescatter_async(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter, but only starts it; returns a handle for poll and synchronize."""
    handle = _submit_into_new(_REDUCESCATTER, array, name, process_set, op, prescale_factor, postscale_factor)
    if handle is not NotImplemented:
        return handle  # type: ignore[no-any-return]
    request = _reducescatter_request(array, name, op, process_set, prescale_factor, postscale_factor)
    return _core.submit_buffers(*request)
