"""Tapes whose gradients are those of all ranks."""

# ruff: noqa: PLR0917

import copy
from typing import Any

import tensorflow as tf

from horovod.common.gradient_reduction import groups_of, variables_of_layers
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_ops import Average
from horovod.tensorflow.autograph import as_written
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_reducer import GradientReducer


class _DistributedTape:
    """What is put before the class of a tape."""

    _reducer: GradientReducer

    @as_written
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: Any = False, **kwargs: Any
    ) -> Any:
        """As of a tape, but reduced over the ranks; the gradients of local sources stay this rank's own.

        Args:
            target: What is differentiated.
            sources: By what.
            output_gradients: As of a tape.
            use_generic_names: Makes no difference: the ranks' variables may have different names anyway.
            **kwargs: As of a tape.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients):  # which is at this place in TensorFlow
            kwargs["unconnected_gradients"] = use_generic_names
        gradients = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        flat = tf.nest.flatten(gradients, expand_composites=False)
        reduced = self._reducer.reduce(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, reduced)

    @as_written
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """What gradient() returns, in two lists of variables with their gradients: this rank's own, and the reduced."""
        variables = tf.nest.flatten(sources)
        pairs = list(zip(variables, self.gradient(target, variables, output_gradients), strict=True))
        own = [self._reducer.is_local(variable) for variable in variables]
        local = [pair for pair, is_own in zip(pairs, own, strict=True) if is_own]
        return local, [pair for pair, is_own in zip(pairs, own, strict=True) if not is_own]

    def register_local_source(self, source: Any) -> None:
        """From now on the gradient of this variable stays this rank's own."""
        self._reducer.add_local(source)


@as_written
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose gradient() returns the average of all ranks' gradients.

    Args:
        gradtape: A tf.GradientTape, which records or has recorded; it stays as it is.
        device_dense: Where gradients that are tensors are reduced.
        device_sparse: Where gradients that are IndexedSlices are reduced.
        compression: How gradients travel.
        sparse_as_dense: Make tensors of IndexedSlices, instead of gathering them.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: Divides gradients by it before the reduction, and multiplies them by it afterwards;
            with Average only.
        num_groups: Deprecated; use groups.
        groups: A number of groups, or lists of variables: gradients of a group are reduced together.
        process_set: The ranks that take part; on others the tape is as before.
        scale_local_gradients: Divide the gradients of local sources by the number of ranks, as those of all are.

    Raises:
        ValueError: A wrong argument.
    """
    tape = copy.copy(gradtape)
    base = type(gradtape)
    tape.__class__ = type(base.__name__, (_DistributedTape, base), {})
    tape._reducer = GradientReducer(
        name="DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


@as_written
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As DistributedGradientTape, but the gradients of some layers stay each rank's own.

    Args:
        gradtape: See DistributedGradientTape, as for all arguments but one.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        op: See there.
        gradient_predivide_factor: See there.
        num_groups: See there.
        groups: See there.
        process_set: See there.
        local_layers: A layer or a list of layers, which are not reduced.
        scale_local_gradients: See there.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape
