"""Ranks of the real mpirun on machines: where they are, and the key and the place of rank 0 that they get by PMIx."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks, file_of
from launchers import PAGE, REPORT, call_mpirun, found_out_by_meeting, mpirun, mpirun_program, srun, torchrun
from machines import Machines, machines
from waiting import wait_until

from horovod.common import pmix
from horovod.common.exceptions import HorovodInternalError
from horovod.common.schedulers import complete, has_pmix

PLACES = [f"{rank} 4 {rank % 2} 2 {rank // 2} 2 6.0" for rank in range(4)]


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
        ("--host h2:2,h3:2", "2233"),
        ("-np 3 --host h3:2,h1:1", "331"),
    ],
)
def test_real_mpirun_on_two_machines(cluster: Machines, options: str, places: str) -> None:
    ended = call_mpirun(cluster, options)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == found_out_by_meeting([f"h{number}" for number in places])


def test_the_commands_of_the_page_run_as_they_stand(cluster: Machines, tmp_path: Path) -> None:
    folder = mpirun_program().parent
    files = dict(named for block in blocks(PAGE) if (named := file_of(block)))
    (tmp_path / "where.py").write_text(files["where.py"])
    scripts = [block.text for block in blocks(PAGE) if "mpirun -np" in block.text]
    assert len(scripts) == 2
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    for script in scripts:
        here = script.replace(" python ", f" {sys.executable} ")  # which the other host has not in its PATH
        out = cluster["h1"].run(f"cd '{tmp_path}'; export {root} PATH='{folder}':$PATH\n{here}")
        assert sorted(out.splitlines()) == [f"rank {rank} on h{rank // 2 + 1}: 4 ranks" for rank in range(4)]


def test_ranks_of_other_starters_and_of_one_host_use_no_pmix() -> None:
    offered = {"PMIX_NAMESPACE": "prterun-h1-4711@1", "PMIX_SERVER_URI4": "prterun-h1-4711@0.1;tcp4://127.0.0.1:9"}
    assert all(has_pmix({**launcher(1), **offered}) for launcher in (mpirun, srun))
    assert not has_pmix(srun(1))
    assert not has_pmix({**srun(0), **torchrun(1), **offered}), "they are those of torchrun"
    assert not has_pmix({**mpirun(1), **offered, "HOROVOD_RANK": "1"}), "horovodrun, or by hand"
    assert not has_pmix({**mpirun(1), **offered, "OMPI_COMM_WORLD_SIZE": "2"}), "one host"


def test_a_key_that_is_given_to_all_is_used(cluster: Machines) -> None:
    program = f'{REPORT}\nfrom horovod.common.pmix import _heard\nassert \'"key": ""\' in str(_heard), _heard'
    ended = call_mpirun(cluster, "--host h1:2,h2:2 -x HOROVOD_SECRET_KEY", program, HOROVOD_SECRET_KEY="s3cret")
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, PLACES), ended.stderr


def test_a_key_that_only_some_ranks_have_is_an_error_that_says_so(cluster: Machines) -> None:
    """mpirun hands the environment on to the ranks of its own host, and to those of others only what -x names."""
    ended = call_mpirun(cluster, "--host h1:2,h2:2", HOROVOD_SECRET_KEY="s3cret")
    assert ended.returncode != 0
    assert "rank 0 was given a key for the job (or HOROVOD_INSECURE=1), and this rank was not" in ended.stderr
    ended = call_mpirun(cluster, "--host h2:2,h1:2", HOROVOD_SECRET_KEY="s3cret")
    assert ended.returncode != 0
    assert "this rank was given a key for the job, and rank 0 was not" in ended.stderr


def test_a_second_init_uses_what_was_heard(cluster: Machines) -> None:
    program = f"{REPORT}\nhvd.shutdown()\nhvd.init()\nassert hvd.allreduce([1.0], op=hvd.Sum)[0] == 4"
    ended = call_mpirun(cluster, "--host h1:2,h2:2", program)
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, PLACES), ended.stderr


def test_a_rank_that_does_not_come_is_an_error_on_the_others(cluster: Machines) -> None:
    program = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '3': time.sleep(60)\n" + REPORT
    ended = call_mpirun(cluster, "--host h1:2,h2:2 -x HOROVOD_START_TIMEOUT", program, HOROVOD_START_TIMEOUT="3")
    assert ended.returncode != 0
    assert "rank 0's could not be had through the launcher (not all ranks came to init within 3 s)" in ended.stderr


def test_without_the_library_it_is_told_what_to_set(cluster: Machines) -> None:
    program = "import os\nfor name in ('PMIX_PREFIX', 'OPAL_PREFIX'): os.environ[name] = '/nowhere'\n"
    program += "os.environ['LD_LIBRARY_PATH'] = ''\n"
    program += "import horovod.common.pmix as pmix\npmix._LIBRARY = 'libpmix.so.none'\n"
    ended = call_mpirun(cluster, "--host h1:2,h2:2", program + REPORT)
    assert ended.returncode != 0
    assert "libpmix.so.2 was not found). Give all ranks the same HOROVOD_SECRET_KEY" in ended.stderr


def test_a_rank_that_is_killed_while_it_waits_for_the_launcher_leaves_nothing_behind(cluster: Machines) -> None:
    program = """
