"""Batch normalization over the batches of all ranks."""

from typing import Any

import tensorflow as tf

from horovod.common.basics import basics
from horovod.common.process_sets import global_process_set
from horovod.common.reduce_ops import Sum
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.reductions import reduce_tensors


@tf.keras.utils.register_keras_serializable(package="horovod")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """tf.keras.layers.BatchNormalization, but mean and variance are those of all ranks' samples.

    Ranks may have different numbers of samples. In float16 and bfloat16 it computes in float32.

    Args:
        fused: Must be False: fused kernels can't be told of other ranks.
        **kwargs: As of BatchNormalization.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        """Makes the layer.

        Raises:
            ValueError: fused is True or None.
        """
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)
        if hasattr(self, "fused"):  # Keras 2 would choose by itself
            self.fused = False

    # Keras 3 asks for the moments here,
    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        if hasattr(base, "_calculate_mean_and_var"):
            return base._moments(inputs, *args, **kwargs)
        mask = args[0] if args else kwargs.get("mask")
        return self._all_moments(inputs, self._reduction_axes, False, mask)

    # and Keras 2 here.
    def _calculate_mean_and_var(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        return self._all_moments(inputs, reduction_axes, keep_dims, mask)

    def _all_moments(self, inputs: Any, axes: Any, keep_dims: bool, mask: Any) -> Any:
        """Mean and variance from counts, sums and squares, which are added up over the ranks in one operation."""
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
        weights = tf.ones_like(wide) if mask is None else _weights(wide, mask)
        local_count = tf.reduce_sum(weights, axes, keepdims=keep_dims)
        local_sum = tf.reduce_sum(wide * weights, axes, keepdims=keep_dims)
        # About this rank's mean, so that large means don't cancel the variance away.
        local_mean = tf.math.divide_no_nan(local_sum, local_count)
        shape = [1 if i in set(_positive(axes, wide)) else -1 for i in range(wide.shape.rank)]
        centered = (wide - tf.reshape(local_mean, shape)) * weights
        local_squares = tf.reduce_sum(tf.square(centered), axes, keepdims=keep_dims)
        if basics.size() == 1:
            mean, squares, count = local_mean, local_squares, local_count
        else:
            name = operation_name("allreduce", f"{self.name}/moments")
            count, total = reduce_tensors([local_count, local_sum], name, Sum, global_process_set)
            mean = tf.math.divide_no_nan(total, count)
            shifted = local_squares + local_count * tf.square(local_mean - mean)
            name = operation_name("allreduce", f"{self.name}/squares")
            (squares,) = reduce_tensors([shifted], name, Sum, global_process_set)
        variance = tf.math.divide_no_nan(squares, count)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _positive(axes: Any, tensor: Any) -> list[int]:
    return [axis % tensor.shape.rank for axis in axes]


def _weights(inputs: Any, mask: Any) -> Any:
    mask = tf.cast(mask, inputs.dtype)
    extra = inputs.shape.rank - mask.shape.rank
    return tf.ones_like(inputs) * tf.reshape(mask, tf.concat([tf.shape(mask), tf.ones([extra], tf.int32)], axis=0))
