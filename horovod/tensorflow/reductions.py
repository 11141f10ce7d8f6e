"""Allreduce and reducescatter of tensors, variables and IndexedSlices."""

# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set, require_id
from horovod.common.reduce_ops import Average, Sum, reduce_op
from horovod.tensorflow import collectives
from horovod.tensorflow.autograph import as_written
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.tensors import REDUCED, as_tensors


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over all ranks of a set; differentiable.

    Args:
        tensor: A tensor, variable or IndexedSlices; shape and dtype must be the same on all ranks. IndexedSlices are
            gathered instead: their result has the slices of all ranks.
        average: Deprecated; use op.
        device_dense: Where the operation is to be run, for tensors.
        device_sparse: Where the operation is to be run, for IndexedSlices.
        compression: How the tensor travels.
        op: Average (default), Sum, Adasum, Min, Max or Product; of IndexedSlices Average or Sum.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.
        name: What matches the operation with the other ranks'.
        process_set: The ranks that take part.
        ignore_name_scope: In a graph, leave the name scopes out of the name.

    Raises:
        ValueError: A wrong argument.
        NotImplementedError: Of IndexedSlices, another op or a factor.
        tf.errors.InvalidArgumentError: The engine refused it on this rank.
        tf.errors.FailedPreconditionError: The ranks disagree about the tensor, or Horovod is not initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    kind = reduce_op(op, average)
    full_name = operation_name("allreduce", name, ignore_name_scope=ignore_name_scope)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            _refuse_scaling(prescale_factor, postscale_factor)
            return reduce_slices([tensor], full_name, kind, process_set)[0]
    with tf.device(device_dense):
        return reduce_tensors([tensor], full_name, kind, process_set, compression, (prescale_factor, postscale_factor))[
            0
        ]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors over all ranks of a set, as one operation: see allreduce."""
    if not tensors:
        return []
    kind = reduce_op(op, average)
    full_name = operation_name("grouped_allreduce", name, ignore_name_scope=ignore_name_scope)
    results: list[Any] = list(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in set(sparse)]
    with tf.device(device_dense):
        reduced = reduce_tensors(
            [tensors[i] for i in dense],
            full_name,
            kind,
            process_set,
            compression,
            (prescale_factor, postscale_factor),
        )
    if sparse:
        _refuse_scaling(prescale_factor, postscale_factor)
        with tf.device(device_sparse):
            reduced += reduce_slices([tensors[i] for i in sparse], f"{full_name}.sparse", kind, process_set)
    for i, result in zip([*dense, *sparse], reduced, strict=True):
        results[i] = result
    return results


def reduce_tensors(
    tensors: Sequence[Any],
    full_name: str,
    op: int,
    process_set: ProcessSet,
    compression: Any = Compression.none,
    factors: tuple[float, float] = (1.0, 1.0),
) -> list[Any]:
    """Reduces tensors as one operation whose whole name is given."""
    pairs = [compression.compress(tensor) for tensor in as_tensors(tensors, REDUCED)]
    compressed = [tensor for tensor, _ in pairs]
    reduced = collectives.allreduce(compressed, full_name, op, require_id(process_set), *factors)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def reduce_slices(slices: Sequence[Any], full_name: str, op: int, process_set: ProcessSet) -> list[Any]:
    """Gathers IndexedSlices, and divides the values by the number of ranks for an average.

    Raises:
        NotImplementedError: Another op than Average and Sum.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{full_name}: of IndexedSlices only the average and the sum can be computed. Make a tensor of it, by "
            "tf.convert_to_tensor or sparse_as_dense=True."
        )
    parts = as_tensors([part for one in slices for part in (one.values, one.indices)])
    gathered, _ = collectives.allgather(parts, full_name, require_id(process_set))
    results = []
    for i, one in enumerate(slices):
        values, indices = gathered[2 * i : 2 * i + 2]
        if op == Average:
            values = tf.cast(values / tf.cast(process_set.size(), values.dtype), values.dtype)
        results.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return results


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces a tensor over all ranks of a set, and gives each of them its own rows of the result; differentiable.

    Of n rows, the r-th of s ranks gets n / s, and one more if r < n % s; the first rank has the first rows.

    Args:
        tensor: This rank's values; shape and dtype must be the same on all ranks.
        device_dense: Where the operation is to be run.
        compression: How the tensor travels.
        op: Average or Sum.
        name: What matches the operation with the other ranks'.
        process_set: The ranks that take part.
        ignore_name_scope: In a graph, leave the name scopes out of the name.
        prescale_factor: Multiplies the values before the reduction.
        postscale_factor: Multiplies them after it.

    Raises:
        ValueError: A wrong argument.
        tf.errors.AbortedError: Another op.
        tf.errors.InvalidArgumentError: A scalar.
        tf.errors.FailedPreconditionError: The ranks disagree about the tensor, or Horovod is not initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    full_name = operation_name("reducescatter", name, ignore_name_scope=ignore_name_scope)
    factors = (prescale_factor, postscale_factor)
    with tf.device(device_dense):
        return _scatter([tensor], full_name, op, process_set, compression, factors)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduces several tensors, and gives each rank its rows of each, as one operation: see reducescatter."""
    if not tensors:
        return []
    full_name = operation_name("grouped_reducescatter", None)
    factors = (prescale_factor, postscale_factor)
    with tf.device(device_dense):
        return _scatter(tensors, full_name, op, process_set, compression, factors)


def _scatter(
    tensors: Sequence[Any],
    full_name: str,
    op: int,
    process_set: ProcessSet,
    compression: Any,
    factors: tuple[float, float],
) -> list[Any]:
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise ValueError(f"{full_name}: IndexedSlices can't be scattered. Make tensors of them: tf.convert_to_tensor.")
    pairs = [compression.compress(tensor) for tensor in as_tensors(tensors, REDUCED)]
    compressed = [tensor for tensor, _ in pairs]
    reduced = collectives.reducescatter(compressed, full_name, op, require_id(process_set), *factors)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def _refuse_scaling(prescale_factor: float, postscale_factor: float) -> None:
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError(
            "prescale_factor and postscale_factor can't be used with IndexedSlices. Make a tensor of it, by "
            "tf.convert_to_tensor or sparse_as_dense=True."
        )
