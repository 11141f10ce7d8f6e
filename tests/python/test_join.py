"""Join: ranks that run out of data early let the others go on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import mark, run_ranks, wait_for_mark
from sweeps import REDUCED, check, expected, ops_for, values

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")


def uneven_steps(size: int, named: bool, most: int) -> list[int]:
    """Epochs in which every rank has another number of steps; what has joined does not disturb the others."""
    hvd.init()
    rank = hvd.rank()
    last = []
    for epoch in range(3):
        steps = {other: (other * 5 + epoch * 3) % most for other in range(size)}
        for step in range(steps[rank]):
            active = [other for other in range(size) if steps[other] > step]
            name = f"step {step % 4}" if named else None
            for dtype in (np.float32, np.int64):
                for op in (hvd.Sum, hvd.Max, hvd.Min, hvd.Product, hvd.Average):
                    inputs = [values(dtype, 17, other, step) for other in active]
                    full = f"{name} {op}" if name else None
                    result = hvd.allreduce(inputs[active.index(rank)], op=op, name=full)
                    # The average is still over all ranks.
                    want = expected(inputs, op, ranks=active, count=size)
                    check(result, want, f"epoch {epoch} step {step} op {op} of {active}")
        last.append(hvd.join())
        # All are there again, and count alike.
        assert hvd.allreduce([1.0], op=hvd.Sum).tolist() == [size]
        assert hvd.allgather([rank]).tolist() == list(range(size))
    return last


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("named", [True, False])
def test_uneven_steps(size: int, named: bool) -> None:
    results = run_ranks(size, uneven_steps, size, named, 4 + size, timeout=120)
    assert all(result == results[0] for result in results)
    assert all(0 <= last < size for last in results[0])


@pytest.mark.parametrize("variables", [{"HOROVOD_CACHE_CAPACITY": "0"}, {"HOROVOD_FUSION_THRESHOLD": "0"}])
def test_uneven_steps_without_cache_or_fusion(variables: dict[str, str]) -> None:
    run_ranks(3, uneven_steps, 3, True, 7, env=variables, timeout=120)


def in_order(order: list[int]) -> int:
    hvd.init()
    for place in range(order.index(hvd.rank())):
        hvd.allreduce([1.0], name=f"{place}")  # ends when the rank at this place, which does not take part, has joined
    return hvd.join()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_join_returns_the_last_rank(order: list[int]) -> None:
    assert run_ranks(3, in_order, order) == [order[-1]] * 3


def every_dtype(size: int) -> None:
    """What a joined rank contributes is nothing, whatever the type: also to a product, a minimum and a scaled sum."""
    hvd.init()
    rank = hvd.rank()
    if rank != 1:
        active = [other for other in range(size) if other != 1]
        for dtype in REDUCED:
            for op in (one for one in ops_for(dtype) if one != hvd.Average):
                inputs = [values(dtype, 33, other) for other in active]
                name = f"{np.dtype(dtype).name} {op}"
                want = expected(inputs, op, ranks=active)
                check(hvd.allreduce(inputs[active.index(rank)], op=op, name=name), want, name)
            if dtype is not np.bool_:
                result = hvd.allreduce(values(dtype, 33, rank), op=hvd.Sum, prescale_factor=2.0, name="scaled")
                inputs = [values(dtype, 33, other) for other in active]
                check(result, expected(inputs, hvd.Sum, 2.0, ranks=active), "scaled")
    hvd.join()


def test_a_joined_rank_contributes_nothing_in_any_type() -> None:
    run_ranks(3, every_dtype, 3)


def large_and_many(size: int) -> None:
    hvd.init()
    rank = hvd.rank()
    if rank != 0:  # the coordinator itself has joined
        large = hvd.allreduce(np.full(1_000_003, float(rank)), op=hvd.Sum, name="large")
        assert (large == sum(range(size))).all()
        handles = [hvd.allreduce_async(np.full(1 + 99 * i, rank), op=hvd.Sum, name=f"many {i}") for i in range(50)]
        for i, handle in enumerate(handles):
            assert hvd.synchronize(handle).tolist() == [sum(range(size))] * (1 + 99 * i)
        for array in hvd.grouped_allreduce([np.full(7, rank), np.full(9, rank)], op=hvd.Sum):
            assert (array == sum(range(size))).all()
    hvd.join()


def test_large_and_many_while_rank_0_has_joined() -> None:
    run_ranks(3, large_and_many, 3)


def left_pending() -> Any:
    """What a rank has started and not waited for ends, whether or not anybody else has it."""
    hvd.init()
    rank = hvd.rank()
    mine = hvd.allreduce_async(np.full(3, 1.0 + rank), op=hvd.Sum, name=f"of rank {rank}")
    ours = hvd.allreduce_async(np.full(3, 1.0 + rank), op=hvd.Sum, name="of all")
    last = hvd.join()
    results = [hvd.synchronize(mine).tolist(), hvd.synchronize(ours).tolist()]
    return results, last


def test_what_was_left_pending_ends() -> None:
    for rank, (results, _) in enumerate(run_ranks(3, left_pending)):
        assert results == [[1.0 + rank] * 3, [6.0] * 3]


def pending_beside_others() -> Any:
    """A batch may hold what a joined rank has started itself, and what only others have: factors are for the former."""
    hvd.init()
    rank = hvd.rank()
    results = []
    for step in range(10):
        names = ["of all"] if rank == 1 else ["of all", "of others"]
        handles = [
            hvd.allreduce_async([2.0 + rank], op=hvd.Product, prescale_factor=2.0, name=f"{name} {step % 3}")
            for name in (names if step % 2 else reversed(names))
        ]
        if rank != 1:
            results.append(sorted(hvd.synchronize(handle).item() for handle in handles))
        hvd.join()
        if rank == 1:
            results.append([hvd.synchronize(handle).item() for handle in handles])
    return results


def test_what_was_left_pending_beside_what_others_have() -> None:
    # 2 * 2, 2 * 3, 2 * 4; rank 1 has no part in the second.
    results = run_ranks(3, pending_beside_others)
    assert results == [[[32.0, 192.0]] * 10, [[192.0]] * 10, [[32.0, 192.0]] * 10]


def other_operations() -> None:
    """Those that need all ranks fail on the ranks that call them, and the job goes on."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    calls: dict[str, Callable[[], Any]] = {
        "BROADCAST": lambda: hvd.broadcast(np.ones(size), 0, name="cast"),
        "REDUCESCATTER": lambda: hvd.reducescatter(np.ones(size), name="scatter"),
    }
    for known in (False, True):  # names that are new, and such as all ranks have used
        if known:
            for call in calls.values():
                call()
        if rank != 1:
            for kind, call in calls.items():
                with pytest.raises(hvd.HorovodInternalError, match=f"{kind} is not supported with Join at this time"):
                    call()
            assert hvd.allreduce([1.0], op=hvd.Sum, name="goes on").tolist() == [size - 1]
        hvd.join()
        for call in calls.values():
            call()