import os, signal, threading, time
from pathlib import Path
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    import horovod.numpy as hvd
    threading.Thread(target=hvd.init, daemon=True).start()
    clients = []
    while not clients:
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        clients = [pid for pid in children if "pmix_client" in Path("/proc", pid, "cmdline").read_text()]
        time.sleep(0.01)
    print("there was one", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    ended = call_mpirun(cluster, "--host h1:2,h2:2", program)
    assert ended.returncode != 0 and "there was one" in ended.stdout, ended.stderr
    wait_until(lambda: not cluster["h1"].processes("pmix_client"), "no client is left", 5)


@pytest.mark.parametrize("library", ["real", "noise", "none"])
def test_a_launcher_that_does_not_answer_leaves_what_was_known(tmp_path: Path, library: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"prterun-h1-4711@0.1;tcp4://127.0.0.1:{unused.getsockname()[1]}"
    (tmp_path / "lib").mkdir()
    if library == "noise":
        (tmp_path / "lib/libpmix.so.2").write_text("noise")
    place = {**complete(mpirun(2)), "PMIX_SERVER_URI4": uri, "PMIX_NAMESPACE": f"prterun-h1-4711@{library}"}
    if library != "real":
        place["PMIX_PREFIX"] = str(tmp_path)
    with_key = {**place, "HOROVOD_SECRET_KEY": "s3cret"}
    assert pmix.complete(with_key, 5.0) == with_key and with_key["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "h1"
    with pytest.raises(HorovodInternalError, match="rank 0's could not be had through the launcher"):
        pmix.complete(place, 5.0)


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
def test_a_program_that_also_uses_mpi_is_not_disturbed_by_asking_pmix(cluster: Machines, order: str) -> None:
    program = USE_MPI.replace("{program}", order)
    ended = call_mpirun(cluster, "--host h2:2,h3:2", program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 6" for rank in range(4)]


def test_a_wrong_host_of_rank_0_is_told_at_once_with_what_to_set(cluster: Machines) -> None:
    """As if PMIx had not told: the host on which mpirun was called, which has no rank."""
    start = time.monotonic()
    ended = call_mpirun(cluster, "--host h2:2,h3:2 -x HOROVOD_GLOO_RENDEZVOUS_ADDR=h1")
    assert ended.returncode != 0
    assert time.monotonic() - start < 20  # The hosts of the others would wait for 30 s, had mpirun not ended them.
    told = re.findall(r"HorovodInternalError: (init: .*)", ended.stderr)
    assert len(told) >= 2 and len(set(told)) == 1, ended.stderr  # Both ranks of rank 0's host.
    assert "rank 0 (local rank 0 of 2 on host h2) can't listen for the other hosts at h1 port" in told[0]
    assert "`mpirun -x HOROVOD_GLOO_RENDEZVOUS_ADDR=HOST ...` names the host of rank 0; h1 is where" in told[0]
