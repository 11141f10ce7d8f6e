"""400 small tensors that are submitted together, in several ways, and one tensor of the same bytes.

In torch, gradients of 400 parameters of 64 x 64 elements; all are rewritten before each iteration.
"""

from collections.abc import Callable

import numpy as np
import torch.distributed as dist
from peers import Array
from peers_torch import tensor_on
from subject import ASYNC, GLOO_ASYNC, GROUPED, ONE, TORCH_ASYNC, TORCH_GROUPED, Subject

import horovod.numpy as hvd
import horovod.torch as hvd_torch

TENSORS = 400
ELEMENTS = 64 * 64


class Together:
    """The tensors, and an action for each way."""

    gated = True

    def __init__(self, subject: Subject) -> None:
        """Makes the tensors: one after another in memory, as an allocator places them."""
        self._ranks = subject.ranks
        self._whole = np.ones((TENSORS, ELEMENTS), np.float32)
        self._arrays: list[Array] = [row.reshape(64, 64) for row in self._whole]
        self._tensors = [tensor_on(array) for array in self._arrays]
        self._names = [f"together.{i}" for i in range(TENSORS)]

    def action(self, way: str) -> Callable[[int], None]:
        """What is timed."""
        return {
            ONE: self._one,
            ASYNC: self._async,
            GROUPED: self._grouped,
            TORCH_ASYNC: self._torch_async,
            TORCH_GROUPED: self._torch_grouped,
            GLOO_ASYNC: self._gloo_async,
        }[way]

    def after(self, way: str) -> Callable[[int], None]:
        """Checks the results and rewrites the tensors."""

        def check_and_rewrite(_iteration: int) -> None:
            if not (self._whole == self._ranks).all():
                raise RuntimeError(f"400 tensors by {way}: not all elements became {self._ranks}.")
            self._whole.fill(1)

        return check_and_rewrite

    def _one(self, _iteration: int) -> None:
        hvd.allreduce_(self._whole, name="together", op=hvd.Sum)

    def _async(self, _iteration: int) -> None:
        handles = [
            hvd.allreduce_async_(array, name=name, op=hvd.Sum)
            for array, name in zip(self._arrays, self._names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def _grouped(self, _iteration: int) -> None:
        hvd.grouped_allreduce_(self._arrays, name="together.grouped", op=hvd.Sum)

    def _torch_async(self, _iteration: int) -> None:
        handles = [
            hvd_torch.allreduce_async_(tensor, name=name, op=hvd.Sum)
            for tensor, name in zip(self._tensors, self._names, strict=True)
        ]
        for handle in handles:
            hvd_torch.synchronize(handle)

    def _torch_grouped(self, _iteration: int) -> None:
        hvd_torch.grouped_allreduce_(self._tensors, name="together.torch", op=hvd.Sum)

    def _gloo_async(self, _iteration: int) -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in self._tensors]
        for work in works:
            if work is not None:
                work.wait()
