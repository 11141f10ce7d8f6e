"""Ranks that die, fall silent or never come: the others are told which, in time, and can go on."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Group, Outcome, mark, run_ranks, start_ranks, wait_for_mark, wait_for_output

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")

LIVENESS_BOUND = 10.0  # what is promised for a death; the aim is 1 s
SIZE = 3


STEPS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(np.ones(1000), name="step"),
    "adasum": lambda: hvd.allreduce(np.ones(1000), op=hvd.Adasum, name="step"),
    "allgather": lambda: hvd.allgather(np.ones((100 * hvd.rank(), 10)), name="step"),
    "alltoall": lambda: hvd.alltoall(np.ones(300), name="step"),
    "reducescatter": lambda: hvd.reducescatter(np.ones(1000), name="step"),
    "join": hvd.join,
    "process set": lambda: hvd.remove_process_set(hvd.add_process_set([0, 1])),
}


def run_until_failure(step: str = "allreduce") -> tuple[str, str, float]:
    """Does the same again and again until it fails; returns the error and when it came."""
    hvd.init()
    hvd.allreduce(np.ones(10), name="first")
    mark(f"running {hvd.rank()}")
    try:
        while True:
            STEPS[step]()
    except hvd.HorovodInternalError as error:
        return type(error).__name__, str(error), time.monotonic()


def wait_until_running(group: Group) -> None:
    for rank in range(SIZE):
        group.wait_for_file(f"running {rank}")


def assert_all_were_told(group: Group, outcomes: list[Outcome], lost: int, since: float, bound: float) -> None:
    for outcome in outcomes:
        assert outcome.finished, group.describe()
        error, text, when = outcome.value
        assert error == "HorovodInternalError", text
        assert f"rank {lost}" in text, f"rank {outcome.rank} was told: {text}"
        assert when - since < bound, f"rank {outcome.rank} was told after {when - since:.1f} s"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_rank_is_named_to_all_others(step: str, victim: int) -> None:
    with start_ranks(SIZE, run_until_failure, step) as group:
        wait_until_running(group)
        since = time.monotonic()
        group.kill(victim)
        survivors = [rank for rank in range(SIZE) if rank != victim]
        assert_all_were_told(group, group.wait(LIVENESS_BOUND + 5, survivors), victim, since, LIVENESS_BOUND)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_given_up_by_heartbeat(victim: int) -> None:
    with start_ranks(SIZE, run_until_failure, env={"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "1.5"}) as group:
        wait_until_running(group)
        since = time.monotonic()
        group.kill(victim, signal.SIGSTOP)
        survivors = [rank for rank in range(SIZE) if rank != victim]
        outcomes = group.wait(20, survivors)
        assert_all_were_told(group, outcomes, victim, since, 10)
        assert any("has shown no heartbeat for 1.5 s: it is stopped" in outcome.value[1] for outcome in outcomes)
        group.kill(victim, signal.SIGCONT)  # it is told as well, when it looks again
        (outcome,) = group.wait(20, [victim])
        assert outcome.finished, group.describe()
        assert outcome.value[0] == "HorovodInternalError"


def leave(way: str) -> Any:
    hvd.init()
    hvd.allreduce(np.ones(10), name="first")
    if hvd.rank() == 1:
        if way == "_exit":
            os._exit(3)
        if way == "exception":
            raise RuntimeError("the script is wrong")
        if way == "shutdown":
            hvd.shutdown()
        return None
    start = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        while True:
            hvd.allreduce(np.ones(1000), name="step")
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("way", ["_exit", "exception", "return", "shutdown"])
def test_a_rank_that_leaves_early_is_named(way: str) -> None:
    with start_ranks(SIZE, leave, way) as group:
        for outcome in group.wait(30, [0, 2]):
            assert outcome.finished, group.describe()
            assert outcome.error is None, group.describe()
            text, seconds = outcome.value
            assert "rank 1" in text
            assert seconds < LIVENESS_BOUND


def never_submits() -> Any:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        wait_for_mark("told 0")
        wait_for_mark("told 2")
        return None
    start = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(np.ones(4), name="forgotten")
    mark(f"told {hvd.rank()}")
    return str(caught.value), start, time.monotonic()


def test_a_stall_is_warned_about_and_then_given_up() -> None:
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    with start_ranks(SIZE, never_submits, env=variables) as group:
        outcomes = group.wait(40)
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.error is None, group.describe()
            text, _, told = outcome.value
            assert "'allreduce.forgotten' waits for rank 1" in text
            # The time counts from the first rank that submitted.
            assert 3 <= told - min(outcomes[0].value[1], outcomes[2].value[1]) < 15
        assert "Stalled: ALLREDUCE of tensor 'allreduce.forgotten'" in outcomes[0].stderr, "no warning before the end"


def submits_late() -> float:
    """Rank 1 has forgotten a tensor until a warning names it."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        wait_for_output(0, "'allreduce.late' waits for rank 1")
    return float(hvd.allreduce([1.0], name="late", op=hvd.Sum)[0])


def test_a_stall_warning_names_the_tensor_and_the_missing_rank_and_nothing_fails() -> None:
    assert run_ranks(SIZE, submits_late, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}) == [3.0] * SIZE


def recover() -> float:
    """After a loss, shutdown and init again work in the survivors, as a smaller job."""
    hvd.init()
    hvd.allreduce(np.ones(10), name="first")
    rank, ranks_here = hvd.rank(), hvd.local_size()
    if rank == 2:
        os._exit(1)
    with pytest.raises(hvd.HorovodInternalError):
        while True:
            hvd.allreduce(np.ones(10), name="step")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(np.ones(10), name="another")  # and so does everything until shutdown
    assert hvd.is_initialized()
    hvd.shutdown()
    # The survivors are on one host, or each on its own.
    here = min(2, ranks_here)
    os.environ.update(HOROVOD_SIZE="2", HOROVOD_LOCAL_SIZE=str(here), HOROVOD_CROSS_SIZE=str(2 // here))
    hvd.init()
    return float(hvd.allreduce([1.0], op=hvd.Sum, name="first")[0])


def test_survivors_can_start_again() -> None:
    with start_ranks(3, recover) as group:
        for outcome in group.wait(40, [0, 1]):
            assert outcome.value == 2.0, group.describe()


def killed_between() -> Any:
    """A rank dies while the others compute and have nothing pending: they are told at their next call."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    start = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce(np.ones(3), name="next")
    return time.monotonic() - start


def test_a_death_between_operations_is_told_at_the_next() -> None:
    with start_ranks(2, killed_between) as group:
        (outcome,) = group.wait(30, [0])
        assert outcome.error is None, group.describe()
        assert outcome.value < LIVENESS_BOUND


def everyone_ends() -> None:
    hvd.init()
    hvd.allreduce(np.ones(3))


def test_an_ordinary_end_is_no_fault() -> None:
    run_ranks(SIZE, everyone_ends)
