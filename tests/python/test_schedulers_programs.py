"""The same with the real torchrun and Slurm on machines; test_mpirun.py has Open MPI's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks, file_of
from launchers import PAGE, REPORT, call_torchrun, found_out_by_meeting
from machines import Machines, machines
from slurm import Slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(4, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)], ids=str)
def test_real_torchrun_on_two_machines(cluster: Machines, tmp_path: Path, counts: tuple[int, int]) -> None:
    lines = []
    for code, out, err in call_torchrun(cluster, tmp_path, counts):
        assert code == 0, err
        lines += out.splitlines()
    assert sorted(lines) == found_out_by_meeting(["h1"] * counts[0] + ["h2"] * counts[1])


SAY_WHY = """
import os
import sys
import time
import horovod.numpy as hvd
start = time.monotonic()
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    sys.stdout.write(f"{os.environ['RANK']} after {time.monotonic() - start:.0f} s: {error}\\n")
    sys.exit(1)
"""


def call_behind_firewall(
    cluster: Machines, folder: Path, ports: str, verdict: str, **environment: str
) -> tuple[dict[int, str], float]:
    """Has torchrun start four ranks when h1 lets in only some ports: what each rank is told, and the longest wait."""
    rules = ["tcp dport 22 accept", f"tcp dport {ports} accept", "ct state established accept"]
    with cluster["h1"].filtered(*rules, f"meta l4proto tcp {verdict}"):
        ended = call_torchrun(cluster, folder, (2, 2), SAY_WHY, **environment)
    assert all(code != 0 for code, _, _ in ended)
    lines = [line for _, out, _ in ended for line in out.splitlines()]
    told = [(int(line.split()[0]), float(line.split()[2]), line.partition(": ")[2]) for line in lines]
    assert sorted(rank for rank, _, _ in told) == [0, 1, 2, 3], ended  # One error each.
    return {rank: text for rank, _, text in told}, max(seconds for _, seconds, _ in told)


@pytest.mark.parametrize(("verdict", "seen"), [("drop", "nothing answers there"), ("reject", "nobody listens")])
def test_a_firewall_before_rank_0_under_torchrun_is_told_to_all(
    cluster: Machines, tmp_path: Path, verdict: str, seen: str
) -> None:
    """torchrun's own port is open, and the one after it, at which rank 0 awaits the other hosts, is not."""
    told, seconds = call_behind_firewall(cluster, tmp_path, "29500", verdict, HOROVOD_START_TIMEOUT="4")
    assert seconds < 15
    assert told[0] == told[1] and told[2] == told[3]
    assert "rank 2-3 did not arrive within 4 s; arrived: rank 0-1 of host h1" in told[0]
    assert "their hosts do not reach 10.77.0.1:29501: do firewalls let TCP through to it?" in told[0]
    assert "did not reach the rendezvous at 10.77.0.1 port 29501 within 4 s (" + seen in told[2]
    assert "rank 2 (local rank 0 of 2 on host h2" in told[2]
    assert "Under torchrun it is MASTER_ADDR, the port after MASTER_PORT" in told[2]


def test_a_firewall_between_ranks_under_torchrun_is_told_to_all(cluster: Machines, tmp_path: Path) -> None:
    """The hosts meet, but the ranks' own ports, by which tensors go, can't be reached."""
    told, seconds = call_behind_firewall(cluster, tmp_path, "29500-29501", "drop")
    assert seconds < 50
    assert len(set(told.values())) == 1, told
    assert re.search(r"rank [0-3] \(local rank .* is not connected to all ranks of other hosts after 30 s: ", told[0])
    # Whoever was first: one who connects, or one who is connected to.
    connects = r"rank 0 \(.* on host h1 .*\) at 10\.77\.0\.1:\d+ did not accept a connection \(nothing answers there\)"
    assert re.search(rf"{connects}|rank 2 \(.* on host h2 .*\) did not connect to 10\.77\.0\.1:\d+", told[0]), told[0]
    assert "It must let TCP through to the ports that the system chooses (net.ipv4.ip_local_port_range)." in told[0]


@pytest.fixture(scope="module")
def slurm(cluster: Machines) -> Slurm:
    return Slurm(cluster)


