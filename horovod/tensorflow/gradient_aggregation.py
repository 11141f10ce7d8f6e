"""Gradients of several backward passes, added up before they are reduced.

    counter       passes since the last reduction; apply_gradients sets it back to 0
    accumulators  one for each gradient

Both are variables, so the same code runs eagerly, in a tf.function and in a graph of TensorFlow 1.
"""

# ruff: noqa: PLR0917

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.util import reference


def apply_op_to_not_none_tensors(tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any) -> list[Any]:
    """Applies a function to what is not None."""
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """What is not None."""
    return [tensor for tensor in tensor_list if tensor is not None]


class LocalGradientAggregationHelper:
    """Adds up gradients, and reduces and applies them on every n-th pass only.

    Args:
        backward_passes_per_step: n.
        allreduce_func: Reduces gradients: takes them and their variables, returns as many.
        sparse_as_dense: Make tensors of IndexedSlices, which can't be added up.
        average_aggregated_gradients: Divide the sum by n.
        rank: Of this process; not needed.
        optimizer_type: Not needed.
        process_set: The ranks that take part.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.
        name: Prefix of the names of variables.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], list[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int | None = None,
        optimizer_type: int | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        """Keeps the arguments."""
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be > 0, it is {backward_passes_per_step}.")
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce = allreduce_func
        self._sparse_as_dense = sparse_as_dense
        self._average = average_aggregated_gradients
        self._process_set = process_set
        self._scale_local_gradients = scale_local_gradients
        self._name = name or "aggregation"
        self._local: set[Any] = set()
        self.counter: Any = None
        self._accumulators: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """From now on the gradient of this variable is not reduced."""
        self._local.add(reference(var))

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Adds gradients up.

        Returns:
            On every n-th pass the reduced sums; before that what has been added up, of which no use should be made.
        """
        dense = [self._as_dense(gradient) for gradient in grads]
        self._make_variables(dense)
        pairs = list(zip(dense, self._accumulators, strict=True))
        added = [accumulator.assign_add(gradient) for gradient, accumulator in pairs if gradient is not None]
        with tf.control_dependencies([*added, self.counter.assign_add(1)]):
            sums = [None if accumulator is None else accumulator.read_value() for accumulator in self._accumulators]
            present = [i for i, value in enumerate(sums) if value is not None]
            kept = tf.cond(
                self._is_complete(),
                lambda: self._reduced([sums[i] for i in present], [vars[i] for i in present]),
                lambda: [tf.identity(sums[i]) for i in present],
            )
        results: list[Any] = [None] * len(sums)
        for i, value in zip(present, kept, strict=True):
            results[i] = value
        return results

    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Applies the gradients that compute_gradients has returned, if that was the n-th pass, and begins anew."""

        def apply() -> Any:
            applied = apply_grads_closure()
            operations = [applied] if isinstance(applied, tf.Operation) else []
            with tf.control_dependencies(operations):
                sums = get_not_none_from_list(self._accumulators)
                cleared = [accumulator.assign(tf.zeros_like(accumulator)) for accumulator in sums]
                restarted = self.counter.assign(0)
            with tf.control_dependencies([*cleared, restarted]):
                return tf.constant(True)

        # The counter has to be read after it was advanced: the gradients say so to a graph.
        with tf.control_dependencies([value for value in args if tf.is_tensor(value)]):
            return tf.cond(self._is_complete(), apply, lambda: tf.constant(False))

    def _is_complete(self) -> Any:
        return tf.equal(self.counter.read_value(), self.backward_passes_per_step)

    def _reduced(self, sums: list[Any], variables: list[Any]) -> list[Any]:
        if self._average:
            sums = [value / tf.cast(self.backward_passes_per_step, value.dtype) for value in sums]
        shared = [i for i, variable in enumerate(variables) if reference(variable) not in self._local]
        results = list(sums)
        if self._scale_local_gradients:
            own = [i for i in range(len(sums)) if i not in set(shared)]
            for i in own:
                results[i] = sums[i] / tf.cast(self._process_set.size(), sums[i].dtype)
        reduced = self._allreduce([sums[i] for i in shared], [variables[i] for i in shared])
        for i, value in zip(shared, reduced, strict=True):
            results[i] = tf.identity(value)
        return [tf.identity(value) for value in results]

    def _as_dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if self._sparse_as_dense:
            return tf.convert_to_tensor(gradient)
        raise ValueError(
            "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
        )

    def _make_variables(self, gradients: list[Any]) -> None:
        if self.counter is not None:
            return
        shapes = [None if gradient is None else (gradient.shape, gradient.dtype) for gradient in gradients]
        with tf.init_scope():  # not within the tf.function, if there is one
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32, name=f"{self._name}_counter")
            self._accumulators = [
                None if shape is None else tf.Variable(tf.zeros(*shape), trainable=False, name=f"{self._name}_{i}")
                for i, shape in enumerate(shapes)
            ]
