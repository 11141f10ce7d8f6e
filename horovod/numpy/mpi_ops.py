"""Collectives on NumPy arrays.

An array that is C-contiguous and in native byte order is handed to the engine as it is, without a copy. The engine
knows nothing of strides, and ranks can't see each other's: so any other layout is copied into C order first where the
result is a new array, and refused where the operation is in place.

The signatures are those of horovod.torch.
"""

# ruff: noqa: PLR0917

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horovod import _core
from horovod.common.basics import basics
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.util import get_average_backwards_compatibility_fun

Average: int = basics.Average
Sum: int = basics.Sum
Adasum: int = basics.Adasum
Min: int = basics.Min
Max: int = basics.Max
Product: int = basics.Product

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(basics)

_REDUCE_OPS = frozenset((Average, Sum, Min, Max))
_LATER_OPS = {Adasum: "Adasum", Product: "Product"}

# dtype: its code in the engine. bfloat16 has no dtype of NumPy's own; it joins when first seen.
_REDUCIBLE: dict[Any, int] = {
    np.dtype(np.int32): _core.INT32,
    np.dtype(np.int64): _core.INT64,
    np.dtype(np.float16): _core.FLOAT16,
    np.dtype(np.float32): _core.FLOAT32,
    np.dtype(np.float64): _core.FLOAT64,
}
_MOVABLE: dict[Any, int] = _REDUCIBLE | {
    np.dtype(np.uint8): _core.UINT8,
    np.dtype(np.int8): _core.INT8,
    np.dtype(np.uint16): _core.UINT16,
    np.dtype(np.int16): _core.INT16,
    np.dtype(np.bool_): _core.BOOL,
}


def _find_code(dtype: "np.dtype[Any]", codes: dict[Any, int], what: str) -> int:
    """The code of a dtype that is not in the table: bfloat16, or an error."""
    if dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative:
        codes[dtype] = _core.BFLOAT16
        return _core.BFLOAT16
    supported = ", ".join(sorted({known.name for known in codes} | {"bfloat16"}))
    order = "" if dtype.isnative else " in foreign byte order"
    raise ValueError(f"Tensor type {dtype.name}{order} is not supported. ({what} takes {supported}.)")


def _check_in_place(array: Any, what: str) -> None:
    """Refuses what can't be written to in place, before an unnamed operation is counted."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{what} works in place and needs a NumPy array, got {type(array).__name__}.")
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError(f"Tensor is required to be contiguous. ({what} works in place, on arrays in C order.)")
    if not flags.writeable:
        raise ValueError(f"Tensor is read-only. ({what} writes its result into it.)")


def _check_op(op: int) -> None:
    if op in _LATER_OPS:
        raise NotImplementedError(f"allreduce: op={_LATER_OPS[op]} is not available in this version.")
    raise ValueError(f"allreduce: unknown op {op!r}; expected Average, Sum, Min or Max.")


def _allreduce_request(
    array: "NDArray[Any]",
    output: "NDArray[Any]",
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> tuple[int, str, int, Any, Any, int, int, int, float, float]:
    """The arguments of the engine's buffer functions."""
    if average is not None or op is None:
        op = handle_average_backwards_compatibility(op, average)
    if op not in _REDUCE_OPS:
        _check_op(op)
    dtype = array.dtype
    code = _REDUCIBLE.get(dtype)
    if code is None:
        code = _find_code(dtype, _REDUCIBLE, "allreduce")
    set_id = require_id(process_set)
    full_name = operation_name("allreduce", name, set_id)
    return _core.ALLREDUCE, full_name, code, array, output, op, 0, set_id, prescale_factor, postscale_factor


def _broadcast_request(
    array: "NDArray[Any]", output: "NDArray[Any]", root_rank: int, name: str | None, process_set: ProcessSet
) -> tuple[int, str, int, Any, Any, int, int, int, float, float]:
    dtype = array.dtype
    code = _MOVABLE.get(dtype)
    if code is None:
        code = _find_code(dtype, _MOVABLE, "broadcast")
    set_id = require_id(process_set)
    full_name = operation_name("broadcast", name, set_id)
    return _core.BROADCAST, full_name, code, array, output, Sum, root_rank, set_id, 1.0, 1.0


