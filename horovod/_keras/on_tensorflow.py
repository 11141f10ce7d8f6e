"""What the Keras binding needs of TensorFlow."""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.reduce_ops import Average, Min
from horovod.tensorflow import functions, mpi_ops, reductions
from horovod.tensorflow.autograph import as_written
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_global_variables
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradient_reducer import GradientReducer
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.util import reference

BACKEND = "tensorflow"

__all__ = [
    "BACKEND",
    "Compression",
    "GradientReducer",
    "LocalGradientAggregationHelper",
    "agree",
    "all_finite",
    "allgather",
    "allreduce",
    "as_written",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "infinite_unless",
    "multiply",
    "number",
    "reducescatter",
    "reference",
]


def broadcast_variables(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """Gives variables the root's values."""
    with tf.device(device):
        operation = functions.broadcast_variables(variables, root_rank)
    if not tf.executing_eagerly():  # Keras 2 in a session of TensorFlow 1
        tf.compat.v1.keras.backend.get_session().run(operation)


def number(variable: Any) -> float:
    """The number that a variable holds."""
    return float(variable if tf.executing_eagerly() else tf.keras.backend.get_value(variable))


def multiply(variable: Any, factor: float) -> None:
    """Multiplies what a variable holds."""
    if tf.executing_eagerly():
        variable.assign(variable * factor)
    else:
        tf.keras.backend.set_value(variable, tf.keras.backend.get_value(variable) * factor)


def agree(reducer: GradientReducer, truth: Any) -> Any:
    """Whether it is true on all ranks of the reducer's set."""
    if reducer.alone:
        return truth
    name = operation_name("allreduce", f"{reducer.name}/finite", ignore_name_scope=True)
    agreed = reductions.reduce_tensors([tf.cast(truth, tf.int32)], name, Min, reducer.process_set)[0]
    return tf.cast(agreed, tf.bool)


def all_finite(gradients: Sequence[Any]) -> Any:
    """Whether all numbers in all gradients are finite."""
    checks = [tf.reduce_all(tf.math.is_finite(_numbers(gradient))) for gradient in gradients if gradient is not None]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)


def infinite_unless(truth: Any, gradients: Sequence[Any]) -> list[Any]:
    """The gradients, of which one is infinite if it is not true."""
    results = list(gradients)
    i = next((i for i in reversed(range(len(results))) if results[i] is not None), None)
    if i is not None:
        last = results[i]
        numbers = _numbers(last)
        marked = tf.where(truth, numbers, tf.constant(float("inf"), numbers.dtype))
        sparse = isinstance(last, tf.IndexedSlices)
        results[i] = tf.IndexedSlices(marked, last.indices, last.dense_shape) if sparse else marked
    return results


def _numbers(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


# ---- Operations on values: numbers, arrays, tensors. The results are NumPy's, but in a graph TensorFlow's ------------


def _result(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") and tf.executing_eagerly() else tensor


def allreduce(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """Reduces a value over all ranks."""
    return _result(
        reductions.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates the arrays or tensors of all ranks along the first dimension."""
    return _result(mpi_ops.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's number, array or tensor."""
    return _result(mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces an array or tensor over all ranks, and gives each of them its own rows of the result."""
    return _result(reductions.reducescatter(tf.convert_to_tensor(value), name=name, op=op))
