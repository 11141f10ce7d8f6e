"""What the Keras binding needs of PyTorch, for Keras 3 with KERAS_BACKEND=torch."""

# ruff: noqa: PLR0917

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

import horovod.torch as hvd
from horovod.common.gradient_reduction import GradientReduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_ops import Min
from horovod.torch.compression import Compression

BACKEND = "torch"

__all__ = [
    "BACKEND",
    "Compression",
    "GradientReducer",
    "LocalGradientAggregationHelper",
    "agree",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "multiply",
    "number",
    "reducescatter",
    "reference",
]


def reference(variable: Any) -> Any:
    """What can be hashed, and is the same for the same variable: its tensor, which it keeps."""
    return getattr(variable, "value", variable)


class GradientReducer(GradientReduction):
    """Reduces tensors, all of which the backward pass has computed before."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.device_dense or self.device_sparse:
            raise ValueError("device_dense and device_sparse are for TensorFlow, and Keras runs on PyTorch.")

    def reference(self, variable: Any) -> Any:
        """What can be hashed, and is the same for the same variable."""
        return reference(variable)

    def all_are_there(self) -> bool:
        """Always."""
        return True

    def prepared(self, gradient: Any) -> Any:
        """A sparse gradient as a dense one: Keras' optimizers take no others."""
        return gradient.to_dense() if gradient.is_sparse else gradient

    def divided(self, gradient: Any, number: int | None) -> Any:
        """The gradient divided by a number."""
        return gradient / number

    def reduce_together(self, gradients: list[Any], name: str) -> list[Any]:
        """Reduces tensors as one operation."""
        prescale, postscale = self.factors
        return hvd.grouped_allreduce(
            [gradient.detach() for gradient in gradients],
            name=name,
            compression=self.compression,
            op=self.op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self.process_set,
        )


class LocalGradientAggregationHelper:
    """Adds up gradients, and reduces and applies them on every n-th pass only: see that of horovod.tensorflow."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], list[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        name: str = "",
    ) -> None:
        """Keeps the arguments."""
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be > 0, it is {backward_passes_per_step}.")
        self.backward_passes_per_step = backward_passes_per_step
        self._reduce = allreduce_func
        self._average = average_aggregated_gradients
        self._sums: list[Any] = []
        self._passes = 0

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Adds gradients up; on every n-th pass returns the reduced sums."""
        if not self._sums:
            self._sums = [None] * len(grads)
        for i, gradient in enumerate(grads):
            if gradient is not None:
                own = gradient.detach()
                self._sums[i] = own.clone() if self._sums[i] is None else self._sums[i].add_(own)
        self._passes += 1
        if self._passes < self.backward_passes_per_step:
            return self._sums
        divisor = self.backward_passes_per_step if self._average else 1
        return self._reduce([None if total is None else total / divisor for total in self._sums], list(vars))

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], *_: Any) -> None:
        """Applies the gradients that compute_gradients has returned, if that was the n-th pass, and begins anew."""
        if self._passes == self.backward_passes_per_step:
            self._sums, self._passes = [], 0
            apply_grads_closure()


def broadcast_variables(variables: Sequence[Any], root_rank: int, device: str) -> None:
    """Gives variables the root's values; device is TensorFlow's."""
    distinct = {id(reference(variable)): reference(variable).data for variable in variables}
    hvd.broadcast_parameters(list(distinct.values()), root_rank)


def number(variable: Any) -> float:
    """The number that a variable holds."""
    return float(variable)


def multiply(variable: Any, factor: float) -> None:
    """Multiplies what a variable holds."""
    variable.assign(variable * factor)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """There are no global variables in PyTorch.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() is for graphs of TensorFlow 1, and Keras runs on PyTorch. Use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback."
    )


def agree(reducer: GradientReducer, truth: Any) -> Any:
    """Whether it is true on all ranks of the reducer's set."""
    if reducer.alone:
        return truth
    own = torch.as_tensor(truth).to(torch.int32)
    return hvd.allreduce(own, name=f"{reducer.name}/finite", op=Min, process_set=reducer.process_set).to(torch.bool)


# ---- Operations on values: numbers, arrays, tensors. The results are NumPy's -----------------------------------------


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(reference(value)).detach().cpu()


def allreduce(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """Reduces a value over all ranks."""
    reduced = hvd.allreduce(
        _tensor(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return reduced.numpy()


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates the arrays or tensors of all ranks along the first dimension."""
    return hvd.allgather(_tensor(value), name=name).numpy()


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the root's number, array or tensor."""
    return hvd.broadcast(_tensor(value), root_rank, name=name).numpy()


def reducescatter(value: Any, name: str | None = None, op: int = hvd.Average) -> Any:
    """Reduces an array or tensor over all ranks, and gives each of them its own rows of the result."""
    return hvd.reducescatter(_tensor(value), name=name, op=op).numpy()
