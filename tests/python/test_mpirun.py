"""Ranks of the real mpirun on machines."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks, file_of
from launchers import PAGE, REPORT, call_mpirun, found_out_by_meeting, mpirun_program, own_folder, start_mpirun
from machines import Machines, machines


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("--host h1:2,h2:2", "1122"),
        ("--host h1:2,h2:2 --map-by node", "1212"),
        ("--host h1:1,h2:3", "1222"),
        ("-np 5 --host h1:2,h2:3 --map-by node", "12122"),
        # Called on h1, which has no rank, or not rank 0.
        ("--host h2:2,h3:2 -x HOROVOD_GLOO_RENDEZVOUS_ADDR=h2", "2233"),
        ("-np 3 --host h3:2,h1:1 -x HOROVOD_GLOO_RENDEZVOUS_ADDR=h3", "331"),
    ],
)
def test_real_mpirun_on_two_machines(cluster: Machines, options: str, places: str) -> None:
    ended = call_mpirun(cluster, options)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == found_out_by_meeting([f"h{number}" for number in places])


def test_more_ranks_than_cores() -> None:
    """Open MPI binds these to cores in turns, and counts those of a host by cores."""
    count = 2 * len(os.sched_getaffinity(0))
    command = [str(mpirun_program()), "--allow-run-as-root", "--oversubscribe", "-np", str(count)]
    ended = start_mpirun([*command, sys.executable, "-P", "-c", REPORT])
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(found_out_by_meeting(["this"] * count))


def test_the_commands_of_the_page_run_as_they_stand(cluster: Machines, tmp_path: Path) -> None:
    files = dict(named for block in blocks(PAGE) if (named := file_of(block)))
    commands = [block.text for block in blocks(PAGE) if "mpirun -np" in block.text]
    tell = {
        "where.py": [f"rank {rank} on h{rank // 2 + 1}: 4 ranks" for rank in range(4)],
        "with_mpi.py": [f"rank {rank} of 4: its half sums up to {2 * (1 + rank % 2)}" for rank in range(4)],
    }
    root = f"OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 '{own_folder(cluster)}'"
    path = f"PATH='{mpirun_program().parent}':$PATH"
    for command, (script, told) in zip(commands, tell.items(), strict=True):
        assert script in command
        (tmp_path / script).write_text(files[script])
        here = command.replace(" python ", f" {sys.executable} ")  # which the other host has not in its PATH
        ended = start_mpirun(cluster["h1"].command(["sh", "-c", f"cd '{tmp_path}'; export {root} {path}\n{here}"]))
        assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, told), ended.stderr


USE_MPI = """
import ctypes
import os
import sys
mpi = ctypes.CDLL(os.environ["OMPI_LIBDIR_LOC"] + "/libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
def handle(name):
    return ctypes.byref(ctypes.c_char.in_dll(mpi, name))
def total(value):
    sent, received = ctypes.c_int(value), ctypes.c_int(0)
    of = (1, handle("ompi_mpi_int"), handle("ompi_mpi_op_sum"), handle("ompi_mpi_comm_world"))
    assert mpi.MPI_Allreduce(ctypes.byref(sent), ctypes.byref(received), *of) == 0
    return received.value
import horovod.numpy as hvd
{program}
sys.stdout.write(f"{hvd.rank()} {total(hvd.rank())}\\n")
assert mpi.MPI_Finalize() == 0
"""


@pytest.mark.parametrize("order", ["mpi.MPI_Init(None, None); hvd.init()", "hvd.init(); mpi.MPI_Init(None, None)"])
def test_a_program_may_use_mpi_too(cluster: Machines, order: str) -> None:
    program = USE_MPI.replace("{program}", order)
    ended = call_mpirun(cluster, "--host h1:2,h2:2", program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 6" for rank in range(4)]


def test_a_wrong_host_of_rank_0_is_told_at_once_with_what_to_set(cluster: Machines) -> None:
    """It is taken to be the one on which mpirun was called, which here has no rank."""
    start = time.monotonic()
    ended = call_mpirun(cluster, "--host h2:2,h3:2")
    assert ended.returncode != 0
    assert time.monotonic() - start < 20  # The hosts of the others would wait for 30 s, had mpirun not ended them.
    told = re.findall(r"HorovodInternalError: (init: .*)", ended.stderr)
    assert len(told) >= 2 and len(set(told)) == 1, ended.stderr  # Both ranks of rank 0's host.
    assert "rank 0 (local rank 0 of 2 on host h2) can't listen for the other hosts at h1 port" in told[0]
    assert "`mpirun -x HOROVOD_GLOO_RENDEZVOUS_ADDR=HOST ...` names the host of rank 0; h1 is where" in told[0]
