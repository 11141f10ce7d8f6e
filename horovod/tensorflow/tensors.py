"""What users pass as tensors, as TensorFlow's."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Moved but not reduced.
_MOVED_ONLY = ("float8_e4m3fn", "float8_e5m2")
REDUCED = frozenset(
    (
        *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.uint32, tf.uint64, tf.bool),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    )
)
MOVED = REDUCED | {getattr(tf.dtypes.experimental, name) for name in _MOVED_ONLY}


def as_tensor(value: Any, dtypes: frozenset[Any] = MOVED) -> Any:
    """A tensor of TensorFlow from one, or from a variable of TensorFlow or Keras, an array or a number.

    Raises:
        ValueError: Its dtype is not supported.
    """
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.base_dtype not in dtypes:
        known = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise ValueError(f"Tensor type {tensor.dtype.name} is not supported here. (It may be {known}.)")
    return tensor


def as_tensors(values: Sequence[Any], dtypes: frozenset[Any] = MOVED) -> list[Any]:
    """Each of them as a tensor."""
    return [as_tensor(value, dtypes) for value in values]
