"""What a worker finds in its environment.

    HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME   its place
    HOROVOD_JOB_ID       random, the same for all workers of a job, no secret
    HOROVOD_SECRET_KEY   random, proves to the others that a process belongs to the job: never printed or put on a
                         command line
    HOROVOD_GLOO_RENDEZVOUS_ADDR, _PORT, HOROVOD_RENDEZVOUS_SERVER   where the hosts of the job meet, if it has several
    HOROVOD_HOST_ADDRESS the address of its host at which all other hosts reach it, if there are other machines
    HOROVOD_CONTROLLER, HOROVOD_CPU_OPERATIONS   "gloo", as scripts expect of a job without MPI
    PYTHONUNBUFFERED     so that lines come as they are printed
    tunables             those given as options or in the configuration file (options.py)

and otherwise what the launcher has; on another machine all but what belongs to the login here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.hosts import Slot

RENDEZVOUS_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RENDEZVOUS_SERVER")
# Not every job has these, and those of a job that this one was started by must not reach it.
_OF_ANOTHER_JOB = frozenset([*RENDEZVOUS_VARIABLES, "HOROVOD_HOST_ADDRESS", "HOROVOD_SECRET_KEY_FILE"])
# What belongs to a login, a terminal or a machine stays here.
_STAYING = frozenset(
    [
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "MAIL",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "TERM",
        "HOSTNAME",
        "DISPLAY",
        "WAYLAND_DISPLAY",
        "XAUTHORITY",
        "DBUS_SESSION_BUS_ADDRESS",
        "LS_COLORS",
    ]
)
_STAYING_PREFIXES = ("SSH_", "XDG_", "BASH_FUNC_")
_STAYING_SUFFIXES = ("CUDA_VISIBLE_DEVICES",)


@dataclass(frozen=True)
class Credentials:
    """What the workers of a job know each other by."""

    job_id: str = field(default_factory=lambda: os.urandom(16).hex())
    secret_key: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what belongs to another job."""
    return {name: value for name, value in environ.items() if name not in _OF_ANOTHER_JOB}


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables of the launcher that workers on other machines get too."""
    return {
        name: value
        for name, value in inherited(environ).items()
        if name not in _STAYING and not name.startswith(_STAYING_PREFIXES) and not name.endswith(_STAYING_SUFFIXES)
    }


def shared_variables(
    exported: Mapping[str, str], credentials: Credentials, rendezvous: Mapping[str, str]
) -> dict[str, str]:
    """What all workers of a job get besides the launcher's environment.

    Args:
        exported: Variables that options ask for.
        credentials: Of this job.
        rendezvous: Variables that lead to the rendezvous server, if there is one.
    """
    return {
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **exported,
        **rendezvous,
        "HOROVOD_JOB_ID": credentials.job_id,
        "HOROVOD_SECRET_KEY": credentials.secret_key,
    }


def place_variables(slot: Slot) -> dict[str, str]:
    """What tells a worker its place."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }


def worker_environments(slots: Sequence[Slot], shared: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each worker on this machine, by rank."""
    return [{**inherited(os.environ), **shared, **place_variables(slot)} for slot in slots]
