"""A worker of the jobs that are attacked: `python attacked_job.py FOLDER GENERATIONS`.

It stops at every stage until the test lets it go on, by marks in the folder (attacked.py has the other hand). On two
hosts with two ranks each, rank 1 is late at its host, and rank 3 later, before it connects to the other host and before
its engine starts; ranks 1 and 2 record what they say to others. With two ranks on one host rank 1 does what 3 does.
"""

import json
import os
import socket
import sys

import numpy as np
from ranks import mark, marked, wait_for_mark
from recording import Recorder, record_everything

import horovod.numpy as hvd
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.follower import Follower
from horovod.common.rendezvous.rank import Rank
from horovod.common.rendezvous.wiring import Wiring

_Seen = dict[str, list[Recorder]]


def my_rank() -> int:
    """This process's rank."""
    return int(os.environ["HOROVOD_RANK"])


def is_last() -> bool:
    """Whether this is the rank for which the others wait."""
    return my_rank() == int(os.environ["HOROVOD_SIZE"]) - 1


def hold_up_linking(generation: int, recorders: _Seen) -> None:
    """Has the last rank wait before it connects to those of other hosts, which listen meanwhile."""
    link = Rank.link

    def held_up(self: Rank, wiring: Wiring) -> None:
        Rank.link = link  # type: ignore[method-assign]
        if is_last():
            wait_for_mark(f"attacked while linking {generation}")
        link(self, wiring)
        if recorders:
            seen = {name: [part.hex() for one in some for part in one.seen()] for name, some in recorders.items()}
            mark(f"recorded {generation}", json.dumps(seen))

    Rank.link = held_up  # type: ignore[method-assign]


def hold_up_the_start(generation: int) -> None:
    """Has the last rank wait before its engine starts, when those of the others run."""
    await_go = Follower.await_go

    def held_up(self: Follower, wiring: Wiring) -> None:
        Follower.await_go = await_go  # type: ignore[method-assign]
        await_go(self, wiring)
        mark(f"starting {generation}")
        wait_for_mark(f"attacked while starting {generation}")

    if is_last():
        Follower.await_go = held_up  # type: ignore[method-assign]


def record_what_the_leader_hears() -> dict[Connection, bytearray]:
    """Keeps what is said from now on over Unix sockets: no other process could pass on the descriptors that follow."""
    said: dict[Connection, bytearray] = {}
    send = Connection.send

    def recording(self: Connection, data: bytes) -> None:
        if self.is_open() and self.sock.family == socket.AF_UNIX:
            said.setdefault(self, bytearray()).extend(data)
        send(self, data)

    Connection.send = recording  # type: ignore[method-assign]
    return said


def train_until(end: str) -> None:
    """Adds numbers up, until a mark says that it is enough; all ranks stop together."""
    while True:
        done = hvd.allreduce(np.array([float(marked(end))]), op=hvd.Max)[0]
        total = hvd.allreduce(np.full(1000, float(hvd.rank())), op=hvd.Sum)[999]
        assert total == hvd.size() * (hvd.size() - 1) / 2
        if done:
            return


def main(generations: int) -> int:
    """Goes through the stages, as often through those of a meeting as there are to be generations."""
    rank = my_rank()
    mark(f"started {rank}", json.dumps([os.getpid(), os.environ["HOROVOD_SECRET_KEY"]]))
    wait_for_mark("attacked before anyone came")
    recorders = record_everything() if rank == 2 else {}
    said = record_what_the_leader_hears() if rank == 1 else {}
    for generation in range(1, generations + 1):
        hold_up_linking(generation, recorders)
        hold_up_the_start(generation)
        if rank == 1:
            wait_for_mark(f"attacked while gathering {generation}")
        hvd.init()
        if rank == 1:
            mark(f"recorded at the leader {generation}", json.dumps([part.hex() for part in said.values()]))
        mark(f"met {generation} {rank}")
        train_until(f"attacked while training {generation}")
        hvd.shutdown()
        mark(f"shut down {generation} {rank}")
        wait_for_mark(f"attacked after shutdown {generation}")
    print(f"rank {rank} is content", flush=True)
    return rank


def run_in(folder: str, generations: int) -> int:
    """What horovod.run calls, whose workers have no arguments."""
    sys.argv = ["", folder]
    return main(generations)


if __name__ == "__main__":
    main(int(sys.argv[2]))
