"""The operations that are not reductions, under the module's name in the existing Horovod; and who the process is."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common import names
from horovod.common.basics import basics as _basics
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    require_id,
)
from horovod.common.reduce_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
)
from horovod.common.util import num_rank_is_power_2
from horovod.tensorflow import collectives
from horovod.tensorflow.autograph import as_written
from horovod.tensorflow.library import library as MPI_LIB
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.tensors import as_tensor, as_tensors

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
rank = _basics.rank
size = _basics.size
local_rank = _basics.local_rank
local_size = _basics.local_size
cross_rank = _basics.cross_rank
cross_size = _basics.cross_size
is_homogeneous = _basics.is_homogeneous
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built

check_num_rank_power_of_2 = num_rank_is_power_2


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates the tensors of all ranks of a set, in the order of ranks, along the first dimension; differentiable.

    Args:
        tensor: This rank's rows. Their number may differ between ranks, and be 0; the other dimensions may not.
        name: What matches the operation with the other ranks'.
        ignore_name_scope: In a graph, leave the name scopes out of the name.
        process_set: The ranks that take part.

    Raises:
        ValueError: A wrong argument.
        tf.errors.FailedPreconditionError: The ranks disagree about the tensor, or it is a scalar, or Horovod is not
            initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    tensor = as_tensor(tensor)
    full_name = operation_name("allgather", name, ignore_name_scope=ignore_name_scope)
    gathered, _ = collectives.allgather([tensor], full_name, require_id(process_set))
    return gathered[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenates several tensors of all ranks, each with its like, as one operation: see allgather."""
    tensors = as_tensors(tensors)
    if not tensors:
        return []
    full_name = operation_name("grouped_allgather", name, ignore_name_scope=ignore_name_scope)
    gathered, _ = collectives.allgather(tensors, full_name, require_id(process_set))
    return list(gathered)


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor on every rank of a set; differentiable.

    Args:
        tensor: The values to send; on other ranks than the root only shape and dtype matter.
        root_rank: The global rank that sends.
        name: What matches the operation with the other ranks'.
        ignore_name_scope: In a graph, leave the name scopes out of the name.
        process_set: The ranks that take part.

    Raises:
        ValueError: A wrong argument.
        tf.errors.InvalidArgumentError: The root is no member of the set.
        tf.errors.FailedPreconditionError: The ranks disagree about the tensor, or Horovod is not initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    tensor = as_tensor(tensor)
    full_name = operation_name("broadcast", name, ignore_name_scope=ignore_name_scope)
    return collectives.broadcast([tensor], full_name, root_rank, require_id(process_set))[0]


@as_written
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives variables of TensorFlow or Keras the root's values, as one operation.

    Args:
        variables: The same on all ranks, in the same order.
        root_rank: The global rank that sends.
        name: What matches the operation with the other ranks'.
        process_set: The ranks that take part.

    Returns:
        The variables when run eagerly, otherwise the assignments.
    """
    tensors = as_tensors(variables)
    if not tensors:
        return []
    full_name = operation_name("broadcast_", name)
    values = collectives.broadcast(tensors, full_name, root_rank, require_id(process_set))
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return list(variables) if tf.executing_eagerly() else assigned


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows to each rank of a set, and returns what came from each; differentiable.

    Args:
        tensor: This rank's rows, first those for the first rank of the set, then those for the second, and so on. All
            dimensions but the first must be the same on all ranks.
        splits: How many rows go to each rank. Rows beyond their sum are not sent. None: equal parts.
        name: What matches the operation with the other ranks'.
        ignore_name_scope: In a graph, leave the name scopes out of the name.
        process_set: The ranks that take part.

    Returns:
        The received rows, in the order of ranks; if splits were given, also how many came from each rank.

    Raises:
        ValueError: A wrong argument.
        tf.errors.InvalidArgumentError: Splits that don't fit, or no splits and a number of rows that can't be divided
            by the number of ranks.
        tf.errors.FailedPreconditionError: The ranks disagree about the tensor, or it is a scalar, or Horovod is not
            initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    tensor = as_tensor(tensor)
    full_name = operation_name("alltoall", name, ignore_name_scope=ignore_name_scope)
    counts = tf.zeros([0], tf.int32) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    rows, received = collectives.alltoall(tensor, counts, full_name, require_id(process_set))
    return rows if splits is None else (rows, received)


@as_written
def join() -> Any:
    """Says that this rank has no more data; ends when every rank has said so.

    Until then the others' allreduces, allgathers and alltoalls go on: this rank takes part without contributing
    anything, though an Average is still divided by the number of all ranks. A broadcast or reducescatter needs all
    ranks, and fails where it is called.

    Returns:
        The rank that joined last.
    """
    last = MPI_LIB.horovod_join()
    if tf.executing_eagerly():
        # The ranks that joined early have counted fewer unnamed operations of other bindings.
        names.restart_counting()
    return last


# ---- Who the process is, at the time when a graph runs ---------------------------------------------------------------


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks in a process set."""
    return tf.identity(MPI_LIB.horovod_place(process_set=process_set_id).size, name=name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host."""
    return tf.identity(MPI_LIB.horovod_place(process_set=0).local_size, name=name)


@as_written
def rank_op(name: str | None = None) -> Any:
    """This process's number among all, from 0."""
    return tf.identity(MPI_LIB.horovod_place(process_set=0).rank, name=name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """This process's number among those of its host, from 0."""
    return tf.identity(MPI_LIB.horovod_place(process_set=0).local_rank, name=name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process is a member of the process set, 0 if not.

    Raises:
        tf.errors.InvalidArgumentError: There is no such set.
        tf.errors.FailedPreconditionError: Horovod is not initialized.
    """
    return tf.identity(MPI_LIB.horovod_place(process_set=process_set_id).included, name=name)


__all__ = [
    "MPI_LIB",
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