def _dense(array: ArrayLike) -> "tuple[NDArray[Any], NDArray[Any]]":
    """The input in C order, copied only if need be, and a new array for the result."""
    dense = np.asarray(array, order="C")
    return dense, np.empty(dense.shape, dense.dtype)


def allreduce(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> "NDArray[Any]":
    """Reduces an array over all ranks of a set into a new array.

    Args:
        array: This rank's values; shape and dtype must be the same on all ranks.
        average: Deprecated; use op.
        name: What matches the operation with the other ranks'; counted if None.
        op: Average (default), Sum, Min or Max.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.
        process_set: The ranks that take part.

    Returns:
        The reduced values, the same on all ranks.

    Raises:
        ValueError: A wrong argument; nothing was started.
        HorovodMismatchError: The ranks disagree about the array. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    dense, output = _dense(array)
    request = _allreduce_request(dense, output, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.run_buffers(*request)


def allreduce_async(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce, but only starts it; returns a handle for poll and synchronize."""
    dense, output = _dense(array)
    request = _allreduce_request(dense, output, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.submit_buffers(*request)


def allreduce_(
    array: "NDArray[Any]",
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> "NDArray[Any]":
    """As allreduce, but in place; returns the same array, which must be writable and C-contiguous."""
    _check_in_place(array, "allreduce_")
    request = _allreduce_request(array, array, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.run_buffers(*request)


def allreduce_async_(
    array: "NDArray[Any]",
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_, but only starts it; returns a handle. The array must be left alone until synchronize."""
    _check_in_place(array, "allreduce_async_")
    request = _allreduce_request(array, array, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.submit_buffers(*request)


def broadcast(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> "NDArray[Any]":
    """Returns the root's array as a new array on every rank of a set.

    Args:
        array: The values to send; on other ranks than the root only shape and dtype matter.
        root_rank: The global rank that sends.
        name: What matches the operation with the other ranks'; counted if None.
        process_set: The ranks that take part.

    Raises:
        ValueError: A wrong argument; nothing was started.
        HorovodMismatchError: The ranks disagree about the array. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    request = _broadcast_request(*_dense(array), root_rank, name, process_set)
    return _core.run_buffers(*request)


def broadcast_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast, but only starts it; returns a handle for poll and synchronize."""
    return _core.submit_buffers(*_broadcast_request(*_dense(array), root_rank, name, process_set))


def broadcast_(
    array: "NDArray[Any]", root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> "NDArray[Any]":
    """As broadcast, but in place; returns the same array, which must be writable and C-contiguous."""
    _check_in_place(array, "broadcast_")
    request = _broadcast_request(array, array, root_rank, name, process_set)
    return _core.run_buffers(*request)


def broadcast_async_(
    array: "NDArray[Any]", root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_, but only starts it; returns a handle. The array must be left alone until synchronize."""
    _check_in_place(array, "broadcast_async_")
    return _core.submit_buffers(*_broadcast_request(array, array, root_rank, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. Pending operations need not have ended.

    Raises:
        ValueError: Another thread of this rank is in a barrier of this set.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    set_id = require_id(process_set)
    _core.run(_core.BARRIER, "barrier.noname", _core.UINT8, (), 0, 0, Sum, 0, set_id, 1.0, 1.0, None, None)


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that synchronize will not wait.

    Raises:
        ValueError: There is no such handle, or synchronize has already returned it.
    """
    return _core.poll(handle)


def synchronize(handle: int) -> "NDArray[Any] | None":
    """Waits for an operation and returns its array; None for an unknown handle.

    Raises:
        HorovodMismatchError: The ranks disagree about the array. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod was shut down.
    """
    return _core.wait(handle)  # type: ignore[return-value]
