"""Horovod for Keras 3 on TensorFlow or PyTorch: `import horovod.keras as hvd`."""

# ruff: noqa: PLR0917

from typing import Any

import keras

from horovod._keras.framework import framework_of as _framework_of
from horovod._keras.models import load_model as _load_model
from horovod._keras.optimizers import distributed as _distributed
from horovod.common.basics import basics as _basics
from horovod.common.gradient_reduction import groups_of as _groups_of
from horovod.common.gradient_reduction import variables_of_layers as _variables_of_layers
from horovod.common.process_sets import ProcessSet as _ProcessSet
from horovod.common.process_sets import global_process_set
from horovod.common.reduce_ops import Adasum, Average, Sum
from horovod.keras import callbacks

_framework = _framework_of(keras)

Compression = _framework.Compression
allgather = _framework.allgather
broadcast = _framework.broadcast
broadcast_global_variables = _framework.broadcast_global_variables
reducescatter = _framework.reducescatter
ccl_built = _basics.ccl_built
cross_rank = _basics.cross_rank
cross_size = _basics.cross_size
cuda_built = _basics.cuda_built
ddl_built = _basics.ddl_built
gloo_built = _basics.gloo_built
gloo_enabled = _basics.gloo_enabled
init = _basics.init
is_initialized = _basics.is_initialized
local_rank = _basics.local_rank
local_size = _basics.local_size
mpi_built = _basics.mpi_built
mpi_enabled = _basics.mpi_enabled
mpi_threads_supported = _basics.mpi_threads_supported
nccl_built = _basics.nccl_built
rank = _basics.rank
rocm_built = _basics.rocm_built
shutdown = _basics.shutdown
size = _basics.size
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """A Keras optimizer that steps by the average of all ranks' gradients: the given one, which is changed itself.

    Args:
        optimizer: One of keras.optimizers.
        name: Prefix of the names of operations.
        device_dense: Where gradients that are tensors are reduced.
        device_sparse: Where gradients that are IndexedSlices are reduced.
        compression: How gradients travel.
        sparse_as_dense: Make tensors of IndexedSlices, instead of gathering them.
        gradient_predivide_factor: Divides gradients by it before the reduction, and multiplies them by it afterwards;
            with Average only.
        op: Average or Sum.
        num_groups: Deprecated; use groups.
        groups: A number of groups, or lists of variables: gradients of a group are reduced together.

    Raises:
        ValueError: A wrong argument, or no optimizer.
    """
    return _distributed(
        _framework,
        optimizer,
        1,
        False,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=_groups_of(groups, num_groups),
        process_set=global_process_set,
        scale_local_gradients=True,
    )


def PartialDistributedOptimizer(
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
    groups: Any = None,
    process_set: _ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As DistributedOptimizer, but the gradients of some layers stay each rank's own.

    Args:
        optimizer: One of keras.optimizers.
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
        groups: A number of groups, or lists of variables: gradients of a group are reduced together.
        process_set: The ranks that take part; on others the optimizer is as before.
        local_layers: A layer or a list of layers, whose gradients stay each rank's own.
        scale_local_gradients: Divide the gradients of local variables (register_local_var) by the number of ranks, as
            those of all are.

    Raises:
        ValueError: A wrong argument, or no optimizer.
    """
    wrapped = _distributed(
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
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in _variables_of_layers(local_layers):
        wrapped.register_local_var(variable)
    return wrapped


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a number, array or tensor over all ranks.

    Args:
        value: This rank's.
        name: What matches the operation with the other ranks'.
        average: Deprecated; to use op, give None.
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
    return _load_model(_framework, keras, filepath, **known, compression=compression)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
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
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
