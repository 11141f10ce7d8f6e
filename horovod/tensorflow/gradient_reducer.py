"""How gradients of TensorFlow become those of all ranks."""

from typing import Any

import tensorflow as tf

from horovod.common.gradient_reduction import GradientReduction
from horovod.tensorflow.naming import unique_name
from horovod.tensorflow.reductions import reduce_slices, reduce_tensors
from horovod.tensorflow.util import reference


class GradientReducer(GradientReduction):
    """Reduces tensors and IndexedSlices, eagerly and in graphs."""

    def reference(self, variable: Any) -> Any:
        """What can be hashed, and is the same for the same variable."""
        return reference(variable)

    def all_are_there(self) -> bool:
        """When run eagerly."""
        return bool(tf.executing_eagerly())

    def prepared(self, gradient: Any) -> Any:
        """IndexedSlices as tensors, if that is wanted."""
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def divided(self, gradient: Any, number: int | None) -> Any:
        """The gradient divided by a number."""
        if isinstance(gradient, tf.IndexedSlices):
            values = self.divided(gradient.values, number)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(number, gradient.dtype)

    def reduce_together(self, gradients: list[Any], name: str) -> list[Any]:
        """Reduces tensors by one operation, and gathers IndexedSlices by another."""
        results = list(gradients)
        sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        dense = [i for i in range(len(gradients)) if i not in set(sparse)]
        with tf.name_scope(""):
            if dense:
                full_name = unique_name(f"allreduce.{name}")
                chosen = [gradients[i] for i in dense]
                with tf.device(self.device_dense):
                    reduced = reduce_tensors(
                        chosen, full_name, self.op, self.process_set, self.compression, self.factors
                    )
                for i, gradient in zip(dense, reduced, strict=True):
                    results[i] = gradient
            if sparse:
                full_name = unique_name(f"allgather.{name}")
                with tf.device(self.device_sparse):
                    gathered = reduce_slices([gradients[i] for i in sparse], full_name, self.op, self.process_set)
                for i, slices in zip(sparse, gathered, strict=True):
                    results[i] = slices
        return results
