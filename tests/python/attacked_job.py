"""A worker of the job that test_attacks.py attacks: `python attacked_job.py FOLDER`.

It stops at every stage until the test lets it go on, by marks in the folder. Rank 2 records what it says to others.
"""

import json
import os

import numpy as np
from ranks import mark, marked, wait_for_mark
from recording import Recorder, record_everything

import horovod.numpy as hvd
from horovod.common.rendezvous.rank import Rank
from horovod.common.rendezvous.wiring import Wiring

RANK = int(os.environ["HOROVOD_RANK"])
LAST = 3


def hold_up_linking(generation: int, recorders: dict[str, list[Recorder]]) -> None:
    """Has the last rank wait before it connects to those of other hosts, which listen meanwhile."""
    link = Rank.link

    def held_up(self: Rank, wiring: Wiring) -> None:
        Rank.link = link  # type: ignore[method-assign]
        if RANK == LAST:
            wait_for_mark(f"attacked while linking {generation}")
        link(self, wiring)
        if recorders:
            seen = {name: [part.hex() for one in some for part in one.seen()] for name, some in recorders.items()}
            mark(f"recorded {generation}", json.dumps(seen))
        mark(f"linked {generation} {RANK}")

    Rank.link = held_up  # type: ignore[method-assign]


def train_until(end: str) -> None:
    """Adds numbers up, until a mark says that it is enough; all ranks stop together."""
    while True:
        done = hvd.allreduce(np.array([float(marked(end))]), op=hvd.Max)[0]
        total = hvd.allreduce(np.full(1000, float(hvd.rank())), op=hvd.Sum)[999]
        assert total == hvd.size() * (hvd.size() - 1) / 2
        if done:
            return


def main() -> None:
    """Goes through the stages, twice through those of a meeting."""
    mark(f"started {RANK}", json.dumps([os.getpid(), os.environ["HOROVOD_SECRET_KEY"]]))
    wait_for_mark("attacked before anyone came")
    recorders = record_everything() if RANK == 2 else {}
    for generation in (1, 2):
        hold_up_linking(generation, recorders)
        if RANK == 1:
            wait_for_mark(f"attacked while gathering {generation}")
        hvd.init()
        mark(f"met {generation} {RANK}")
        train_until(f"attacked while training {generation}")
        hvd.shutdown()
        mark(f"shut down {generation} {RANK}")
        wait_for_mark(f"attacked after shutdown {generation}")
    print(f"rank {RANK} is content")


if __name__ == "__main__":
    main()
