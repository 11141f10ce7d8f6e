"""Operations on values: numbers, arrays, tensors. The results are NumPy's, but in a graph TensorFlow's."""

# ruff: noqa: PLR0917

from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd


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
        hvd.allreduce(
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
    return _result(hvd.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's number, array or tensor."""
    return _result(hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = hvd.Average) -> Any:
    """Reduces an array or tensor over all ranks, and gives each of them its own rows of the result."""
    return _result(hvd.reducescatter(tf.convert_to_tensor(value), name=name, op=op))
