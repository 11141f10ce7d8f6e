"""Optimizers of TensorFlow 1 (tf.compat.v1.train) whose gradients are those of all ranks."""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, get_not_none_from_list
from horovod.tensorflow.gradient_reducer import GradientReducer


class _Wrapper(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer around another one, which does the work."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reducer = reducer

    def register_local_var(self, var: Any) -> None:
        """From now on the gradient of this variable stays this rank's own."""
        self._reducer.add_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As of the optimizer."""
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """As of the optimizer."""
        return self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As of the optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As of the optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As of the optimizer."""
        return self._optimizer.variables(*args, **kwargs)


class V1DistributedOptimizer(_Wrapper):
    """Reduces the gradients that compute_gradients returns."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reducer: GradientReducer,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        """Keeps the arguments."""
        super().__init__(optimizer, name, use_locking, reducer)
        self._aggregation = _aggregation(
            reducer, backward_passes_per_step, average_aggregated_gradients, reducer.reduce
        )

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks, and their variables."""
        gradients, variables = _unzip(super().compute_gradients(*args, **kwargs))
        if self._aggregation is not None:
            reduced = self._aggregation.compute_gradients(gradients, variables)
        else:
            reduced = self._reducer.reduce(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Changes the variables; if several backward passes make a step, at the last of them only."""
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            return super().apply_gradients(pairs, global_step=global_step, name=name)
        done = self._aggregation.apply_gradients(
            lambda: super(V1DistributedOptimizer, self).apply_gradients(pairs, global_step=global_step, name=name),
            self._optimizer,
            *get_not_none_from_list(_unzip(pairs)[0]),
        )
        return tf.group(done)


class V1AdasumOptimizer(_Wrapper):
    """Has each rank make a step of its own, and combines these by Adasum."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, reducer: GradientReducer, backward_passes_per_step: int
    ) -> None:
        """Keeps the arguments."""
        super().__init__(optimizer, name, use_locking, reducer)
        self._aggregation = _aggregation(reducer, backward_passes_per_step, False, lambda sums, _: sums)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """This rank's gradients: it is what they change that is combined."""
        gradients, variables = _unzip(super().compute_gradients(*args, **kwargs))
        if self._aggregation is not None:
            gradients = self._aggregation.compute_gradients(gradients, variables)
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Changes the variables by what Adasum makes of all ranks' changes."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        if self._aggregation is None:
            return self._step(pairs, global_step, name)
        done = self._aggregation.apply_gradients(
            lambda: self._step(pairs, global_step, name), self._optimizer, *_unzip(pairs)[0]
        )
        return tf.group(done)

    def _step(self, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        _, variables = _unzip(pairs)
        # Copies: the memory of a variable is changed in place.
        before = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in variables]
        with tf.control_dependencies(before):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies(get_not_none_from_list([applied])):
            changes = [now.read_value() - then for now, then in zip(variables, before, strict=True)]
        combined = self._reducer.reduce(changes, variables)
        triples = zip(variables, before, combined, strict=True)
        return tf.group(*[variable.assign(then + change) for variable, then, change in triples])


def _aggregation(
    reducer: GradientReducer, passes: int, average: bool, reduce: Any
) -> LocalGradientAggregationHelper | None:
    if passes == 1:
        return None
    return LocalGradientAggregationHelper(
        passes, reduce, reducer.sparse_as_dense, average, process_set=reducer.process_set, scale_local_gradients=False
    )


def _unzip(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
