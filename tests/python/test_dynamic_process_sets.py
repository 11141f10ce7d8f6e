"""Process sets that are added and removed while the job runs."""

import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")


def use(members: hvd.ProcessSet) -> None:
    """Every operation in the set, named and unnamed."""
    if not members.included():
        with pytest.raises(ValueError, match="is not a member"):
            hvd.allreduce([1.0], process_set=members, name="not mine")
        return
    count, me = members.size(), members.rank()
    ranks = members.ranks
    assert count is not None
    assert ranks is not None
    assert me is not None
    for name in (None, "named"):
        assert hvd.allreduce([1.0], op=hvd.Sum, process_set=members, name=name).tolist() == [count]
        assert hvd.allgather([hvd.rank()], process_set=members, name=name).tolist() == ranks
        assert hvd.broadcast([hvd.rank()], ranks[-1], process_set=members, name=name).tolist() == [ranks[-1]]
        exchanged = hvd.alltoall(np.full(count, hvd.rank()), process_set=members, name=name)
        assert np.asarray(exchanged).tolist() == ranks
        assert hvd.reducescatter(np.ones(count), op=hvd.Sum, process_set=members, name=name).tolist() == [count]
    assert hvd.allgather_object(hvd.rank(), process_set=members) == ranks
    hvd.barrier(members)


def ids_and_sizes(*sets: hvd.ProcessSet) -> list[tuple[int | None, int | None]]:
    return [(one.process_set_id, one.size()) for one in sets]


def life(init_argument: object) -> None:
    hvd.init(process_sets=init_argument)  # type: ignore[arg-type]
    size = hvd.size()
    pair = hvd.add_process_set([1, 0])
    assert isinstance(pair, hvd.ProcessSet)
    assert (pair.process_set_id, pair.ranks, pair.size()) == (1, [0, 1], 2)
    given = hvd.ProcessSet(range(1, size))
    others = hvd.add_process_set(given)
    assert others is given
    assert others.process_set_id == 2
    last = hvd.add_process_set([size - 1])
    assert last.process_set_id == 3
    for members in (pair, others, last):
        use(members)
    # A removed set is no longer one; its id goes to the next.
    assert hvd.remove_process_set(others) is True
    assert ids_and_sizes(others) == [(None, None)]
    assert hvd.remove_process_set(others) is False
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce([1.0], process_set=others)
    for members in (pair, last, hvd.global_process_set):
        use(members)
    middle = hvd.add_process_set([1, 2])
    assert middle.process_set_id == 2
    assert hvd.remove_process_set(pair) is True
    assert hvd.add_process_set(others).process_set_id == 1
    for members in (middle, others, last):
        use(members)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    hvd.barrier()
    hvd.shutdown()
    assert ids_and_sizes(middle, last) == [(None, None)] * 2
    hvd.init()
    assert hvd.add_process_set(middle).process_set_id == 1
    use(middle)
    hvd.barrier()


@pytest.mark.parametrize("init_argument", [None, "dynamic", []])
def test_life(init_argument: object) -> None:
    run_ranks(4, life, init_argument)


