"""How the gradients of a step become those of all ranks, whatever they are tensors of.

This has what tapes and Keras' optimizers are told by their arguments; a framework adds how tensors are reduced.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_ops import Average, Sum
from horovod.common.util import split_list


@dataclasses.dataclass(kw_only=True)
class GradientReduction:
    """The arguments of the wrappers, and the gradients that are not reduced.

    Raises:
        ValueError: Arguments that don't go together.
    """

    name: str
    compression: Any
    device_dense: str = ""
    device_sparse: str = ""
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
        self._check_groups()

    # ---- What a framework adds ---------------------------------------------------------------------------------------

    def reference(self, variable: Any) -> Any:
        """What can be hashed, and is the same for the same variable."""
        raise NotImplementedError

    def all_are_there(self) -> bool:
        """Whether the gradients of a step are computed before the first is reduced."""
        raise NotImplementedError

    def prepared(self, gradient: Any) -> Any:
        """The gradient as it is to be reduced."""
        raise NotImplementedError

    def divided(self, gradient: Any, number: int | None) -> Any:
        """The gradient divided by a number."""
        raise NotImplementedError

    def reduce_together(self, gradients: list[Any], name: str) -> list[Any]:
        """Reduces gradients as one operation."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether there is nobody to reduce with: this rank is not in the process set, or the only one."""
        basics.size()  # an error if Horovod is not initialized
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def factors(self) -> tuple[float, float]:
        """What gradients are multiplied by before and after the reduction."""
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor

    def add_local(self, variable: Any) -> None:
        """From now on the gradient of this variable stays this rank's own."""
        self.local.add(self.reference(variable))

    def is_local(self, variable: Any) -> bool:
        """Whether its gradient stays this rank's own."""
        return self.reference(variable) in self.local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks.

        Args:
            gradients: Of any kind that the framework has, or None where there is none: on all ranks alike.
            variables: Of what they are the gradients.
        """
        results = [None if gradient is None else self.prepared(gradient) for gradient in gradients]
        if self.alone:
            return results
        references = [self.reference(variable) for variable in variables]
        own = {i for i, known in enumerate(references) if known in self.local and results[i] is not None}
        if self.scale_local_gradients:
            for i in own:
                results[i] = self.divided(results[i], self.process_set.size())
        shared = [i for i, gradient in enumerate(results) if gradient is not None and i not in own]
        for part in self._parts(shared, references):
            reduced = self.reduce_together([results[i] for i in part], f"{self.name}/gradient_{part[0]}")
            for i, gradient in zip(part, reduced, strict=True):
                results[i] = gradient
        return results

    def _parts(self, shared: list[int], references: list[Any]) -> list[Sequence[int]]:
        """Which gradients make one operation.

        In a graph each is one of its own, which starts as soon as the gradient is there. Where all of them are there at
        once, one operation has them all under way together.
        """
        if isinstance(self.groups, int):
            return [part for part in split_list(shared, self.groups) if part]
        if self.groups is not None:
            number = {self.reference(variable): n for n, group in enumerate(self.groups) for variable in group}
            parts: dict[Any, list[int]] = {}
            for i in shared:
                parts.setdefault(number.get(references[i], ("alone", i)), []).append(i)
            return list(parts.values())
        if self.all_are_there():
            return [shared] if shared else []
        return [[i] for i in shared]

    def _check_groups(self) -> None:
        expected = "groups should be a non-negative integer or a list of list of tf.Variable."
        groups = self.groups
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
                known = self.reference(variable)
                if known in seen:
                    raise ValueError(
                        f"groups[{number}] holds a variable that is in another group, or in this one twice."
                    )
                seen.add(known)


def groups_of(groups: Any, num_groups: int) -> Any:
    """The argument `groups`, or what the deprecated `num_groups` says."""
    if num_groups == 0:
        return groups
    warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


def variables_of_layers(layers: Any) -> list[Any]:
    """What `local_layers` says: the trainable variables of a layer, of a list of layers, or of None."""
    if layers is None:
        return []
    several = layers if isinstance(layers, (list, tuple, set)) else [layers]
    return [variable for layer in several for variable in layer.trainable_weights]


def require_sum_or_average(op: int) -> None:
    """Fails for an op that Keras optimizers have no use for.

    Raises:
        ValueError: It is neither Average nor Sum.
    """
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
