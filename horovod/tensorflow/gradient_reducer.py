"""How the gradients of a step become those of all ranks: what tapes and all optimizers share."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_ops import Average, Sum
from horovod.common.util import split_list
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.reductions import reduce_slices, reduce_tensors
from horovod.tensorflow.util import reference


@dataclasses.dataclass
class GradientReducer:
    """The arguments of the wrappers, and the gradients that are not reduced.

    Raises:
        ValueError: Arguments that don't go together.
    """

    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    local: set[Any] = dataclasses.field(default_factory=set)  # references of local variables

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        _check_groups(self.groups)

    def add_local(self, variable: Any) -> None:
        """From now on the gradient of this variable stays this rank's own."""
        self.local.add(reference(variable))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks.

        Args:
            gradients: Tensors, IndexedSlices, or None where there is none: on all ranks alike.
            variables: Of what they are the gradients.
        """
        results = [self._dense(gradient) for gradient in gradients]
        basics.size()  # an error if Horovod is not initialized
        if not self.process_set.included() or self.process_set.size() == 1:
            return results
        references = [reference(variable) for variable in variables]
        own = [i for i, known in enumerate(references) if known in self.local and results[i] is not None]
        if self.scale_local_gradients:
            for i in own:
                results[i] = _divided(results[i], self.process_set.size())
        shared = [i for i, gradient in enumerate(results) if gradient is not None and i not in set(own)]
        for part in self._parts(shared, references):
            with tf.name_scope(""):
                reduced = self._reduce_together([results[i] for i in part], f"{self.name}/gradient_{part[0]}")
            for i, gradient in zip(part, reduced, strict=True):
                results[i] = gradient
        return results

    def _dense(self, gradient: Any) -> Any:
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _parts(self, shared: list[int], references: list[Any]) -> list[Sequence[int]]:
        """Which gradients make one operation.

        In a graph each is one of its own, which starts as soon as the gradient is there. When run eagerly all of them
        are there at once, and one operation has them all under way together.
        """
        if isinstance(self.groups, int):
            return [part for part in split_list(shared, self.groups) if part]
        if self.groups is not None:
            number = {reference(variable): n for n, group in enumerate(self.groups) for variable in group}
            parts: dict[Any, list[int]] = {}
            for i in shared:
                parts.setdefault(number.get(references[i], ("alone", i)), []).append(i)
            return list(parts.values())
        if tf.executing_eagerly():
            return [shared] if shared else []
        return [[i] for i in shared]

    def _reduce_together(self, gradients: list[Any], name: str) -> list[Any]:
        results = list(gradients)
        sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        dense = [i for i in range(len(gradients)) if i not in set(sparse)]
        factors = (1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor)
        if dense:
            full_name = operation_name("allreduce", name)
            with tf.device(self.device_dense):
                reduced = reduce_tensors(
                    [gradients[i] for i in dense], full_name, self.op, self.process_set, self.compression, factors
                )
            for i, gradient in zip(dense, reduced, strict=True):
                results[i] = gradient
        if sparse:
            full_name = operation_name("allgather", name)
            with tf.device(self.device_sparse):
                gathered = reduce_slices([gradients[i] for i in sparse], full_name, self.op, self.process_set)
            for i, slices in zip(sparse, gathered, strict=True):
                results[i] = slices
        return results


def groups_of(groups: Any, num_groups: int) -> Any:
    """The argument `groups`, or what the deprecated `num_groups` says."""
    if num_groups == 0:
        return groups
    warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


def require_sum_or_average(op: int) -> None:
    """Fails for an op that Keras optimizers have no use for.

    Raises:
        ValueError: It is neither Average nor Sum.
    """
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")


def _check_groups(groups: Any) -> None:
    expected = "groups should be a non-negative integer or a list of list of tf.Variable."
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise ValueError(f"{expected} It is {groups}: for no groups leave it out.")
        return
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"{expected} It is a {type(groups).__name__}.")
    seen: set[Any] = set()
    for number, group in enumerate(groups):
        for variable in group:
            known = reference(variable)
            if known in seen:
                raise ValueError(f"groups[{number}] holds a variable that is in another group, or in this one twice.")
            seen.add(known)


def _divided(gradient: Any, number: int | None) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, number)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(number, gradient.dtype)
