"""Horovod for tf.keras, Keras 3 or 2: `import horovod.tensorflow.keras as hvd`."""

# ruff: noqa: PLR0917

from typing import Any

import tensorflow as tf

from horovod._keras import on_tensorflow as _framework
from horovod._keras.framework import other_backend as _other_backend
from horovod._keras.models import load_model as _load_model
from horovod._keras.on_tensorflow import allgather, broadcast, reducescatter
from horovod._keras.optimizers import distributed as _distributed
from horovod.common.gradient_reduction import groups_of as _groups_of
from horovod.common.reduce_ops import Average, Sum
from horovod.common.util import is_version_greater_equal_than
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_global_variables
from horovod.tensorflow.keras import callbacks
from horovod.tensorflow.mpi_ops import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

if tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        _other_backend("horovod.tensorflow.keras", tf.keras.backend.backend(), "TensorFlow", "tensorflow")
    )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A Keras optimizer that steps by the average of all ranks' gradients: the given one, which is changed itself.

    Args:
        optimizer: One of tf.keras.
        name: Prefix of the names of operations.
        device_dense: Where gradients that are tensors are reduced.
        device_sparse: Where gradients that are IndexedSlices are reduced.
        compression: How gradients travel.
        sparse_as_dense: Make tensors of IndexedSlices, instead of gathering them.
        gradient_predivide_factor: Divides gradients by it before the reduction, and multiplies them by it afterwards;
            with Average only.
        op: Average or Sum.
        backward_passes_per_step: How many gradients are added up before they are reduced and applied.
        average_aggregated_gradients: Divide what was added up by backward_passes_per_step.
        num_groups: Deprecated; use groups.
        groups: A number of groups, or lists of variables: gradients of a group are reduced together.
        process_set: The ranks that take part; on others the optimizer is as before.
        scale_local_gradients: Divide the gradients of local variables (register_local_var) by the number of ranks, as
            those of all are.

    Raises:
        ValueError: A wrong argument, or no optimizer.
    """
    return _distributed(
        _framework,
        optimizer,
        backward_passes_per_step,
        average_aggregated_gradients,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=_groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a number, array or tensor over all ranks.

    Args:
        value: This rank's.
        name: What matches the operation with the other ranks'.
        average: Deprecated; use op.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.
        op: Average, Sum, Adasum, Min, Max or Product.
        compression: How the value travels.
    """
    return _framework.allreduce(value, name, average, prescale_factor, postscale_factor, op, compression)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model that was saved with its optimizer, which becomes a distributed one with its state.

    Args:
        filepath: The file.
        custom_optimizers: Optimizer classes that Keras does not know.
        custom_objects: Whatever else Keras does not know, by name.
        compression: How gradients travel.
        legacy_opts: Makes no difference: the file says which optimizer it is.
    """
    known = {"custom_optimizers": custom_optimizers, "custom_objects": custom_objects}
    return _load_model(_framework, tf.keras, filepath, **known, compression=compression)


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_version_greater_equal_than",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
