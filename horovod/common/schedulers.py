"""Who this process is where something else than horovodrun has started it: srun, mpirun, torchrun, Kubernetes, LSF.

Each sets variables of its own, from which those of Horovod (environment.py) follow:

    launcher      known by                        rank 0 is on
    torchrun      TORCHELASTIC_RUN_ID, RANK ...   MASTER_ADDR; at the port after MASTER_PORT, which torchrun itself uses
    jsrun         JSM_NAMESPACE_RANK              the first compute host of LSB_MCPU_HOSTS
    mpirun        OMPI_COMM_WORLD_RANK            the host that mpirun was called on, if nobody names another
    mpiexec       PMI_RANK, MPI_LOCALRANKID       not known: HOROVOD_GLOO_RENDEZVOUS_ADDR is needed
    srun          SLURM_STEP_ID, SLURM_PROCID     the first of SLURM_STEP_NODELIST
    Kubernetes    JOB_COMPLETION_INDEX            HOROVOD_GLOO_RENDEZVOUS_ADDR, from the manifest

Whatever HOROVOD_* says wins, so that a variable can be corrected, and horovodrun inside of any of these is the
launcher. A shell inside an allocation has no rank, and a script in it is a job of one process; that of `srun --pty
bash` has the variables of a task, and is known by being a shell (shells.py). The port at which the hosts meet follows
from the job's id where nobody has named one.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

from horovod.common import shells

# Ports below those that Linux gives out by itself.
_FIRST_PORT, _PORTS = 20000, 12000
# Numbers from here on are not those of srun: the batch script, the interactive shell, the allocation itself.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# More than any cluster has.
_MAX_NODES = 1_000_000

Variables = dict[str, str]


def complete(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with those HOROVOD_* variables that follow from another launcher's.

    Raises:
        ValueError: That launcher's variables can't be understood.
    """
    if environ.get("HOROVOD_RANK") or environ.get("HOROVOD_LOCAL_RANK"):
        return environ
    for find in _LAUNCHERS:
        found = find(environ)
        if found is not None:
            given = {name: value for name, value in environ.items() if value}
            if found["HOROVOD_SIZE"] != found["HOROVOD_LOCAL_SIZE"]:
                found.setdefault("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port_of(found["HOROVOD_JOB_ID"])))
            return {**found, **given}
    return environ


def names_come_late(environ: Mapping[str, str]) -> bool:
    """Whether the name of rank 0's host may be unknown at first: Kubernetes learns it when its pod is there."""
    return "JOB_COMPLETION_INDEX" in environ


def advice(environ: Mapping[str, str]) -> str:
    """What may help if no rank 0 is found at HOROVOD_GLOO_RENDEZVOUS_ADDR; empty where there is no more to say."""
    if environ.get("HOROVOD_JOB_ID", "").startswith("torchrun "):
        return "Under torchrun it is MASTER_ADDR, the port after MASTER_PORT, unless HOROVOD_GLOO_RENDEZVOUS_* are set."
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return ""
    text = "`mpirun -x HOROVOD_GLOO_RENDEZVOUS_ADDR=HOST ...` names the host of rank 0"
    here, address = _where_mpirun_was_called(environ), environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if here and here == address:
        text += f"; {here} is where mpirun was called, which is not always a host with ranks"
    return f"{text}."


def _torchrun(environ: Mapping[str, str]) -> Variables | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(environ.get(name) for name in names):
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in names[:4])
    master, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    found = _place(rank, size, local_rank, local_size)
    found |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": master,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port + 1 if port < 65535 else port - 1),
        "HOROVOD_JOB_ID": f"torchrun {run} {master} {port} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    }
    if environ.get("GROUP_RANK"):  # The number of the agent; there may be several on a host.
        found["HOROVOD_HOSTNAME"] = f"{_own_name()} group {environ['GROUP_RANK']}"
    return found


