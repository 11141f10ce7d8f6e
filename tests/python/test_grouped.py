"""Groups: several arrays in one call, with one handle."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks
from sweeps import check, expected, own_rows, values

import horovod.numpy as hvd
from horovod import _core

pytestmark = pytest.mark.usefixtures("transport")

DTYPES = [np.float32, np.int64, ml_dtypes.bfloat16, np.float32]
SHAPES = [(5, 3), (0, 2), (17,), (1, 1, 4)]


def arrays_of(rank: int) -> list[Any]:
    return [values(dtype, shape, rank) for dtype, shape in zip(DTYPES, SHAPES, strict=True)]


def by_member(size: int) -> list[list[Any]]:
    return [list(inputs) for inputs in zip(*(arrays_of(rank) for rank in range(size)), strict=True)]


def check_all(results: Any, wants: list[Any], what: str) -> None:
    assert isinstance(results, list), what
    for i, (result, want) in enumerate(zip(results, wants, strict=True)):
        check(result, want, f"{what}, array {i}")


def all_kinds(size: int) -> None:
    others = hvd.ProcessSet(range(1, size))
    hvd.init(process_sets=[others])
    rank = hvd.rank()
    own = arrays_of(rank)
    sums = [expected(inputs, hvd.Sum) for inputs in by_member(size)]
    gathered = [np.concatenate(inputs) for inputs in by_member(size)]
    parts = [own_rows(total, rank, size) for total in sums]
    for round_ in range(3):
        what = f"round {round_}"
        check_all(hvd.grouped_allreduce(own, op=hvd.Sum), sums, what)
        check_all(hvd.grouped_allreduce(own, name="named", op=hvd.Sum), sums, what)
        check_all(hvd.grouped_allgather(own, name="named"), gathered, what)
        check_all(hvd.grouped_reducescatter(own, name="named", op=hvd.Sum), parts, what)
        check_all(own, arrays_of(rank), "the inputs")
    averages = [expected(inputs, hvd.Average, 0.5, 2.0) for inputs in by_member(size)]
    check_all(hvd.grouped_allreduce(own, prescale_factor=0.5, postscale_factor=2.0), averages, "average")
    in_place = arrays_of(rank)
    results = hvd.grouped_allreduce_(in_place, op=hvd.Sum)
    assert all(result is array for result, array in zip(results, in_place, strict=True))
    check_all(in_place, sums, "in place")
    # Several groups under way, waited for in another order.
    handles = [
        hvd.grouped_allreduce_async(own, op=hvd.Sum),
        hvd.grouped_allgather_async(own),
        hvd.grouped_reducescatter_async(own, op=hvd.Sum),
        hvd.grouped_allreduce_async_(arrays_of(rank), op=hvd.Sum),
    ]
    assert len(set(handles)) == 4
    for handle, wants in reversed(list(zip(handles, (sums, gathered, parts, sums), strict=True))):
        while not hvd.poll(handle):
            pass
        check_all(hvd.synchronize(handle), wants, "async")
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)
    # Lists as arrays, one array, none.
    assert [a.tolist() for a in hvd.grouped_allreduce([[1.0], [2, 3]], op=hvd.Sum)] == [[size], [2 * size, 3 * size]]
    assert hvd.grouped_allgather([[rank]])[0].tolist() == list(range(size))
    assert hvd.grouped_allreduce([]) == []
    if others.included():
        assert hvd.grouped_allreduce([[float(rank)]], process_set=others)[0].tolist() == [size / 2]
    hvd.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variables", [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}])
def test_all_kinds(size: int, variables: dict[str, str]) -> None:
    run_ranks(size, all_kinds, size, env=variables)


def mistakes() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # Found before anything is started, so unnamed groups still match.
    if rank == 0:
        with pytest.raises(ValueError, match=r"^Tensor type .* is not supported\."):
            hvd.grouped_allreduce([np.ones(2), np.array(["a"])])
        with pytest.raises(ValueError, match=r"^Tensor is required to be contiguous\."):
            hvd.grouped_allreduce_([np.ones(2), np.ones((2, 2)).T])
        with pytest.raises(ValueError, match="needs a NumPy array, got list"):
            hvd.grouped_allreduce_async_([[1.0]])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="unknown op 17"):
            hvd.grouped_allreduce([np.ones(2)], op=17)
    assert hvd.grouped_allreduce([[1.0]], op=hvd.Sum)[0].tolist() == [size]
    # The engine refuses the second on every rank; the first goes on, and its name is free again afterwards.
    with pytest.raises(ValueError, match=r"reduction Min is not supported for complex64"):
        hvd.grouped_allreduce([np.ones(2), np.ones(2, np.complex64)], name="second", op=hvd.Min)
    hvd.barrier()
    assert _core.counters()["requests_submitted"] > 0
    # One array of a group does not match: the error is the group's, the other arrays were reduced.
    arrays = [np.ones(2), np.ones(3 + rank), np.full(2, float(rank))]
    handle = hvd.grouped_allreduce_async_(arrays, name="one", op=hvd.Sum)
    with pytest.raises(hvd.HorovodMismatchError, match=r"grouped_allreduce\.one_2of3"):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    assert arrays[0].tolist() == [size] * 2
    assert arrays[2].tolist() == [size * (size - 1) / 2] * 2
    # The same group is still pending.
    if rank == 0:
        first = hvd.grouped_allreduce_async([np.ones(2)], name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match="a tensor with the same name"):
            hvd.grouped_allreduce_async([np.ones(2)], name="twice", op=hvd.Sum)
        assert not hvd.poll(first)
        hvd.barrier()
        result = hvd.synchronize(first)
    else:
        hvd.barrier()
        result = hvd.grouped_allreduce([np.ones(2)], name="twice", op=hvd.Sum)
    assert result[0].tolist() == [size] * 2
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(-987654321)
    assert hvd.synchronize(-987654321) is None


def test_mistakes() -> None:
    run_ranks(2, mistakes)
    run_ranks(3, mistakes)


def pending_at_shutdown() -> None:
    hvd.init()
    handle = hvd.grouped_allreduce_async([np.ones(2), np.ones(3)]) if hvd.rank() == 0 else None
    hvd.barrier()
    hvd.shutdown()
    if handle is not None:
        assert hvd.poll(handle)
        with pytest.raises(hvd.HorovodInternalError, match=r"shut ?down"):
            hvd.synchronize(handle)


def test_a_pending_group_fails_at_shutdown() -> None:
    run_ranks(2, pending_at_shutdown)
