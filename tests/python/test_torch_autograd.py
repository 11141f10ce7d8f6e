"""Gradients through every operation: what the pages of the existing Horovod say they are."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet


def weights(shape: Any, rank: int) -> Tensor:
    """The gradient that a rank's loss gives to a result: another on each rank."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape) * (rank + 1)


def input_of(rank: int, rows: int) -> Tensor:
    return torch.arange(3.0 * rows, dtype=torch.float64).view(rows, 3) + 10 * rank + 1


def gradient(function: Callable[[Tensor], Tensor | list[Tensor]], rows: int) -> Tensor:
    """Of this rank's input, if its loss has the weights above."""
    source = input_of(hvd.rank(), rows).requires_grad_()
    results = function(source)
    results = [results] if isinstance(results, Tensor) else results
    loss: Any = sum((result * weights(result.shape, hvd.rank())).sum() for result in results)
    loss.backward()
    assert source.grad is not None
    return source.grad


def same(found: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(found, want, msg=lambda text: f"rank {hvd.rank()}, {what}: {text}")


def reductions(ranks: list[int], members: ProcessSet) -> None:
    options: dict[str, Any] = {"process_set": members}
    grads = [weights((4, 3), rank) for rank in ranks]
    total, mean = torch.stack(grads).sum(0), torch.stack(grads).mean(0)
    reduced = {
        hvd.Sum: total,
        hvd.Average: mean,
        hvd.Min: torch.stack(grads).amin(0),
        hvd.Max: torch.stack(grads).amax(0),
    }
    for op, want in reduced.items():
        for name in (None, "reduced"):
            same(gradient(lambda x: hvd.allreduce(x, op=op, name=name, **options), 4), want, f"allreduce {op}")  # noqa: B023
    scaled: dict[str, Any] = {"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0, **options}
    same(gradient(lambda x: hvd.allreduce(x, **scaled), 4), 6 * total, "scaled allreduce")
    same(gradient(lambda x: hvd.grouped_allreduce([x, x * 2], **scaled), 4), 18 * total, "grouped allreduce")
    same(gradient(lambda x: hvd.allreduce(x, compression=hvd.Compression.none, **options), 4), mean, "compressed")
    root = ranks[-1]
    want = mean if hvd.rank() == root else torch.zeros(4, 3, dtype=torch.float64)
    same(gradient(lambda x: hvd.broadcast(x, root, **options), 4), want, "broadcast")


def rows(ranks: list[int], members: ProcessSet) -> None:
    options: dict[str, Any] = {"process_set": members}
    position, count = ranks.index(hvd.rank()), len(ranks)
    # Allgather: rank r has r + 1 rows.
    starts = [sum(rank + 1 for rank in ranks[:p]) for p in range(count + 1)]
    mean = torch.stack([weights((starts[-1], 3), rank) for rank in ranks]).mean(0)
    own = mean[starts[position] : starts[position + 1]]
    same(gradient(lambda x: hvd.allgather(x, **options), hvd.rank() + 1), own, "allgather")
    same(gradient(lambda x: hvd.grouped_allgather([x, x * 2], **options), hvd.rank() + 1), 3 * own, "grouped allgather")
    # Alltoall: two rows for each, and one that is not sent; what each rank did with them comes back.
    back = [weights((2 * count, 3), rank)[2 * position : 2 * position + 2] for rank in ranks]
    returned = torch.cat([*back, torch.zeros(1, 3, dtype=torch.float64)])
    same(gradient(lambda x: hvd.alltoall(x, splits=[2] * count, **options)[0], 2 * count + 1), returned, "alltoall")
    plain: Callable[[Tensor], Any] = lambda x: hvd.alltoall(x, **options)  # noqa: E731
    same(gradient(plain, 2 * count), returned[:-1], "alltoall without splits")
    # Reducescatter of 2 * count + 1 rows: the first rank gets one more.
    shares = [3 if p == 0 else 2 for p in range(count)]
    gathered = torch.cat([weights((share, 3), rank) for share, rank in zip(shares, ranks, strict=True)])
    length = 2 * count + 1
    same(gradient(lambda x: hvd.reducescatter(x, **options), length), gathered, "reducescatter average")
    options |= {"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0}
    same(gradient(lambda x: hvd.reducescatter(x, **options), length), 6 * count * gathered, "reducescatter sum")
    grouped = gradient(lambda x: hvd.grouped_reducescatter([x, x * 2], **options), length)
    same(grouped, 18 * count * gathered, "grouped reducescatter")


def sweep(size: int) -> None:
    odd = hvd.ProcessSet(list(range(size - 1, size)) if size < 3 else [0, size - 1])
    hvd.init(process_sets=[odd] if size > 1 else None)
    for members in (hvd.global_process_set, odd):
        if members.process_set_id is not None and members.included():
            assert members.ranks is not None
            reductions(members.ranks, members)
            rows(members.ranks, members)
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients(size: int) -> None:
    run_ranks(size, sweep, size)


def around() -> None:
    hvd.init()
    size = hvd.size()
    x = torch.ones(2, requires_grad=True)
    # Nothing is recorded where nothing is asked for.
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
        assert not hvd.allgather(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
    with torch.inference_mode():
        assert hvd.allreduce_(torch.ones(2), op=hvd.Sum).tolist() == [size] * 2
    # Through the middle of a graph, of which one branch is not used, and with half precision on the way.
    used, unused = hvd.grouped_allreduce([x * 2, x * 3], op=hvd.Sum, compression=hvd.Compression.bf16)
    used.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * size] * 2
    assert unused.dtype == torch.float32
    # Gradients that autograd has in another layout on each rank.
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    result: Any = hvd.allreduce(image, op=hvd.Sum)
    (result.sum() if hvd.rank() == 0 else (result * torch.ones_like(image)).sum()).backward()
    assert image.grad is not None
    assert (image.grad == size).all()


def test_around_autograd() -> None:
    run_ranks(2, around)


def second_derivatives() -> list[float]:
    """Of (r + 1) * y ** 3 on rank r, where y is the sum of all x; and of y ** 3 where y is the root's x."""
    hvd.init()
    x = torch.tensor([1.0], requires_grad=True)
    loss = (hvd.allreduce(x, op=hvd.Sum, name="x") ** 3).sum() * (hvd.rank() + 1)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    sent = (hvd.broadcast(x, 0, name="sent") ** 3).sum()
    (first_sent,) = torch.autograd.grad(sent, x, create_graph=True)
    (second_sent,) = torch.autograd.grad(first_sent.sum(), x)
    return [first.item(), second.item(), first_sent.item(), second_sent.item()]


def test_second_derivatives() -> None:
    # With y = 2 each rank has the gradient 3 * y ** 2 + 6 * y ** 2; the sum of both has the derivative 36 * y.
    on_root, elsewhere = run_ranks(2, second_derivatives)
    assert on_root[:2] == elsewhere[:2] == [36.0, 72.0]
    assert on_root[2:] == [3.0, 3.0]
    assert elsewhere[2:] == [0.0, 0.0]


def two_backward_passes() -> list[list[float]]:
    """Two threads, which come to their backward passes in another order on each rank; the operations have no names."""
    hvd.init()
    inputs = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    results = [hvd.allreduce(tensor, op=hvd.Sum) * factor for tensor, factor in zip(inputs, (5, 7), strict=True)]
    mine, others = (0, 1) if hvd.rank() == 0 else (1, 0)
    first = threading.Thread(target=results[mine].sum().backward)
    first.start()
    # It can't end before the other rank comes to the same one.
    results[others].sum().backward()
    first.join()
    return [tensor.grad.tolist() for tensor in inputs if tensor.grad is not None]


def test_operations_of_the_backward_pass_are_matched_with_those_of_the_forward_pass() -> None:
    assert run_ranks(2, two_backward_passes) == [[[10.0] * 2, [14.0] * 2]] * 2


def numerically() -> None:
    """The gradients of one process, where an operation is the identity, by torch's own comparison with differences."""
    hvd.init()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    functions: list[Callable[[Tensor], Any]] = [
        lambda t: hvd.allreduce(t, name="allreduce"),
        lambda t: hvd.allgather(t, name="allgather"),
        lambda t: hvd.broadcast(t, 0, name="broadcast"),
        lambda t: hvd.alltoall(t, splits=[3], name="alltoall")[0],
        lambda t: hvd.reducescatter(t, op=hvd.Sum, prescale_factor=3.0, name="reducescatter"),
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, name="scaled"),
    ]
    for function in functions:
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))


def test_gradients_by_differences() -> None:
    run_ranks(1, numerically)