def test_the_variable_is_accepted() -> None:
    run_ranks(4, life, None, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def with_static_sets() -> None:
    static = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])]
    hvd.init(process_sets=static)
    added = hvd.add_process_set([0, 2])
    assert added.process_set_id == 3
    assert hvd.remove_process_set(static[0])
    use(static[1])
    use(added)
    # init while it runs: objects for the sets that there are now, in any order.
    again = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([2])]
    hvd.init(process_sets=again)
    assert [one.process_set_id for one in again] == [3, 2]
    with pytest.raises(ValueError, match="Horovod runs already, with the process sets"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    hvd.init(process_sets="dynamic")
    assert hvd.remove_process_set(again[0])
    assert added.process_set_id is None  # it stood for the same set
    hvd.barrier()


def test_with_static_sets() -> None:
    run_ranks(3, with_static_sets)


def mistakes() -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0, 2])])
    rank = hvd.rank()
    for ranks, words in (
        ([2, 0], "duplicate of the process set with the id 1"),
        ([0, 1, 2], "duplicate of the global process set"),
        ([0, 3], "invalid rank 3, the job has the ranks 0 to 2"),
        ([-1], "invalid rank -1"),
        ([1, 1], "more than once"),
        ([], "at least one rank"),
        ("01", "expected a list of ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.add_process_set(ranks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set(hvd.global_process_set)
    # The ranks disagree: the same error on all, and nothing is added.
    words = "Attempted to register process set with mismatching size/values on different ranks"
    for ranks in ([rank], [0, 1] if rank == 1 else [0]):
        with pytest.raises(hvd.HorovodMismatchError, match=words):
            hvd.add_process_set(ranks)
    added = hvd.add_process_set([0, 1])
    assert added.process_set_id == 2
    with pytest.raises(hvd.HorovodMismatchError):
        if rank == 0:
            hvd.remove_process_set(added)
        else:
            hvd.add_process_set([1])
    assert added.process_set_id == 2
    use(added)
    assert hvd.remove_process_set(added)
    hvd.barrier()


def test_mistakes() -> None:
    run_ranks(3, mistakes)


def come_and_go(rounds: int) -> None:
    """Ids and names are used again and again, by sets of other ranks, while other operations are under way."""
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    for round_ in range(rounds):
        pending = hvd.allreduce_async(np.full(1000, rank), op=hvd.Sum, name="pending")
        members = hvd.add_process_set([(round_ + k) % size for k in range(1 + round_ % (size - 1))])
        # The id of the last set is free again once nothing of it runs anywhere: mostly at once, never much later.
        assert members.process_set_id in (1, 2)
        assert len(set(hvd.allgather([members.process_set_id]).tolist())) == 1
        if members.included():
            assert members.ranks is not None
            result = hvd.allreduce([float(rank)], op=hvd.Sum, process_set=members)
            assert result.tolist() == [sum(members.ranks)]
            # Something of the set may still be under way on other ranks when the first comes to remove it.
            hvd.synchronize(hvd.allreduce_async(np.ones(10_000), name="x", process_set=members))
        assert hvd.remove_process_set(members)
        assert (hvd.synchronize(pending) == size * (size - 1) // 2).all()
    hvd.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_come_and_go(size: int) -> None:
    run_ranks(size, come_and_go, 60, timeout=120)


def many(count: int) -> list[int | None]:
    """Many sets at once; every rank is in some of them."""
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    choices = [[r for r in range(size) if mask >> r & 1] for mask in range(1, 2**size - 1)]
    sets = [hvd.add_process_set(ranks) for ranks in choices[:count]]
    handles = {
        id(one): hvd.allreduce_async(np.full(100, rank), op=hvd.Sum, process_set=one) for one in sets if one.included()
    }
    for one in reversed(sets):
        if one.included():
            assert one.ranks is not None
            assert (hvd.synchronize(handles[id(one)]) == sum(one.ranks)).all()
    ids = [one.process_set_id for one in sets]
    for one in sets[::2]:
        assert hvd.remove_process_set(one)
    hvd.barrier()
    return ids


def test_many() -> None:
    for ids in run_ranks(4, many, 14):
        assert ids == list(range(1, 15))


def pending_when_removed() -> None:
    """An operation that is still pending in a removed set fails; it does not hang."""
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async([1.0], name="only here", process_set=pair) if hvd.rank() == 0 else None
    hvd.barrier()
    assert hvd.remove_process_set(pair)
    if handle is not None:
        with pytest.raises((hvd.HorovodInternalError, ValueError)):
            hvd.synchronize(handle)
    assert hvd.allreduce([1.0], op=hvd.Sum).tolist() == [hvd.size()]


def test_an_operation_that_is_pending_in_a_removed_set_fails() -> None:
    run_ranks(3, pending_when_removed)
