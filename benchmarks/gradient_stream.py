"""A step of data-parallel training, without the model: gradients become ready one after another and are all reduced.

The gradients are many small arrays with a few large ones between them. Like a backward pass, a step goes through them
from the last to the first, starts the reduction of each, and then waits for all. Compared are

    horovod              each array by hvd.allreduce_async_; the engine fuses
    gloo, by tensor      each array by all_reduce(async_op=True)
    gloo, 25 MiB buckets arrays are copied into buckets, each reduced when full, and copied out at the end, as
                         DistributedDataParallel does by default

each once with nothing between the arrays and once with a little computation for each, which communication may overlap.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import Gate, time_actions
from peers import Array, Peer
from summary import Comparison, Subject, compare

_BUCKET_BYTES = 25 << 20


@dataclasses.dataclass(frozen=True)
class Model:
    """The shapes of the gradients, in the order of the forward pass."""

    small: int = 400
    small_elements: int = 64 * 64
    large: int = 6
    large_elements: int = 4 << 20

    def elements(self) -> list[int]:
        """The number of elements of each gradient: after each sixth of the small ones comes a large one."""
        sizes: list[int] = []
        for i in range(self.large):
            share = self.small * (i + 1) // self.large - self.small * i // self.large
            sizes += [self.small_elements] * share + [self.large_elements]
        return sizes


class Computation:
    """Stands for the backward pass between two gradients: some multiplications of 64 x 64 matrices."""

    def __init__(self) -> None:
        """Makes the matrices."""
        self._left = np.full((64, 64), 0.5, np.float32)
        self._right = np.full((64, 64), 0.25, np.float32)
        self._out = np.empty((64, 64), np.float32)

    def __call__(self) -> None:
        """Computes for some tens of microseconds."""
        for _ in range(2):
            np.matmul(self._left, self._right, out=self._out)


def _nothing() -> None:
    """The computation of a stream without any."""


def _step_by_tensor(peer: Peer, gradients: list[Array], compute: Callable[[], None]) -> Callable[[int], None]:
    stream = [(peer.view(array), f"gradient.{i}") for i, array in enumerate(gradients)][::-1]

    def step(iteration: int) -> None:
        del iteration
        handles = []
        for view, name in stream:
            compute()
            handles.append(peer.start(view, name))
        for handle in handles:
            peer.finish(handle)

    return step


@dataclasses.dataclass
class _Bucket:
    whole: Any
    parts: list[Array]
    gradients: list[Array]


def _buckets_of(peer: Peer, gradients: list[Array]) -> list[_Bucket]:
    """Divides the gradients, last first, into buckets that close as soon as they have reached their size."""
    groups: list[list[Array]] = [[]]
    for array in reversed(gradients):
        if sum(member.nbytes for member in groups[-1]) >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(array)
    buckets = []
    for members in groups:
        flat = np.empty(sum(array.size for array in members), np.float32)
        ends = np.cumsum([array.size for array in members])
        buckets.append(_Bucket(peer.view(flat), np.split(flat, ends[:-1]), members))
    return buckets


def _step_by_bucket(peer: Peer, gradients: list[Array], compute: Callable[[], None]) -> Callable[[int], None]:
    buckets = _buckets_of(peer, gradients)

    def step(iteration: int) -> None:
        del iteration
        handles = []
        for number, bucket in enumerate(buckets):
            for part, gradient in zip(bucket.parts, bucket.gradients, strict=True):
                compute()
                np.copyto(part, gradient)
            handles.append(peer.start(bucket.whole, f"bucket.{number}"))
        for handle, bucket in zip(handles, buckets, strict=True):
            peer.finish(handle)
            for part, gradient in zip(bucket.parts, bucket.gradients, strict=True):
                np.copyto(gradient, part)

    return step


def measure_stream(
    horovod: Peer, gloo: Peer, gate: Gate, model: Model, *, ranks: int, rounds: int, computes: bool
) -> list[Comparison]:
    """Compares steps of the three kinds. Every rank calls it.

    Raises:
        RuntimeError: A peer's result is wrong.
    """
    gradients = [np.ones(elements, np.float32) for elements in model.elements()]
    compute = Computation() if computes else _nothing

    def check_and_rewrite(iteration: int) -> None:
        del iteration
        for number, array in enumerate(gradients):
            if array[0] != ranks or array[-1] != ranks:
                raise RuntimeError(f"Gradient {number} became {array[0]} and {array[-1]}, expected {ranks}.")
            array.fill(1)

    actions = [
        _step_by_tensor(horovod, gradients, compute),
        _step_by_tensor(gloo, gradients, compute),
        _step_by_bucket(gloo, gradients, compute),
    ]
    seconds = time_actions(actions, check_and_rewrite, gate, rounds, iterations=2)
    what = Subject(
        benchmark="gradient stream" + (" with computation" if computes else ""),
        ranks=ranks,
        bytes=sum(array.nbytes for array in gradients),
    )
    others = (("gloo, by tensor", seconds[1]), ("gloo, 25 MiB buckets", seconds[2]))
    return [compare(what, seconds[0], name, theirs) for name, theirs in others]
