"""Batch normalization over the batches of all ranks.

Forward, every rank sends the number of its values, their mean and the sum of their squared deviations, for each
channel. These are combined in the order of ranks (Chan, Golub, LeVeque 1979), in float64, so that all ranks normalize
with the same bits and no precision is lost where the mean is large. Backward, two sums for each channel are added up
over all ranks. A rank may have an empty batch.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.common.basics import basics
from horovod.common.process_sets import GLOBAL_ID
from horovod.common.reduce_ops import Sum
from horovod.torch import compiled_rows
from horovod.torch.allreduces import allreduce
from horovod.torch.rows import allgather


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm1d, 2d and 3d, but in training the mean and variance are those of the batches of all ranks.

    Every layer exchanges its numbers under a name of its own, by the order in which the layers of a process were made:
    so the ranks must make theirs in the same order.

    Args:
        num_features: The number of channels, the extent of the second dimension of the input.
        eps: Added to the variance.
        momentum: Weight of a new batch in the running statistics; None: all batches count the same.
        affine: Whether there are weights and biases to learn.
        track_running_stats: Whether to keep running statistics, to be used in evaluation.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        """Makes the layer and gives it its name."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._exchange_name = f"sync_batch_norm.{next(self._numbers)}"

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replaces every BatchNorm layer in a module, with its parameters and statistics; returns the module."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            layer = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            layer.weight, layer.bias = module.weight, module.bias
            layer.running_mean, layer.running_var = module.running_mean, module.running_var
            layer.num_batches_tracked = module.num_batches_tracked
            layer.training = module.training
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child))
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got {input.shape[1]}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes; over the batches of all ranks in training, as plain batch norm otherwise."""
        self._check_input_dim(input)
        if not self.training or basics.size() == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalization.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self._exchange_name
        )
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight: Any = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.mul_(1 - weight).add_(mean.to(self.running_mean.dtype) * weight)
        self.running_var.mul_(1 - weight).add_(unbiased.to(self.running_var.dtype) * weight)


class _Normalization(torch.autograd.Function):
    """(input, weight, bias, eps, name) -> (output, mean, variance, count); the last three are not differentiable."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(input, name)
        wide = _wide(input.dtype)
        output = torch.nn.functional.batch_norm(
            input, mean.to(wide), variance.to(wide), _cast(weight, wide), _cast(bias, wide), False, 0.0, eps
        )
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.name = name
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_dead: Tensor) -> Any:
        input, weight, mean, inverse_deviation, count = ctx.saved_tensors
        wide, axes = _wide(input.dtype), _all_but_channels(input)
        grad, centered = grad_output.to(wide), input.to(wide) - _along(mean.to(wide), input)
        own = torch.stack([grad.sum(axes), (grad * centered).sum(axes)])
        total = allreduce(own, name=f"{ctx.name}.grad", op=Sum)
        inverse = inverse_deviation.to(wide)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            mean_grad, mean_product = total / count.to(wide)
            grad_input = grad - _along(mean_grad, input) - centered * _along(inverse * inverse * mean_product, input)
            factor = inverse if weight is None else inverse * weight.to(wide)
            grad_input = (grad_input * _along(factor, input)).to(input.dtype)
        if weight is not None:
            grad_weight, grad_bias = (own[1] * inverse).to(weight.dtype), own[0].to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _statistics(input: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all ranks, and the number of values that they are of, in float64."""
    channels = input.shape[1]
    own_count = input.numel() // channels
    own = torch.zeros(1, 2 * channels + 1, dtype=torch.float64, device=input.device)
    if own_count:
        deviations, means = torch.var_mean(input.to(_wide(input.dtype)), _all_but_channels(input), correction=0)
        own[0, :channels], own[0, channels:-1] = means, deviations.double() * own_count
    own[0, -1] = own_count
    everyone = _gathered(own, name)
    means, squares, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    count = counts.sum()
    # In a compiled graph it can't depend on values whether there is an error.
    if not torch.compiler.is_compiling() and count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(count)} on all ranks together (this "
            f"rank's input has the shape {tuple(input.shape)})."
        )
    mean = (means * counts).sum(0) / count
    variance = (squares + counts * (means - mean) ** 2).sum(0) / count
    return mean, variance, count


def _gathered(own: Tensor, name: str) -> Tensor:
    if torch.compiler.is_compiling():  # which must be told how many rows there will be
        return compiled_rows.gather_rows(own, f"allgather.{name}", GLOBAL_ID, basics.size())  # type: ignore[no-any-return]
    return allgather(own, name=name)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _along(channels: Tensor, input: Tensor) -> Tensor:
    """Numbers for each channel, to be combined with the input."""
    return channels.view(1, -1, *[1] * (input.dim() - 2))
