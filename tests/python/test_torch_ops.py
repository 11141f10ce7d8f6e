"""Operations on torch tensors: every dtype and form, on process sets, to the last bit; one group per sweep."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from ranks import run_ranks
from sweeps import CHUNK_BYTES, MAIN, MOVED, REDUCED, SUMS, check, expected, ops_for, own_rows, start, values
from torch import Tensor
from torch_arrays import tensor_of, to_array, to_tensor

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet

RANKS = [2, 3, 4]
SWEEP_SECONDS = 240


def sizes_for(dtype: Any) -> tuple[int, ...]:
    return (0, 1, 1001, CHUNK_BYTES // np.dtype(dtype).itemsize + 1) if dtype in MAIN else (1001,)


def same(result: Tensor, want: Any, what: str) -> None:
    check(to_array(result), want, what)


def allreduce_forms(members: ProcessSet, dtype: Any, count: int, op: int) -> None:
    """Every way to call it gives the same."""
    assert members.ranks is not None
    inputs = [values(dtype, count, rank) for rank in members.ranks]
    want, what = expected(inputs, op), f"allreduce {np.dtype(dtype).name} [{count}] op {op} of {members.ranks}"
    own = tensor_of(dtype, count, hvd.rank())
    name = f"{np.dtype(dtype).name}.{count}.{op}"
    options: dict[str, Any] = {"op": op, "process_set": members}
    same(hvd.allreduce(own, name=name, **options), want, what)
    same(own, values(dtype, count, hvd.rank()), f"{what}: changed its input")
    same(hvd.synchronize(hvd.allreduce_async(own, name=name, **options)), want, f"{what} async")
    in_place = own.clone()
    assert hvd.allreduce_(in_place, name=name, **options) is in_place
    same(in_place, want, f"{what} in place")
    in_place = own.clone()
    assert hvd.synchronize(hvd.allreduce_async_(in_place, name=name, **options)) is in_place
    same(in_place, want, f"{what} async in place")
    for tensor in hvd.grouped_allreduce([own, own], name=name, **options):
        same(tensor, want, f"{what} grouped")
    clones = [own.clone(), own.clone()]
    results = hvd.synchronize(hvd.grouped_allreduce_async_(clones, name=name, **options))
    assert isinstance(results, tuple)
    assert [id(tensor) for tensor in results] == [id(tensor) for tensor in clones]
    for tensor in clones:
        same(tensor, want, f"{what} grouped in place")


def sweep_allreduce(size: int) -> None:
    for members in start(size):
        # What the engine computes is swept with NumPy's arrays: here it is that tensors get there and back.
        for dtype in REDUCED if members is hvd.global_process_set else (np.float32, ml_dtypes.bfloat16):
            for count in sizes_for(dtype):
                for op in ops_for(dtype) if count == 1001 else (hvd.Sum,):
                    allreduce_forms(members, dtype, count, op)
        inputs = [values(np.float32, 100, rank) for rank in members.ranks or []]
        own = tensor_of(np.float32, 100, hvd.rank())
        scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.3, postscale_factor=7.0, process_set=members)
        same(scaled, expected(inputs, hvd.Sum, 0.3, 7.0), "scaled")
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_allreduce(size: int) -> None:
    run_ranks(size, sweep_allreduce, size, timeout=SWEEP_SECONDS)


def moving_forms(members: ProcessSet, dtype: Any, rows: int, columns: tuple[int, ...]) -> None:
    """Broadcast, allgather and alltoall: what every dtype can do."""
    assert members.ranks is not None
    ranks, name = members.ranks, f"{np.dtype(dtype).name}.{rows}"
    position, what = ranks.index(hvd.rank()), f"{np.dtype(dtype).name} [{rows}, {columns}] among {ranks}"
    options: dict[str, Any] = {"name": name, "process_set": members}
    root = ranks[rows % len(ranks)]
    want = values(dtype, (rows, *columns), root)
    own = tensor_of(dtype, (rows, *columns), hvd.rank())
    same(hvd.broadcast(own, root, **options), want, f"broadcast {what}")
    same(hvd.synchronize(hvd.broadcast_async(own, root, **options)), want, f"broadcast_async {what}")
    for form in (hvd.broadcast_, lambda *a, **k: hvd.synchronize(hvd.broadcast_async_(*a, **k))):
        in_place = own.clone()
        assert form(in_place, root, **options) is in_place
        same(in_place, want, f"broadcast in place {what}")

    parts = [values(dtype, (rows + rank, *columns), rank) for rank in ranks]
    own = to_tensor(parts[position])
    want = np.concatenate(parts)
    same(hvd.allgather(own, **options), want, f"allgather {what}")
    same(hvd.synchronize(hvd.allgather_async(own, **options)), want, f"allgather_async {what}")
    for tensor in hvd.grouped_allgather([own, own], **options):
        same(tensor, want, f"grouped_allgather {what}")
    for tensor in hvd.synchronize(hvd.grouped_allgather_async([own, own], **options)):
        same(tensor, want, f"grouped_allgather_async {what}")

    # Rank r sends r + p rows to the p-th member, and keeps one.
    splits = {rank: [rank + p for p in range(len(ranks))] for rank in ranks}
    inputs = {rank: values(dtype, (sum(splits[rank]) + 1, *columns), rank) for rank in ranks}
    first = {rank: sum(splits[rank][:position]) for rank in ranks}
    want = np.concatenate([inputs[rank][first[rank] : first[rank] + splits[rank][position]] for rank in ranks])
    counts: Any = splits[hvd.rank()]
    for form in (hvd.alltoall, lambda *a, **k: hvd.synchronize(hvd.alltoall_async(*a, **k))):
        for given in (counts, torch.tensor(counts), torch.tensor(counts, dtype=torch.int32)):
            output, received = form(to_tensor(inputs[hvd.rank()]), splits=given, **options)
            same(output, want, f"alltoall {what}")
            assert received.tolist() == [splits[rank][position] for rank in ranks]
            assert received.dtype == torch.int32
    even = [values(dtype, (2 * len(ranks), *columns), rank) for rank in ranks]
    want = np.concatenate([array[2 * position : 2 * position + 2] for array in even])
    exchanged: Any = hvd.alltoall(to_tensor(even[position]), **options)
    same(exchanged, want, f"alltoall without splits {what}")


def sweep_moving(size: int) -> None:
    for members in start(size):
        for dtype in MOVED if members is hvd.global_process_set else (np.float32, ml_dtypes.float8_e5m2):
            for rows, columns in ((0, (3,)), (1, ()), (7, (3, 2)), (5, (0,))) if dtype in MAIN else ((3, (2,)),):
                moving_forms(members, dtype, rows, columns)
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_broadcast_allgather_and_alltoall(size: int) -> None:
    run_ranks(size, sweep_moving, size, timeout=SWEEP_SECONDS)


def sweep_reducescatter(size: int) -> None:
    for members in start(size):
        assert members.ranks is not None
        position, count = members.ranks.index(hvd.rank()), len(members.ranks)
        for dtype in REDUCED if members is hvd.global_process_set else (np.float32, ml_dtypes.bfloat16):
            if dtype is np.bool_:
                continue
            for rows in (0, 1, 7, 1001) if dtype in MAIN else (5,):
                for op in SUMS:
                    inputs = [values(dtype, (rows, 3), rank) for rank in members.ranks]
                    want = own_rows(expected(inputs, op), position, count)
                    own, what = to_tensor(inputs[position]), f"reducescatter {np.dtype(dtype).name} [{rows}] op {op}"
                    options: dict[str, Any] = {"name": f"{np.dtype(dtype).name}.{rows}", "op": op}
                    options["process_set"] = members
                    same(hvd.reducescatter(own, **options), want, what)
                    same(hvd.synchronize(hvd.reducescatter_async(own, **options)), want, f"{what} async")
                    for tensor in hvd.grouped_reducescatter([own, own], **options):
                        same(tensor, want, f"{what} grouped")
                    for tensor in hvd.synchronize(hvd.grouped_reducescatter_async([own, own], **options)):
                        same(tensor, want, f"{what} grouped async")
    hvd.barrier()


@pytest.mark.parametrize("size", RANKS)
def test_reducescatter(size: int) -> None:
    run_ranks(size, sweep_reducescatter, size, timeout=SWEEP_SECONDS)


# ---- Handles, compression, sparse tensors ----------------------------------------------------------------------------


def handles(size: int) -> None:
    hvd.init()
    tensors = [torch.full((i,), float(hvd.rank() + i)) for i in range(50)]
    started = [hvd.allreduce_async_(tensor, op=hvd.Max, name=f"async{i}") for i, tensor in enumerate(tensors)]
    for i in reversed(range(50)):
        assert hvd.synchronize(started[i]).tolist() == [size - 1.0 + i] * i
    assert hvd.synchronize(started[0]) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(started[0])
    handle = hvd.allreduce_async(torch.ones(3))
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    # The engine keeps a tensor alive that nobody else has.
    handle = hvd.allreduce_async_(torch.ones(100_000), op=hvd.Sum)
    assert hvd.synchronize(handle).sum().item() == 100_000 * size
    # The deprecated spelling.
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(torch.ones(1), average=False).tolist() == [size]
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    hvd.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_handles(size: int) -> None:
    run_ranks(size, handles, size, env={"PYTHONWARNINGS": "default"})


def joined(size: int) -> list[float]:
    """The ranks have 1, 2, ... batches."""
    hvd.init()
    averages = [hvd.allreduce(torch.ones(1), name=f"batch {step}").item() for step in range(hvd.rank() + 1)]
    assert hvd.join() == size - 1
    return averages


def test_ranks_without_data_join() -> None:
    for rank, averages in enumerate(run_ranks(3, joined, 3)):
        assert averages == pytest.approx([1.0, 2 / 3, 1 / 3][: rank + 1])


def compressed(size: int) -> None:
    hvd.init()
    compressions: list[tuple[Any, torch.dtype]] = [
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ]
    own = torch.randn(1000, generator=torch.Generator().manual_seed(hvd.rank()))
    everyone = hvd.allgather(own.view(1, -1))
    for compression, narrow in compressions:
        want = everyone.to(narrow).float().sum(0).to(narrow).float()
        result = hvd.allreduce(own, op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, want, rtol=1e-2, atol=1e-2)
        assert torch.equal(result, result.to(narrow).float())
        (grouped,) = hvd.grouped_allreduce([own], op=hvd.Sum, compression=compression)
        assert torch.equal(grouped, result)
        rows = hvd.reducescatter(own, op=hvd.Sum, compression=compression)
        assert torch.equal(hvd.allgather(rows), result)
        assert hvd.grouped_reducescatter([own], op=hvd.Sum, compression=compression)[0].equal(rows)
        for untouched in (torch.arange(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)):
            sent, context = compression.compress(untouched)
            assert sent is untouched
            assert compression.decompress(sent, context) is untouched


def test_compression() -> None:
    run_ranks(2, compressed, 2)


def sparse(size: int) -> None:
    hvd.init()
    rank = hvd.rank()

    def made(other: int, dense_part: tuple[int, ...]) -> Tensor:
        """Some elements of all ranks, some of one; one of them twice; rank 1 has none at all."""
        indices = torch.tensor([[0, other + 1, 0], [0, 2, 0]]) if other != 1 else torch.zeros(2, 0, dtype=torch.int64)
        numbers = torch.arange(1.0, 1 + indices.shape[1]).view(-1, *[1] * len(dense_part)).expand(-1, *dense_part)
        return torch.sparse_coo_tensor(indices, numbers, (size + 2, 3, *dense_part), check_invariants=True)

    for dense_part in ((), (4,)):
        total = sum(made(other, dense_part).to_dense() for other in range(size))
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
            handle = hvd.sparse_allreduce_async(made(rank, dense_part), f"sparse{dense_part}{op}", op)
            result = handle()
            assert result.is_sparse
            torch.testing.assert_close(result.to_dense(), total / divisor)
    unnamed = [hvd.sparse_allreduce_async(made(rank, ()), None, hvd.Sum) for _ in range(3)]
    for wait in reversed(unnamed):
        torch.testing.assert_close(wait().to_dense(), sum(made(other, ()).to_dense() for other in range(size)))
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(NotImplementedError):
            hvd.sparse_allreduce_async(made(rank, ()), "min", op)
    with pytest.raises(ValueError, match="expected a sparse COO tensor"):
        hvd.sparse_allreduce_async(torch.ones(3), "dense", hvd.Sum)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse(size: int) -> None:
    run_ranks(size, sparse, size)


# ---- Mistakes --------------------------------------------------------------------------------------------------------


def mistakes() -> None:
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3))
    hvd.init()
    wrong: Any = [1.0, 2.0]
    cases: list[tuple[str, Any]] = [
        ("Expected a torch.Tensor, got list", lambda: hvd.allreduce_(wrong)),
        ("Expected a torch.Tensor, got list", lambda: hvd.allgather(wrong)),
        ("Tensor type torch.complex32 is not supported", lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex32))),
        ("Tensor layout torch.sparse_coo is not supported", lambda: hvd.allreduce(torch.ones(2).to_sparse())),
        ("Tensor layout torch.sparse_coo is not supported", lambda: hvd.allreduce_(torch.ones(2).to_sparse())),
        ("unknown op 17", lambda: hvd.allreduce(torch.ones(2), op=17)),
        ("not supported for float8_e5m2", lambda: hvd.allreduce(torch.ones(2).to(torch.float8_e5m2))),
        ("invalid root rank 9", lambda: hvd.broadcast(torch.ones(2), 9)),
        ("one-dimensional integers", lambda: hvd.alltoall(torch.ones(2), splits=[0.5, 0.5])),  # type: ignore[list-item]
        ("splits", lambda: hvd.alltoall(torch.ones(2), splits=[5])),
        ("does not support scalar", lambda: hvd.reducescatter(torch.tensor(1.0))),
        ("its elements share memory", lambda: hvd.allreduce_(torch.ones(1).expand(3))),
        ("is not registered", lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0]))),
    ]
    for text, call in cases:
        with pytest.raises(ValueError) as caught:
            call()
        assert text in str(caught.value)
    handle = hvd.allreduce_async(torch.ones(3), name="twice") if hvd.rank() == 0 else None
    if handle is not None:
        with pytest.raises(ValueError, match="Requested to allreduce, allgather, or broadcast a tensor with the same"):
            hvd.allreduce(torch.ones(3), name="twice")
        hvd.barrier()
        hvd.synchronize(handle)
    else:
        hvd.barrier()
        hvd.allreduce(torch.ones(3), name="twice")
    # A mistake is not counted: unnamed operations still find each other, and the job goes on after a disagreement.
    with pytest.raises(hvd.HorovodMismatchError, match="Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(torch.ones(3 + hvd.rank()))
    with pytest.raises(hvd.HorovodMismatchError, match="Mismatched data types"):
        hvd.grouped_allreduce([torch.ones(3), torch.ones(3, dtype=(torch.int32, torch.int64)[hvd.rank()])])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_mistakes_are_told_and_the_job_goes_on() -> None:
    run_ranks(2, mistakes)
