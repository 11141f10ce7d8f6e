"""The operations themselves, with all that ranks agree on, and their gradients.

What has a gradient gets it by another operation, whose name is the first one's with ".grad" at its end: so it never
meets that of another operation, in whatever order the backward pass comes to them. It can be differentiated again.
"""

# ruff: noqa: PLR0917

import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import basics
from horovod.common.process_sets import position_in
from horovod.common.reduce_ops import Average, Sum
from horovod.tensorflow.library import library
from horovod.tensorflow.naming import unique_name


def _bits(factor: float) -> int:
    """A double in an attribute, which has integers and floats of 32 bits only."""
    return int(struct.unpack("q", struct.pack("d", factor))[0])


def _factor(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


def allreduce(
    tensors: Sequence[Any], full_name: str, op: int, set_id: int, prescale: float = 1.0, postscale: float = 1.0
) -> list[Any]:
    """Reduces tensors over the ranks of a set."""
    if not tensors:
        return []
    results: list[Any] = library.horovod_allreduce(
        tensors=tensors,
        tensor_name=full_name,
        reduce_op=op,
        prescale_bits=_bits(prescale),
        postscale_bits=_bits(postscale),
        process_set=set_id,
    )
    return results


def broadcast(tensors: Sequence[Any], full_name: str, root_rank: int, set_id: int) -> list[Any]:
    """The root's tensors."""
    if not tensors:
        return []
    results: list[Any] = library.horovod_broadcast(
        tensors=tensors, tensor_name=full_name, root_rank=root_rank, process_set=set_id
    )
    return results


def allgather(tensors: Sequence[Any], full_name: str, set_id: int) -> tuple[list[Any], list[Any]]:
    """The rows of all ranks, and for each tensor how many came from each."""
    if not tensors:
        return [], []
    outputs = library.horovod_allgather(tensors=tensors, N=len(tensors), tensor_name=full_name, process_set=set_id)
    return outputs.results, outputs.received


def alltoall(tensor: Any, splits: Any, full_name: str, set_id: int) -> tuple[Any, Any]:
    """The rows that came from each rank, and how many; no splits: equal parts."""
    outputs = library.horovod_alltoall(tensor=tensor, splits=splits, tensor_name=full_name, process_set=set_id)
    return outputs.result, outputs.received


def reducescatter(
    tensors: Sequence[Any], full_name: str, op: int, set_id: int, prescale: float = 1.0, postscale: float = 1.0
) -> list[Any]:
    """Reduces tensors, and gives this rank its rows of each."""
    if not tensors:
        return []
    results: list[Any] = library.horovod_reducescatter(
        tensors=tensors,
        tensor_name=full_name,
        reduce_op=op,
        prescale_bits=_bits(prescale),
        postscale_bits=_bits(postscale),
        process_set=set_id,
    )
    return results


# ---- Gradients -------------------------------------------------------------------------------------------------------


def _of(op: Any) -> tuple[str, int]:
    name = op.get_attr("tensor_name")
    text = name.decode() if isinstance(name, bytes) else name
    return unique_name(f"{text}.grad"), op.get_attr("process_set")


def _factors(op: Any) -> tuple[float, float]:
    return _factor(op.get_attr("prescale_bits")), _factor(op.get_attr("postscale_bits"))


def _allreduce_gradient(op: Any, *grads: Any) -> list[Any]:
    name, set_id = _of(op)
    return allreduce(grads, name, op.get_attr("reduce_op"), set_id, *_factors(op))


def _broadcast_gradient(op: Any, *grads: Any) -> list[Any]:
    name, set_id = _of(op)
    averages = allreduce(grads, name, Average, set_id)
    if basics.rank() == op.get_attr("root_rank"):
        return averages
    # Nothing came from here. But the operation has to be part of the graph, on every rank.
    with tf.control_dependencies(averages):
        return [tf.zeros_like(average) for average in averages]


def _allgather_gradient(op: Any, *grads: Any) -> list[Any]:
    name, set_id = _of(op)
    count = op.get_attr("N")
    averages = allreduce(grads[:count], name, Average, set_id)
    own = position_in(set_id)
    return [
        average[tf.reduce_sum(received[:own]) :][: received[own]]
        for average, received in zip(averages, op.outputs[count:], strict=True)
    ]


def _alltoall_gradient(op: Any, grad: Any, _: Any) -> list[Any]:
    name, set_id = _of(op)
    returned, _ = alltoall(grad, op.outputs[1], name, set_id)
    # Rows beyond the sum of the splits went nowhere.
    missing = tf.shape(op.inputs[0])[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, missing]], tf.zeros([tf.rank(returned) - 1, 2], tf.int32)], axis=0)
    return [tf.pad(returned, padding), None]


def _reducescatter_gradient(op: Any, *grads: Any) -> list[Any]:
    name, set_id = _of(op)
    prescale, postscale = _factors(op)
    factor = tf.constant(prescale * postscale, tf.float64)
    if op.get_attr("reduce_op") == Sum:
        factor *= tf.cast(library.horovod_place(process_set=set_id).size, tf.float64)
    gathered, _ = allgather(grads, name, set_id)
    return [grad * tf.cast(factor, grad.dtype) for grad in gathered]


for _operation, _gradient in (
    ("HorovodAllreduce", _allreduce_gradient),
    ("HorovodBroadcast", _broadcast_gradient),
    ("HorovodAllgather", _allgather_gradient),
    ("HorovodAlltoall", _alltoall_gradient),
    ("HorovodReducescatter", _reducescatter_gradient),
):
    tf.RegisterGradient(_operation)(_gradient)
tf.no_gradient("HorovodPlace")
tf.no_gradient("HorovodJoin")
