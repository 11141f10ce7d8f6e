"""What a worker finds in its environment.

    HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME   its place
    HOROVOD_JOB_ID       random, the same for all workers of a job, no secret
    HOROVOD_SECRET_KEY   random, proves to the others that a process belongs to the job: never printed or put on a
                         command line
    HOROVOD_GLOO_RENDEZVOUS_ADDR, _PORT, HOROVOD_RENDEZVOUS_SERVER   where the hosts of the job meet, if it has several
    HOROVOD_CONTROLLER, HOROVOD_CPU_OPERATIONS   "gloo", as scripts expect of a job without MPI
    PYTHONUNBUFFERED     so that lines come as they are printed
    tunables             those given as options or in the configuration file (options.py)

and otherwise what the launcher has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.hosts import Slot

# A job of one host needs none of these, and those of a job that this one was started by must not reach it.
RENDEZVOUS_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RENDEZVOUS_SERVER")


@dataclass(frozen=True)
class Credentials:
    """What the workers of a job know each other by."""

    job_id: str = field(default_factory=lambda: os.urandom(16).hex())
    secret_key: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)


def worker_environments(
    slots: Sequence[Slot], exported: Mapping[str, str], credentials: Credentials, rendezvous: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each worker, by rank.

    Args:
        slots: The places, by rank.
        exported: Variables that options ask for.
        credentials: Of this job.
        rendezvous: Variables that lead to the rendezvous server, if there is one.
    """
    shared = {
        **{name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES},
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **exported,
        **rendezvous,
        "HOROVOD_JOB_ID": credentials.job_id,
        "HOROVOD_SECRET_KEY": credentials.secret_key,
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
