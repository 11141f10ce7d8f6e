"""Python objects through collectives: pickled into bytes, which are broadcast or gathered.

The bytes go to the engine as they are, without a framework's tensor around them; so all bindings share this.
Unpickling is safe in so far as the ranks trust each other: all of them have proved the job's key.
"""

import io
import pickle
from array import array
from typing import Any

import cloudpickle

from horovod import _core
from horovod.common.basics import basics
from horovod.common.names import operation_name
from horovod.common.process_sets import ProcessSet, global_process_set, require_id


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank of the set.

    Args:
        obj: The object; only the root's matters.
        root_rank: The global rank whose object is sent.
        name: Name of the operation, the same on all ranks.
        process_set: The ranks that take part.

    Raises:
        ValueError: The root is not a member of the set.
        HorovodInternalError: A rank was lost.
    """
    name = "broadcast_object" if name is None else name
    set_id = require_id(process_set)
    if basics.rank() == root_rank:
        payload = _pickled(obj)
        _broadcast(array("q", [len(payload)]), _core.INT64, f"{name}.sz", root_rank, set_id)
        _broadcast(payload, _core.UINT8, f"{name}.t", root_rank, set_id)
        return obj
    size = array("q", [0])
    _broadcast(size, _core.INT64, f"{name}.sz", root_rank, set_id)
    received = bytearray(size[0])
    _broadcast(received, _core.UINT8, f"{name}.t", root_rank, set_id)
    return pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks of the set, in rank order.

    Args:
        obj: This rank's object.
        name: Name of the operation, the same on all ranks.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: A rank was lost.
    """
    name = "allgather_object" if name is None else name
    set_id = require_id(process_set)
    own = process_set.rank()
    full_name = operation_name("allgather", f"{name}.t", set_id)
    rows: Any = _core.run_buffers(
        _core.ALLGATHER, full_name, _core.UINT8, _pickled(obj), None, _core.SUM, 0, set_id, 1.0, 1.0
    )
    everything = memoryview(rows)
    objects, start = [], 0
    for position, size in enumerate(rows.received):
        objects.append(obj if position == own else pickle.loads(everything[start : start + size]))
        start += size
    return objects


def _pickled(obj: Any) -> memoryview:
    """The object as writable bytes, which the engine can take in place without a copy."""
    file = io.BytesIO()
    cloudpickle.dump(obj, file)
    return file.getbuffer()


def _broadcast(buffer: Any, dtype: int, name: str, root_rank: int, set_id: int) -> None:
    _core.run_buffers(
        _core.BROADCAST,
        operation_name("broadcast", name, set_id),
        dtype,
        buffer,
        buffer,
        _core.SUM,
        root_rank,
        set_id,
        1.0,
        1.0,
    )