def test_other_operations_fail_and_the_job_goes_on() -> None:
    run_ranks(3, other_operations)


def rows_of_joined_ranks(size: int) -> None:
    """A joined rank sends no rows; what is sent to it is lost."""
    hvd.init()
    rank = hvd.rank()
    active = [other for other in range(size) if other != 1]
    for _ in range(3):
        if rank != 1:
            for _ in range(3):  # a name that is new, and one that is known
                assert hvd.allgather(np.full(2, rank), name="x").tolist() == [r for r in active for _ in range(2)]
                result, received = hvd.alltoall(np.full(size, rank), [1] * size, name="y")
                assert result.tolist() == active
                assert received.tolist() == [1 if r in active else 0 for r in range(size)]
        hvd.join()
        assert hvd.allgather([rank], name="x").tolist() == list(range(size))
        assert np.asarray(hvd.alltoall(np.full(size, rank), name="y")).tolist() == list(range(size))


def test_a_joined_rank_has_no_rows() -> None:
    run_ranks(3, rows_of_joined_ranks, 3)


def in_sets(size: int) -> None:
    """A member of a set that has joined does not hold up the set either; a barrier works as well."""
    others = hvd.ProcessSet(range(1, size))
    hvd.init(process_sets=[others])
    rank = hvd.rank()
    if rank > 1:
        for _ in range(3):
            result = hvd.allreduce([float(rank)], op=hvd.Sum, process_set=others)
            assert result.tolist() == [sum(range(2, size))]
    hvd.join()
    if others.included():
        assert hvd.allreduce([1.0], op=hvd.Sum, process_set=others).tolist() == [size - 1]
    hvd.barrier()


def test_in_sets() -> None:
    run_ranks(4, in_sets, 4)


def leaves_instead_of_joining() -> None:
    hvd.init()
    if hvd.rank() == 2:
        wait_for_mark("joining")
        hvd.shutdown()
        return
    mark("joining")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.join()


def test_a_rank_that_leaves_ends_the_join() -> None:
    run_ranks(3, leaves_instead_of_joining)
