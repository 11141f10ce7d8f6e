"""Connections that break while hosts meet, and all processes live: the attempt ends for all, and the next succeeds."""

import os
import threading

import numpy as np
import pytest
from broken_connections import break_all, half_close, reset
from ranks import mark, run_ranks, wait_for_mark

import horovod.numpy as hvd
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.messages import Kind

HOSTS = [2, 2]
SIZE = sum(HOSTS)
WAYS = {"reset": reset, "half-closed": half_close}


def mark_when_accepted(rank: int) -> None:
    frame = Connection._frame

    def marking_frame(self: Connection, kind: Kind, body: bytes) -> None:
        if kind is Kind.ACCEPTED:
            mark(f"rank {rank} was accepted")
        frame(self, kind, body)

    Connection._frame = marking_frame  # type: ignore[method-assign]


def break_after_saying(last: Kind, way: str) -> None:
    """Has this process's connections break when it says something for the first time, and all take part in that."""
    say, first = Connection.say, threading.Lock()

    def breaking_say(self: Connection, kind: Kind, body: bytes = b"") -> None:
        say(self, kind, body)
        if kind is last and first.acquire(blocking=False):
            for rank in range(SIZE):
                wait_for_mark(f"rank {rank} was accepted")
            assert break_all(WAYS[way]) > 0

    Connection.say = breaking_say  # type: ignore[method-assign]


def init_twice(victim: int, moment: str, way: str) -> tuple[str, float]:
    rank = int(os.environ["HOROVOD_RANK"])
    mark_when_accepted(rank)
    if rank == victim:
        break_after_saying(Kind[moment], way)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.init()
    assert not hvd.is_initialized()
    hvd.init()
    return str(caught.value), float(hvd.allreduce(np.ones(1000), op=hvd.Sum)[999])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["REPORT", "LINKED"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_connection_that_breaks_ends_the_attempt_and_the_next_succeeds(victim: int, moment: str, way: str) -> None:
    """The other hosts name the victim; it and its own host may know no more than that the rendezvous is lost."""
    for rank, (text, total) in enumerate(run_ranks(SIZE, init_twice, victim, moment, way, hosts=HOSTS)):
        lost = "lost the rendezvous at 127.0.0.1 port"
        assert f"rank {victim} " in text or (lost in text and rank // 2 == victim // 2), f"rank {rank} was told: {text}"
        assert total == SIZE
