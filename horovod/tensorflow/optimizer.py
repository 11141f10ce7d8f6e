"""DistributedOptimizer for any optimizer of TensorFlow or Keras."""

# ruff: noqa: PLR0917

from typing import Any

import tensorflow as tf

from horovod._keras import on_tensorflow
from horovod._keras.optimizers import distributed
from horovod.common.gradient_reduction import groups_of
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_ops import Adasum, Average
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_reducer import GradientReducer
from horovod.tensorflow.v1_optimizers import V1AdasumOptimizer, V1DistributedOptimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that steps by the average of all ranks' gradients.

    Args:
        optimizer: One of tf.compat.v1.train, which gets a wrapper; or one of Keras 3 or tf-keras, which is changed
            itself and returned.
        name: Prefix of the names of operations.
        use_locking: Of an optimizer of TensorFlow 1.
        device_dense: Where gradients that are tensors are reduced.
        device_sparse: Where gradients that are IndexedSlices are reduced.
        compression: How gradients travel.
        sparse_as_dense: Make tensors of IndexedSlices, instead of gathering them.
        backward_passes_per_step: How many gradients are added up before they are reduced and applied.
        op: Average or Sum; for optimizers of TensorFlow 1 also Adasum, which combines the ranks' steps.
        gradient_predivide_factor: Divides gradients by it before the reduction, and multiplies them by it afterwards;
            with Average only.
        average_aggregated_gradients: Divide what was added up by backward_passes_per_step.
        num_groups: Deprecated; use groups.
        groups: A number of groups, or lists of variables: gradients of a group are reduced together.
        process_set: The ranks that take part; on others the optimizer is as before.
        scale_local_gradients: Divide the gradients of local variables (register_local_var) by the number of ranks, as
            those of all are.

    Raises:
        ValueError: A wrong argument, or no optimizer.
    """
    chosen = groups_of(groups, num_groups)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return distributed(
            on_tensorflow,
            optimizer,
            backward_passes_per_step,
            average_aggregated_gradients,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=chosen,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    name = name or f"Distributed{type(optimizer).__name__}"
    reducer = GradientReducer(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=chosen,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if op != Adasum:
        return V1DistributedOptimizer(
            optimizer, name, use_locking, reducer, backward_passes_per_step, average_aggregated_gradients
        )
    if average_aggregated_gradients:
        raise ValueError("Adasum does not work with average_aggregated_gradients == True")
    return V1AdasumOptimizer(optimizer, name, use_locking, reducer, backward_passes_per_step)
