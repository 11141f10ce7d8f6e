"""Allreduce and broadcast of NumPy arrays. The signatures are those of horovod.torch."""

# ruff: noqa: PLR0917

from typing import Any

from numpy.typing import ArrayLike, NDArray

from horovod import _core
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.reduce_ops import ALL as _REDUCE_OPS
from horovod.common.reduce_ops import Average, Sum, reduce_op
from horovod.numpy.arrays import BufferRequest, check_in_place, dense_and_output, find_code, known_code, plain

# Bound once: these are on the way of every small operation.
_ALLREDUCE, _BROADCAST = _core.ALLREDUCE, _core.BROADCAST
_run_in_place, _submit_in_place = plain.run_in_place, plain.submit_in_place
_run_into_new, _submit_into_new = plain.run_into_new, plain.submit_into_new


def _allreduce_request(
    array: "NDArray[Any]",
    output: "NDArray[Any]",
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> BufferRequest:
    """The arguments of the engine's buffer functions."""
    if op is None and average is None:
        op = Average
    elif average is not None or op not in _REDUCE_OPS:
        op = reduce_op(op, average)
    code = known_code(array.dtype)
    if code is None:
        code = find_code(array.dtype)
    set_id = require_id(process_set)
    full_name = operation_name("allreduce", name, set_id)
    return _core.ALLREDUCE, full_name, code, array, output, op, 0, set_id, prescale_factor, postscale_factor


def _broadcast_request(
    array: "NDArray[Any]", output: "NDArray[Any]", root_rank: int, name: str | None, process_set: ProcessSet
) -> BufferRequest:
    code = known_code(array.dtype)
    if code is None:
        code = find_code(array.dtype)
    set_id = require_id(process_set)
    full_name = operation_name("broadcast", name, set_id)
    return _core.BROADCAST, full_name, code, array, output, Sum, root_rank, set_id, 1.0, 1.0


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
        op: Average (default), Sum, Adasum, Min, Max or Product. Of booleans, Sum and Max are "or", Min and Product
            are "and".
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.
        process_set: The ranks that take part.

    Returns:
        The reduced values, the same on all ranks.

    Raises:
        ValueError: A wrong argument, or one that the dtype has no such reduction for; nothing was started.
        HorovodMismatchError: The ranks disagree about the array. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    if average is None:
        result = _run_into_new(_ALLREDUCE, array, name, process_set, op, prescale_factor, postscale_factor)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    dense, output = dense_and_output(array)
    request = _allreduce_request(dense, output, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.run_buffers(*request)  # type: ignore[no-any-return]


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
    if average is None:
        handle = _submit_into_new(_ALLREDUCE, array, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    dense, output = dense_and_output(array)
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
    if average is None:
        result = _run_in_place(_ALLREDUCE, array, name, process_set, op, prescale_factor, postscale_factor)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    check_in_place(array, "allreduce_")
    request = _allreduce_request(array, array, average, name, op, prescale_factor, postscale_factor, process_set)
    return _core.run_buffers(*request)  # type: ignore[no-any-return]


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
    if average is None:
        handle = _submit_in_place(_ALLREDUCE, array, name, process_set, op, prescale_factor, postscale_factor)
        if handle is not NotImplemented:
            return handle  # type: ignore[no-any-return]
    check_in_place(array, "allreduce_async_")
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
    result = _run_into_new(_BROADCAST, array, name, process_set, root_rank)
    if result is not NotImplemented:
        return result  # type: ignore[no-any-return]
    request = _broadcast_request(*dense_and_output(array), root_rank, name, process_set)
    return _core.run_buffers(*request)  # type: ignore[no-any-return]


def broadcast_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast, but only starts it; returns a handle for poll and synchronize."""
    handle = _submit_into_new(_BROADCAST, array, name, process_set, root_rank)
    if handle is not NotImplemented:
        return handle  # type: ignore[no-any-return]
    return _core.submit_buffers(*_broadcast_request(*dense_and_output(array), root_rank, name, process_set))


def broadcast_(
    array: "NDArray[Any]", root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> "NDArray[Any]":
    """As broadcast, but in place; returns the same array, which must be writable and C-contiguous."""
    result = _run_in_place(_BROADCAST, array, name, process_set, root_rank)
    if result is not NotImplemented:
        return result  # type: ignore[no-any-return]
    check_in_place(array, "broadcast_")
    request = _broadcast_request(array, array, root_rank, name, process_set)
    return _core.run_buffers(*request)  # type: ignore[no-any-return]


def broadcast_async_(
    array: "NDArray[Any]", root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_, but only starts it; returns a handle. The array must be left alone until synchronize."""
    handle = _submit_in_place(_BROADCAST, array, name, process_set, root_rank)
    if handle is not NotImplemented:
        return handle  # type: ignore[no-any-return]
    check_in_place(array, "broadcast_async_")
    return _core.submit_buffers(*_broadcast_request(array, array, root_rank, name, process_set))
