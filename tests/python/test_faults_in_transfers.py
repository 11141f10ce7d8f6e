"""Ranks and connections lost in the middle of a large transfer, or in shutdown: the others are told in time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from broken_connections import break_all, half_close, reset
from ranks import Group, Outcome, mark, start_ranks

import horovod.numpy as hvd
from horovod import _core

BOUND = 10.0
SIZE = 3
LARGE = 8 << 20  # bytes: many chunks, and more than the sockets hold
SHORT_HEARTBEAT = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "2"}


def signal_self(signum: int) -> None:
    os.kill(os.getpid(), signum)


FAULTS: dict[str, Callable[[], Any]] = {
    "killed": lambda: signal_self(signal.SIGKILL),
    "stopped": lambda: signal_self(signal.SIGSTOP),
    "exits": lambda: os._exit(3),
    "reset": lambda: break_all(reset),
    "half-closed": lambda: break_all(half_close),
}

TRANSFERS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda array: hvd.allreduce(array, op=hvd.Max, name="large"),
    "broadcast": lambda array: hvd.broadcast(array, 0, name="large"),
    "allgather": lambda array: hvd.allgather(array, name="large"),
    "alltoall": lambda array: hvd.alltoall(array[: len(array) // hvd.size() * hvd.size()], name="large"),
    "reducescatter": lambda array: hvd.reducescatter(array, op=hvd.Sum, name="large"),
}


def strike_when_moving(fault: str) -> None:
    """Lets it happen when this rank has moved some of a transfer that takes much more."""

    def moved() -> int:
        counters = _core.counters()
        return int(counters["bytes_in"] + counters["net_payload_out"])

    before = moved()
    while moved() < before + LARGE // 4:
        time.sleep(0)
    mark("struck")
    FAULTS[fault]()


def transfer_until_failure(victim: int, fault: str, kind: str) -> tuple[str, str, float]:
    """Moves the same large array again and again, so that whatever happens does so in the middle of it."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == victim:
        threading.Thread(target=strike_when_moving, args=(fault,), daemon=True).start()
    array = np.ones(LARGE // 4, np.float32)
    try:
        while True:
            TRANSFERS[kind](array)
    except hvd.HorovodInternalError as error:
        return type(error).__name__, str(error), time.monotonic()


def assert_told(group: Group, outcome: Outcome, culprits: list[int], since: float) -> None:
    assert outcome.finished, f"rank {outcome.rank} was not told\n{group.describe()}"
    assert outcome.error is None, group.describe()
    error, text, when = outcome.value
    assert error == "HorovodInternalError", text
    assert any(f"rank {rank} " in text for rank in culprits), f"rank {outcome.rank} was told: {text}"
    assert when - since < BOUND, f"rank {outcome.rank} was told after {when - since:.1f} s"


def strike(hosts: list[int], victim: int, fault: str, kind: str, culprits: list[int]) -> None:
    """Has the victim lost while it transfers; all others have to be told, and end."""
    arguments = victim, fault, kind
    with start_ranks(sum(hosts), transfer_until_failure, *arguments, hosts=hosts, env=SHORT_HEARTBEAT) as group:
        group.wait_for_file("struck")
        since = time.monotonic()
        for outcome in group.wait(BOUND + 10, [rank for rank in range(sum(hosts)) if rank != victim]):
            assert_told(group, outcome, culprits, since)
            assert outcome.returncode == 0, group.describe()
        if fault == "stopped":
            group.kill(victim, signal.SIGCONT)
        if fault not in ("killed", "exits"):  # it lives, and is told as well
            (outcome,) = group.wait(BOUND + 10, [victim])
            assert_told(group, outcome, list(range(sum(hosts))), time.monotonic())


@pytest.mark.parametrize("hosts", [[3], [1, 1, 1], [2, 1]], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "stopped", "exits"])
def test_a_rank_lost_in_the_middle_of_a_transfer_is_named(hosts: list[int], victim: int, fault: str) -> None:
    strike(hosts, victim, fault, "allreduce", [victim])


@pytest.mark.parametrize("hosts", [[1, 1, 1], [2, 1]], ids=str)
@pytest.mark.parametrize("kind", ["broadcast", "allgather", "alltoall", "reducescatter"])
def test_a_rank_killed_in_any_other_transfer_is_named(hosts: list[int], kind: str) -> None:
    strike(hosts, 2, "killed", kind, [2])


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("fault", ["reset", "half-closed"])
def test_a_rank_whose_connections_break_is_named(victim: int, fault: str) -> None:
    strike([1, 1, 1], victim, fault, "allreduce", [victim])


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("fault", ["reset", "half-closed"])
def test_a_break_between_two_hosts_names_a_rank_on_one_of_them(victim: int, fault: str) -> None:
    """Nobody can tell which end is to blame: those with connections of their own to the victim name it or its peers."""
    strike([2, 2], victim, fault, "allreduce", [0, 1, 2, 3])


# ---- In shutdown -----------------------------------------------------------------------------------------------------


def lose_in_shutdown(victim: int, fault: str, delay: float) -> float:
    """One rank is lost when it, or everyone, shuts down; returns how long that took."""
    hvd.init()
    hvd.allreduce(np.ones(1000), name="x")
    hvd.barrier()
    if hvd.rank() == victim:
        if delay:
            threading.Timer(delay, FAULTS[fault]).start()
        else:
            FAULTS[fault]()
    start = time.monotonic()
    hvd.shutdown()
    assert not hvd.is_initialized()
    return time.monotonic() - start


IN_SHUTDOWN = [
    (hosts, fault, delay)
    for hosts in ([3], [1, 1, 1], [2, 1])
    for fault, delay in (("killed", 0.0), ("killed", 0.001), ("stopped", 0.0), ("reset", 0.0), ("half-closed", 0.0))
    if len(hosts) > 1 or fault in ("killed", "stopped")  # there is no connection that could break
]


@pytest.mark.parametrize(("hosts", "fault", "delay"), IN_SHUTDOWN, ids=str)
def test_a_loss_in_shutdown_holds_nobody_up(hosts: list[int], fault: str, delay: float) -> None:
    victim = 1
    with start_ranks(SIZE, lose_in_shutdown, victim, fault, delay, hosts=hosts, env=SHORT_HEARTBEAT) as group:
        for outcome in group.wait(30, [0, 2]):
            assert outcome.finished, group.describe()
            assert outcome.error is None, group.describe()
            assert outcome.returncode == 0, group.describe()
            assert outcome.value < BOUND