def test_real_slurm_on_four_machines(slurm: Slurm, tmp_path: Path) -> None:
    program = [sys.executable, "-P", "-c", REPORT]
    # As a script of sbatch does: srun hands the environment on, so that nobody sees the key on a command line.
    key = ["env", "HOROVOD_SECRET_KEY=s3cret"]
    told = slurm.run(*key, "srun", "-N3", "-n4", "--distribution=cyclic", *program).stdout
    assert sorted(told.splitlines()) == [
        "0 4 0 2 0 3 6.0",
        "1 4 0 1 1 3 6.0",
        "2 4 0 1 2 3 6.0",
        "3 4 1 2 0 1 6.0",
    ]
    assert sorted(slurm.run("srun", "-N1", "-n2", *program).stdout.splitlines()) == [
        "0 2 0 2 0 1 1.0",
        "1 2 1 2 0 1 1.0",
    ]
    ended = slurm.run("srun", "-N2", "-n2", *program, check=False)
    assert ended.returncode != 0
    assert "there is no key by which they know each other: set HOROVOD_SECRET_KEY_FILE" in ended.stderr

    # The script that the page shows.
    files = {named[0]: named[1] for block in blocks(PAGE) if (named := file_of(block))}
    (tmp_path / "where.py").write_text(files["where.py"])
    script = tmp_path / "script.sh"
    script.write_text(next(block.text for block in blocks(PAGE) if "#SBATCH" in block.text))
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm.run("env", path, "sbatch", "--wait", f"--chdir={tmp_path}", f"--output={tmp_path}/told", str(script))
    told = (tmp_path / "told").read_text()
    assert sorted(told.splitlines()) == [f"rank {rank} on h{rank // 2 + 1}: 4 ranks" for rank in range(4)]

    alone = ["0 1 0 1 0 1 0.0"]
    assert slurm.run("salloc", "-N2", "-n4", *program).stdout.splitlines() == alone
    script.write_text(f"#!/bin/sh\n{sys.executable} -P -c '{REPORT}' >{tmp_path}/told\n")
    slurm.run("sbatch", "-N2", "-n4", "--wait", str(script))
    assert (tmp_path / "told").read_text().splitlines() == alone


def reports(shown: str) -> list[str]:
    """What ranks have printed on a terminal, among all that it shows."""
    return sorted(re.findall(r"^(?:\d+ ){6}\d+\.0$", shown, re.MULTILINE))


def test_a_script_in_the_shell_of_srun_pty_is_a_world_of_one(slurm: Slurm, tmp_path: Path) -> None:
    """The shell has the variables of a task of four; what is started from its prompt is none of them."""
    program = tmp_path / "program.py"
    program.write_text(REPORT)
    python = f"{sys.executable} -P {program}"
    (tmp_path / "script.sh").write_text(f"{python}\n")
    alone = [
        python,
        f"timeout 50 {python}",
        f"{python} & wait",
        f"sh {tmp_path}/script.sh",
        f"cat /dev/null | {python}",
        f"setsid --wait {python}",  # As Jupyter starts kernels.
    ]
    bash = ["srun", "-N2", "-n4", "--pty", "bash", "--norc"]
    assert reports(slurm.run_on_terminal(bash, [*alone, "exit"])) == ["0 1 0 1 0 1 0.0"] * len(alone)
    # Another shell, and one shell inside of another.
    for shell in ("dash", "bash --norc"):
        shown = slurm.run_on_terminal(["srun", "-n4", "--pty", "dash", "-i"], [shell, python, "exit", "exit"])
        assert reports(shown) == ["0 1 0 1 0 1 0.0"]
    # Ranks that srun or horovodrun starts from that shell are a job.
    inner = [f"srun --overlap -N1 -n2 {python}", f"{sys.executable} -P -m horovod.runner.launch -np 2 {python}", "exit"]
    shown = slurm.run_on_terminal(bash, inner).replace("[0]<stdout>:", "").replace("[1]<stdout>:", "")
    assert reports(shown) == ["0 2 0 2 0 1 1.0"] * 2 + ["1 2 1 2 0 1 1.0"] * 2


def test_a_program_that_srun_pty_starts_is_a_rank(slurm: Slurm, tmp_path: Path) -> None:
    """Only rank 0 has the terminal; srun throws away what the others write."""
    (tmp_path / "program.py").write_text(REPORT)
    python = f"{sys.executable} -P {tmp_path}/program.py"
    (tmp_path / "script.sh").write_text(f"timeout 50 {python}\n")
    for command in (python, f"bash {tmp_path}/script.sh", f"timeout 50 {python}"):
        shown = slurm.run_on_terminal(["srun", "-N1", "-n2", "--pty", *command.split()])
        assert reports(shown) == ["0 2 0 2 0 1 1.0"], command
    assert reports(slurm.run_on_terminal(["srun", "-n1", "--pty", *python.split()])) == ["0 1 0 1 0 1 0.0"]
