"""Mistakes: the same clear error on every rank when ranks disagree, a local error otherwise; the job goes on."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd
from horovod import _core

pytestmark = pytest.mark.usefixtures("transport")


def raw(op: int, name: str) -> Any:
    """An operation by its full name, past the binding, which puts the kind of operation into the name."""
    array = np.ones(4, np.float32)
    return _core.run_buffers(op, name, _core.FLOAT32, array, array, _core.SUM, 0, 0, 1.0, 1.0)


# What each rank does (by rank), the leading words, and what else the text must name. Rank 1 is the odd one out.
MISMATCHES: dict[str, tuple[Callable[[int], Any], str, list[str]]] = {
    "dtype": (
        lambda rank: hvd.allreduce(np.ones(4, np.float64 if rank == 1 else np.float32), name="dtype"),
        "Mismatched data types",
        ["float32", "float64"],
    ),
    "shape": (
        lambda rank: hvd.allreduce(np.ones(5 if rank == 1 else 4), name="shape"),
        "Mismatched ALLREDUCE tensor shapes",
        ["[4]", "[5]"],
    ),
    "dimensions": (
        lambda rank: hvd.allreduce(np.ones((2, 2) if rank == 1 else 4), name="dimensions"),
        "Mismatched ALLREDUCE tensor shapes",
        ["[4]", "[2, 2]"],
    ),
    "broadcast shape": (
        lambda rank: hvd.broadcast(np.ones(5 if rank == 1 else 4), 0, name="broadcast shape"),
        "Mismatched BROADCAST tensor shapes",
        ["[4]", "[5]"],
    ),
    "root": (
        lambda rank: hvd.broadcast(np.ones(4), 1 if rank == 1 else 0, name="root"),
        "Mismatched BROADCAST root ranks",
        [],
    ),
    "reduce op": (
        lambda rank: hvd.allreduce(np.ones(4), op=hvd.Max if rank == 1 else hvd.Sum, name="reduce op"),
        "Mismatched reduction operation",
        [],
    ),
    "prescale": (
        lambda rank: hvd.allreduce(np.ones(4), name="prescale", prescale_factor=2.0 if rank == 1 else 1.0),
        "Mismatched prescale and/or postscale factors",
        ["2"],
    ),
    "postscale": (
        lambda rank: hvd.allreduce(np.ones(4), name="postscale", postscale_factor=3.0 if rank == 1 else 1.0),
        "Mismatched prescale and/or postscale factors",
        ["3"],
    ),
    "operation": (
        lambda rank: raw(_core.BROADCAST if rank == 1 else _core.ALLREDUCE, "operation"),
        "Mismatched operations",
        [],
    ),
}


def disagree(kind: str, cached: bool) -> tuple[str, str]:
    """Has the ranks disagree, then agree again under the same name; returns the error."""
    action = MISMATCHES[kind][0]
    if cached:  # all ranks know the name by its id before one of them changes its mind
        for _ in range(3):
            action(0)
    with pytest.raises(hvd.HorovodMismatchError) as caught:
        action(hvd.rank())
    assert hvd.is_initialized()
    for _ in range(2):
        action(0)
    assert hvd.allreduce([1.0], op=hvd.Sum).tolist() == [hvd.size()]
    return type(caught.value).__name__, str(caught.value)


def disagree_about_everything() -> dict[tuple[str, bool], tuple[str, str]]:
    hvd.init()
    return {(kind, cached): disagree(kind, cached) for cached in (False, True) for kind in MISMATCHES}


@pytest.mark.parametrize("size", [2, 3])
def test_every_mismatch_is_the_same_clear_error_on_all_ranks_and_the_job_goes_on(size: int) -> None:
    results = run_ranks(size, disagree_about_everything, timeout=120)
    for case in results[0]:
        kind, cached = case
        texts = {result[case] for result in results}
        assert len(texts) == 1, f"{kind}: {texts}"
        ((error, text),) = texts
        _, words, named = MISMATCHES[kind]
        assert error == "HorovodMismatchError"
        assert text.startswith(words), f"{kind} (cached: {cached}): {text}"
        for part in (kind, "rank", *named):
            assert part in text, f"{kind}: {part!r} is not in {text!r}"


def pending_survives() -> float:
    """A mismatch of one tensor does not touch another that is under way."""
    hvd.init()
    rank = hvd.rank()
    good = hvd.allreduce_async(np.full(5, float(rank)), name="good", op=hvd.Sum) if rank == 0 else None
    with pytest.raises(hvd.HorovodMismatchError):
        hvd.allreduce(np.ones(rank + 1), name="bad")
    result = hvd.synchronize(good) if good else hvd.allreduce(np.full(5, float(rank)), name="good", op=hvd.Sum)
    assert result is not None
    return float(result[0])


def test_other_operations_survive_a_mismatch() -> None:
    assert run_ranks(3, pending_survives) == [3.0] * 3


ALL_OPS = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
WITHOUT_MEANING: dict[Any, list[int]] = {
    np.int32: [hvd.Adasum],
    np.uint8: [hvd.Adasum],
    np.bool_: [hvd.Average, hvd.Adasum],
    np.complex64: [hvd.Min, hvd.Max, hvd.Adasum],
    np.complex128: [hvd.Min, hvd.Max, hvd.Adasum],
    ml_dtypes.float8_e4m3fn: ALL_OPS,
    ml_dtypes.float8_e5m2: ALL_OPS,
}


def local_errors() -> None:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    rank, size = hvd.rank(), hvd.size()

    # The same name while it is pending: rank 0 tells the others to go on when it has seen the error.
    if rank == 0:
        first = hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
        words = "^Requested to allreduce, allgather, or broadcast a tensor with the same name"
        with pytest.raises(ValueError, match=words) as caught:
            hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
        assert "twice" in str(caught.value)
        hvd.barrier()
        result = hvd.synchronize(first)
    else:
        hvd.barrier()
        result = hvd.allreduce(np.ones(3), name="twice", op=hvd.Sum)
    assert result is not None
    assert result.tolist() == [size] * 3

    # Roots.
    for root in (-1, size, 1000):
        with pytest.raises(ValueError, match="broadcast received invalid root rank"):
            hvd.broadcast(np.ones(3), root)
    if pair.included():
        with pytest.raises(ValueError, match="broadcast received invalid root rank"):
            hvd.broadcast(np.ones(3), 2, process_set=pair)

    # Sets.
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(np.ones(3), process_set=hvd.ProcessSet([0]))
    if not pair.included():
        for call in (
            lambda: hvd.allreduce(np.ones(3), name="x", process_set=pair),
            lambda: hvd.broadcast(np.ones(3), 0, name="x", process_set=pair),
            lambda: hvd.barrier(pair),
        ):
            with pytest.raises(ValueError):
                call()

    # Arrays.
    for array in (np.ones(3, ">f4"), np.ones(3, np.longdouble), np.array(["a"]), np.array([None])):
        takers: list[Callable[[Any], Any]] = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter]
        takers.append(lambda it: hvd.broadcast(it, 0))
        for taker in takers:
            with pytest.raises(ValueError, match=r"^Tensor type .* is not supported\."):
                taker(array)
    for function in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(ValueError, match=r"^Tensor is required to be contiguous\."):
            function(np.ones((4, 4)).T)
        with pytest.raises(ValueError, match=r"^Tensor is read-only"):
            function(np.broadcast_to(np.ones(1), (1,)))
        with pytest.raises(ValueError, match="needs a NumPy array, got list"):
            function([1.0])  # type: ignore[arg-type]

    # Ops and handles.
    with pytest.raises(ValueError, match="unknown op 17"):
        hvd.allreduce(np.ones(3), op=17)
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(np.ones(3), op=hvd.Sum, average=True)
    with pytest.raises(ValueError, match=r"^Handle 987654321 was not created or has been cleared"):
        hvd.poll(987654321)
    assert hvd.synchronize(987654321) is None

    # Names.
    with pytest.raises(ValueError):
        hvd.allreduce(np.ones(3), name="x" * 5000)
    hvd.allreduce(np.ones(3), name="ä" * 1000)
    hvd.allreduce(np.ones(3), name="")

    # Reductions that a type does not have, and factors that it does not have.
    for dtype, ops in WITHOUT_MEANING.items():
        for op in ops:
            with pytest.raises(ValueError, match=rf"reduction \w+ is not supported for {np.dtype(dtype).name}"):
                hvd.allreduce(np.ones(3, dtype), name="no meaning", op=op)
    with pytest.raises(ValueError, match="not supported for bool"):
        hvd.allreduce(np.ones(3, np.bool_), name="no meaning", op=hvd.Sum, prescale_factor=2.0)

    # None of it has stopped anything.
    assert hvd.allreduce([1.0], op=hvd.Sum).tolist() == [size]


def test_local_errors_are_raised_where_they_were_made() -> None:
    run_ranks(3, local_errors)


def after_shutdown() -> None:
    hvd.init()
    done = hvd.allreduce_async([1.0], name="done", op=hvd.Sum)
    while not hvd.poll(done):
        pass
    pending = hvd.allreduce_async([1.0], name="only here") if hvd.rank() == 0 else None
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce([1.0])
    if pending:
        assert hvd.poll(pending)
        with pytest.raises(hvd.HorovodInternalError, match=r"[Ss]hut ?down|shut down"):
            hvd.synchronize(pending)
    result = hvd.synchronize(done)  # it had ended before
    assert result is not None
    assert result.tolist() == [2.0]


def test_after_shutdown() -> None:
    run_ranks(2, after_shutdown)