def _jsrun(environ: Mapping[str, str]) -> Variables | None:
    if not environ.get("JSM_NAMESPACE_RANK"):
        return None
    names = [f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    found = _place(*(_number(environ, name) for name in names))
    hosts = lsf_hosts(environ)
    found["HOROVOD_JOB_ID"] = f"lsf {environ.get('LSB_JOBID', '')} {environ.get('JSM_NAMESPACE_ID', '')}"
    if hosts:
        found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = hosts[0][0]
    return found


def _open_mpi(environ: Mapping[str, str]) -> Variables | None:
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    found = _place(*(_number(environ, name) for name in names))
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    found["HOROVOD_JOB_ID"] = f"mpirun {job}"
    host = _where_mpirun_was_called(environ)
    if host:
        found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = host
    return found


def _where_mpirun_was_called(environ: Mapping[str, str]) -> str | None:
    """The host of mpirun, on which most often rank 0 is too."""
    # Open MPI 5 names a job after it; 4 has its address in another variable.
    named = re.fullmatch(r"prterun-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    addressed = re.match(r"[^;]*;tcp://([^:,]+)[,:]", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    found = named or addressed
    return found[1] if found else None


def _hydra(environ: Mapping[str, str]) -> Variables | None:
    """mpiexec of MPICH and Intel MPI."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not all(environ.get(name) for name in names):
        return None
    found = _place(*(_number(environ, name) for name in names))
    # It gives jobs no name. Ranks of one host find each other by their parent (rendezvous/rank.py).
    return {**found, "HOROVOD_JOB_ID": ""}


def _srun(environ: Mapping[str, str]) -> Variables | None:
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
    if not all(environ.get(name) for name in names):
        return None
    step, rank, local_rank, node, size = (_number(environ, name) for name in names)
    if step >= _FIRST_SPECIAL_STEP:
        return None
    # With --pty the variables are those of rank 0's terminal. If that runs a shell, the tasks are the shells: what is
    # started from its prompt is none of them. A program, or a script, that srun --pty itself starts is a rank.
    if environ.get("SLURM_PTY_PORT") and shells.is_started_from_prompt():
        return None
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) != size or not 0 <= node < len(counts) or local_rank >= counts[node]:
        told = environ.get("SLURM_STEP_TASKS_PER_NODE")
        raise ValueError(
            f"init: srun says SLURM_STEP_TASKS_PER_NODE={told!r}, which does not go with "
            f"SLURM_STEP_NUM_TASKS={size}, SLURM_NODEID={node} and SLURM_LOCALID={local_rank}."
        )
    first = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    found = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(counts[node]),
        "HOROVOD_CROSS_RANK": str(sum(count > local_rank for count in counts[:node])),
        "HOROVOD_CROSS_SIZE": str(sum(count > local_rank for count in counts)),
        "HOROVOD_HOSTNAME": environ.get("SLURMD_NODENAME") or f"node {node}",
        "HOROVOD_JOB_ID": f"slurm {environ.get('SLURM_JOB_ID', '')}.{step}",
    }
    if first:
        found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = first
    return found


def _kubernetes(environ: Mapping[str, str]) -> Variables | None:
    """A pod of an indexed Job whose manifest sets HOROVOD_SIZE: one rank a pod."""
    if not environ.get("JOB_COMPLETION_INDEX") or not environ.get("HOROVOD_SIZE"):
        return None
    rank, size = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, "HOROVOD_SIZE")
    found = _place(rank, size, 0, 1)
    return {**found, "HOROVOD_JOB_ID": f"kubernetes {environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')}"}


# Those that may run inside of others first: mpirun itself uses srun, torchrun is started by it.
_LAUNCHERS: Sequence[Callable[[Mapping[str, str]], Variables | None]] = (
    _torchrun,
    _jsrun,
    _open_mpi,
    _hydra,
    _srun,
    _kubernetes,
)


def _place(rank: int, size: int, local_rank: int, local_size: int) -> Variables:
    """The variables of a rank; its cross rank and size are found out when the hosts meet.

    So is its local rank: Open MPI counts the ranks of a host by the cores that they are bound to, not by their ranks.
    On one host that is known at once.
    """
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank if local_size == size else local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
    }


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        value = int(environ.get(name, ""))
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"{name}={environ.get(name)!r} can't be understood: expected an integer from 0.")
    return value


def port_of(job_id: str) -> int:
    """A port for a job, always the same."""
    digest = hashlib.sha256(job_id.encode("utf-8", "replace")).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS


def _own_name() -> str:
    import socket

    return socket.gethostname()


def expand_counts(text: str) -> list[int]:
    """Slurm's number of tasks by node, such as "2(x3),1": [2, 2, 2, 1].

    Raises:
        ValueError: It is something else.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item)
        if match is None or len(counts) + int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} can't be understood: expected such as 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first of Slurm's list of hosts, such as gpu01 of "gpu[01-03,7],login"; none of an empty list.

    Raises:
        ValueError: It is something else.
    """
    item = re.match(r"(?:[^,\[\]]|\[\d[\d,-]*\])*", text)
    assert item is not None
    if text[item.end() : item.end() + 1] not in ("", ","):
        raise ValueError(f"SLURM_STEP_NODELIST={text!r} can't be understood: expected such as gpu[01-03,7],login.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", item[0])


def lsf_hosts(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """The compute hosts of an LSF job and their slots, from LSB_MCPU_HOSTS; none outside of one.

    Raises:
        ValueError: The variable can't be understood.
    """
    text = environ.get("LSB_MCPU_HOSTS", "")
    words = text.split()
    if len(words) % 2 != 0 or not all(word.isdigit() and len(word) < 7 for word in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS={text!r} can't be understood: expected hosts and their slots.")
    hosts = [(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]
    # A job's first host may be the one that only runs its script.
    if len(hosts) > 1 and hosts[0][1] == 1 and all(slots > 1 for _, slots in hosts[1:]):
        return hosts[1:]
    return hosts
