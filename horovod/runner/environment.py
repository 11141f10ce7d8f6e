"""What a worker finds in its environment.

    HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME   its place
    HOROVOD_JOB_ID       random, the same for all workers of a job, no secret
    HOROVOD_SECRET_KEY   random, proves to the others that a process belongs to the job: never printed or put on a
                         command line
    HOROVOD_CONTROLLER, HOROVOD_CPU_OPERATIONS   "gloo", as scripts expect of a job without MPI
    PYTHONUNBUFFERED     so that lines come as they are printed
    tunables             those given as options or in the configuration file (options.py)

and otherwise what the launcher has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from horovod.runner.hosts import Slot


def worker_environments(slots: Sequence[Slot], exported: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each worker, by rank.

    Args:
        slots: The places, by rank.
        exported: Variables that options ask for.
    """
    shared = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **exported,
        "HOROVOD_JOB_ID": os.urandom(16).hex(),
        "HOROVOD_SECRET_KEY": os.urandom(32).hex(),
    }
    return [
        {
            **shared,
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        }
        for slot in slots
    ]
