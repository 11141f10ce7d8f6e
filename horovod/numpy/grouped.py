"""Several NumPy arrays in one call: they are started together, run together where they fit, and have one handle.

The signatures are those of horovod.torch.
"""

# ruff: noqa: PLR0917

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horovod import _core
from horovod.common.handles import group_of, synchronize
from horovod.common.names import member_names
from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.reduce_ops import Average, reduce_op
from horovod.numpy.arrays import BufferRequest, check_in_place, code_of, plain
from horovod.numpy.rows import allgather_request, reducescatter_request

Arrays = list["NDArray[Any]"]


def _dense(arrays: Sequence[ArrayLike]) -> Arrays:
    """The arrays in C order. Whatever is wrong with one is found before any of the group is started."""
    dense = [np.asarray(array, order="C") for array in arrays]
    for array in dense:
        code_of(array)
    return dense


def _start(requests: Iterable[BufferRequest]) -> int:
    return group_of(_core.submit_all_buffers(list(requests)))


def _start_allreduces(
    inputs: Arrays,
    outputs: Arrays,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    op = reduce_op(op, average)
    set_id = require_id(process_set)
    names = member_names("grouped_allreduce", name, set_id, len(inputs))
    return _start(
        (_core.ALLREDUCE, full_name, code_of(array), array, output, op, 0, set_id, prescale_factor, postscale_factor)
        for full_name, array, output in zip(names, inputs, outputs, strict=True)
    )


def grouped_allreduce(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Arrays:
    """Reduces several arrays over all ranks of a set into new arrays: see allreduce.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the arrays; the others were reduced. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    handle = grouped_allreduce_async(arrays, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce, but only starts it; returns one handle, for which synchronize returns the list."""
    if average is None:
        handles = plain.submit_group_into_new(
            _core.ALLREDUCE, arrays, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return group_of(handles)
    inputs = _dense(arrays)
    outputs = [np.empty(array.shape, array.dtype) for array in inputs]
    return _start_allreduces(inputs, outputs, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    arrays: "Sequence[NDArray[Any]]",
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Arrays:
    """As grouped_allreduce, but in place; returns the same arrays, which must be writable and C-contiguous."""
    handle = grouped_allreduce_async_(arrays, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    arrays: "Sequence[NDArray[Any]]",
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_, but only starts it; returns one handle. Leave the arrays alone until synchronize."""
    if average is None:
        handles = plain.submit_group_in_place(
            _core.ALLREDUCE, arrays, name, process_set, op, prescale_factor, postscale_factor
        )
        if handles is not NotImplemented:
            return group_of(handles)
    for array in arrays:
        check_in_place(array, "grouped_allreduce_")
    same = _dense(arrays)
    return _start_allreduces(same, same, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allgather(
    arrays: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Arrays:
    """Concatenates several arrays over all ranks of a set, each along its first dimension: see allgather.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the arrays; the others were gathered. The job goes on.
        HorovodInternalError: A rank was lost or has joined, or Horovod is not running.
    """
    return synchronize(grouped_allgather_async(arrays, name, process_set))  # type: ignore[no-any-return]


def grouped_allgather_async(
    arrays: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As grouped_allgather, but only starts it; returns one handle, for which synchronize returns the list."""
    dense = _dense(arrays)
    set_id = require_id(process_set)
    names = member_names("grouped_allgather", name, set_id, len(dense))
    return _start(allgather_request(array, full_name, set_id) for full_name, array in zip(names, dense, strict=True))


def grouped_reducescatter(
    arrays: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Arrays:
    """Reduces several arrays over all ranks of a set, and gives each rank its rows of each: see reducescatter.

    Raises:
        ValueError: A wrong argument.
        HorovodMismatchError: The ranks disagree about one of the arrays; the others were reduced. The job goes on.
        HorovodInternalError: Another op than Average and Sum, a rank was lost or joined, or Horovod is not running.
    """
    handle = grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_reducescatter_async(
    arrays: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As grouped_reducescatter, but only starts it; returns one handle, for which synchronize returns the list."""
    dense = _dense(arrays)
    set_id = require_id(process_set)
    names = member_names("grouped_reducescatter", name, set_id, len(dense))
    return _start(
        reducescatter_request(array, full_name, op, set_id, prescale_factor, postscale_factor, process_set)
        for full_name, array in zip(names, dense, strict=True)
    )
