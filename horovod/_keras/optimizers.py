"""Keras optimizers that step by the average of all ranks' gradients.

The optimizer's class gets a subclass of the same name, and the optimizer becomes one of that: its state stays what it
is, and what is saved can be loaded without Horovod.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from horovod._keras.framework import other_backend
from horovod._keras.loss_scale import agree_on_finite_gradients
from horovod.common.gradient_reduction import GradientReduction, require_sum_or_average


class Distributed:
    """What every distributed Keras optimizer is."""

    _hvd_reducer: GradientReduction
    _hvd_aggregation: Any  # a LocalGradientAggregationHelper, or None

    def register_local_var(self, var: Any) -> None:
        """From now on the gradient of this variable stays this rank's own."""
        self._hvd_reducer.add_local(var)

    def _hvd_step(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Callable[[list[Any]], Any]) -> Any:
        """Reduces the gradients and applies them; if several passes make a step, at the last of them only."""
        if self._hvd_aggregation is None:
            return apply(self._hvd_reducer.reduce(gradients, variables))
        reduced = self._hvd_aggregation.compute_gradients(gradients, variables)

        def apply_reduced() -> None:
            apply(reduced)

        present = [gradient for gradient in reduced if gradient is not None]
        self._hvd_aggregation.apply_gradients(apply_reduced, self, *present)
        return None


class _Keras3(Distributed):
    """Put before the class of an optimizer of Keras 3, all of whose ways lead through apply."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        base: Any = super()
        own: Any = self
        variables = own._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not own.built:
            own.build(variables)  # here, not within a branch of a graph
        return self._hvd_step(list(grads), variables, lambda reduced: base.apply(reduced, trainable_variables))


class _Keras2(Distributed):
    """Put before the class of an optimizer of Keras 2, new or legacy."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        own: Any = self
        pairs = list(grads_and_vars)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if hasattr(own, "build") and not getattr(own, "_built", True):
            import tensorflow as tf

            with tf.init_scope():
                own.build(variables)
        result = self._hvd_step(
            gradients,
            variables,
            lambda reduced: base.apply_gradients(list(zip(reduced, variables, strict=True)), *args, **kwargs),
        )
        return own.iterations if result is None else result


def distributed(
    framework: ModuleType,
    optimizer: Any,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    *,
    name: str | None,
    **arguments: Any,
) -> Any:
    """Makes an optimizer of Keras 2 or 3 a distributed one, and returns it.

    Args:
        framework: What its tensors are of: on_tensorflow or on_torch.
        optimizer: The optimizer.
        backward_passes_per_step: How many gradients are added up before they are reduced and applied.
        average_aggregated_gradients: Divide what was added up by that.
        name: Prefix of the names of operations.
        **arguments: Of a GradientReducer.

    Raises:
        ValueError: A wrong argument, no optimizer, or one that is distributed already.
    """
    require_sum_or_average(arguments["op"])
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: the optimizer has been given to DistributedOptimizer before.")
    if not (hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "get_config")):
        raise ValueError(
            f"DistributedOptimizer: expected an optimizer of tf.compat.v1.train, Keras 3 or tf-keras, got "
            f"{type(optimizer).__name__}."
        )
    base = type(optimizer)
    is_keras3 = hasattr(optimizer, "apply")
    if is_keras3 and (backend := sys.modules["keras"].backend.backend()) != framework.BACKEND:
        raise ValueError(other_backend("DistributedOptimizer", backend, framework.BACKEND, framework.BACKEND))
    reducer = framework.GradientReducer(name=name or f"Distributed{base.__name__}", **arguments)
    aggregation = None
    if backward_passes_per_step != 1:
        aggregation = framework.LocalGradientAggregationHelper(
            backward_passes_per_step,
            reducer.reduce,
            reducer.sparse_as_dense,
            average_aggregated_gradients,
            process_set=reducer.process_set,
            name=reducer.name,
        )
    members: dict[str, Any] = {"__module__": base.__module__}
    if not is_keras3:  # users call it in a tf.function; that of Keras 3 is called by Keras
        members["apply_gradients"] = framework.as_written(_Keras2.apply_gradients)
    made = type(base.__name__, (_Keras3 if is_keras3 else _Keras2, base), members)
    # Not by setattr: Keras would track these.
    object.__setattr__(optimizer, "__class__", made)
    object.__setattr__(optimizer, "_hvd_reducer", reducer)
    object.__setattr__(optimizer, "_hvd_aggregation", aggregation)
    agree_on_finite_gradients(framework, optimizer)
    return optimizer
