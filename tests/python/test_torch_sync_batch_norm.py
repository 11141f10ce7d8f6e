"""SyncBatchNorm: on every rank what BatchNorm does with the joined batch, forward and backward."""

import copy
import threading
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import horovod.torch as hvd

CHANNELS = 3
SHAPES = [(), (7,), (5, 4), (2, 3, 4)]  # after batch and channels


def joined_batch(counts: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same on every rank; of a mean that is large against its deviation."""
    generator = torch.Generator().manual_seed(sum(counts))
    batch = torch.randn(sum(counts), CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return (batch * 0.5 + 10).to(dtype)


def own_part(batch: Tensor, counts: list[int]) -> Tensor:
    return batch.split(counts)[hvd.rank()]  # type: ignore[no-any-return]


def trained(layer: torch.nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Two forward passes, one backward: output, gradients and statistics."""
    layer(batch.detach() * 0.9)
    source = batch.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(source)
    # A loss in which every element counts differently, on any split of the batch.
    (output.double() * torch.cos(source.detach().double() * 100)).sum().backward()
    assert source.grad is not None
    found = {"output": output.detach(), "gradient": source.grad}
    found |= {f"{name}.grad": p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return found | {name: value.clone() for name, value in layer.named_buffers()}


def close(actual: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}.get(dtype, 4e-2)
    assert actual.dtype == want.dtype, what
    torch.testing.assert_close(actual, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def compare(counts: list[int], shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    what = f"rank {hvd.rank()} of {counts}, {shape}, {dtype}, {options}"
    batch = joined_batch(counts, shape, dtype)
    if options.pop("channels_last", False):
        batch = batch.to(memory_format=torch.channels_last)
    plain: Any = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[max(len(shape) - 1, 0)]
    single = plain(CHANNELS, dtype=torch.float64 if dtype == torch.float64 else torch.float32, **options)
    if single.affine:
        torch.nn.init.uniform_(single.weight, 0.5, 2, generator=torch.Generator().manual_seed(1))
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single))
    assert isinstance(layer, hvd.SyncBatchNorm)
    want, found = trained(single, batch), trained(layer, own_part(batch, counts))
    assert found["output"].stride() == own_part(batch, counts).stride(), what
    for name in ("output", "gradient"):
        close(found[name], own_part(want[name], counts), dtype, f"{what}: {name}")
    for name in sorted(want.keys() - {"output", "gradient"}):
        value = hvd.allreduce(found[name], op=hvd.Sum) if name.endswith(".grad") else found[name]
        close(value, want[name], dtype, f"{what}: {name}")
    layer.eval()
    single.eval()
    close(layer(batch), single(batch), dtype, f"{what}: evaluation")


def sweep(size: int) -> None:
    hvd.init()
    even, uneven = [4] * size, [2 + rank for rank in range(size)]
    with_empty = [0] + [5] * (size - 1)
    for shape in SHAPES:
        for counts in (even, uneven, with_empty):
            compare(counts, shape, torch.float32)
        compare(uneven, shape, torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        compare(uneven, (5, 4), dtype)
    compare(even, (5, 4), torch.float32, channels_last=True)
    compare(even, (), torch.float64, affine=False)
    compare(even, (7,), torch.float64, momentum=None)
    compare(even, (7,), torch.float64, track_running_stats=False, affine=False)
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_is_batch_norm_of_the_joined_batch(size: int) -> None:
    run_ranks(size, sweep, size, timeout=240)


def two_in_flight() -> list[bool]:
    """Two threads, each with a layer of its own, at the same time; the order in which they come differs by rank."""
    hvd.init()
    layers = [hvd.SyncBatchNorm(CHANNELS), hvd.SyncBatchNorm(CHANNELS)]
    counts = [3] * hvd.size()
    batches = [joined_batch(counts, (50,), torch.float32), joined_batch(counts, (50,), torch.float32) * 3 - 7]
    outputs: list[Tensor] = [torch.empty(0)] * 2

    def forward(i: int) -> None:
        for _ in range(20):
            outputs[i] = layers[i](own_part(batches[i], counts))
            outputs[i].sum().backward()

    threads = [threading.Thread(target=forward, args=(i,)) for i in (range(2) if hvd.rank() == 0 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = []
    for batch, output in zip(batches, outputs, strict=True):
        want = torch.nn.BatchNorm1d(CHANNELS)(batch)
        same.append(torch.allclose(output, own_part(want, counts), atol=1e-4))
    return same


def test_two_layers_in_flight() -> None:
    assert run_ranks(2, two_in_flight) == [[True, True]] * 2


def bad_use() -> list[str]:
    hvd.init()
    layer = hvd.SyncBatchNorm(CHANNELS)
    texts = []
    for batch in (torch.ones(3), torch.ones(2, 4), torch.ones(hvd.rank(), CHANNELS)):
        with pytest.raises(ValueError) as caught:
            layer(batch)
        texts.append(str(caught.value))
    return texts


def test_bad_use() -> None:
    for texts in run_ranks(2, bad_use):
        assert "expected at least 2D input (got 1D input)" in texts[0]
        assert "expected 3 channels in dimension 1, got 4" in texts[1]
        assert "Expected more than 1 value per channel when training, got 1 on all ranks" in texts[2]


def nested() -> None:
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Sequential(torch.nn.BatchNorm2d(4)))
    keys, weight = list(model.state_dict()), model[1][0].weight  # type: ignore[index]
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1][0], hvd.SyncBatchNorm)  # type: ignore[index]
    assert model[1][0].weight is weight  # type: ignore[index]
    assert list(model.state_dict()) == keys


def test_converting_a_model_keeps_its_parameters() -> None:
    run_ranks(1, nested)
