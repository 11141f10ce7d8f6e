"""The benchmarks run and print their tables. How fast is no matter for a test: see docs/performance.md."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from skipping import skip
from wire_tap import tapping

from horovod.common.rendezvous.encryption import find_encryption

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import hosts
from host_teams import EncryptionStadium
from subject import ALLREDUCE, ENCRYPTION_WAYS, Subject

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
needs_libssl = pytest.mark.skipif(
    not find_encryption().library, reason="needs OpenSSL 3 (Debian's package libssl3): " + find_encryption().trouble
)

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the benchmarks compare with torch.distributed, and need torch"
)
needs_bench = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None or shutil.which("c++") is None,
    reason="the benchmarks draw with matplotlib (the extra `bench`) and compile a program (the Debian package g++)",
)
MPIS = ("Open MPI", "MPICH")
HOST_GOALS = [
    "allreduce between 2 hosts, 1 Gbit/s, from 4 MiB",
    "allreduce between 2 hosts, unshaped, from 4 MiB",
    "allreduce between 2 hosts, every size",
    "allreduce between 2 hosts, every size",
]


def run_benchmarks(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@needs_torch
@needs_bench
def test_the_quick_benchmark_fills_every_row(tmp_path: Path) -> None:
    effort = ("--quick", "--rounds", "1", "--seconds", "0.001", "--footprint", "256K")
    short = (*effort, "--name", "smoke", "--output", str(tmp_path))
    ended = run_benchmarks(*short, "--ranks", "2", "--ranks-per-host", "1", "--wait", "0.2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads((tmp_path / "smoke.json").read_text())
    measured = {(r["subject"]["kind"], r["way"]) for r in results["records"] if not r["subject"]["link"]}
    peers = ["gloo", *(name for name in MPIS if f"LEFT OUT: {name}" not in ended.stderr)]
    for kind in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
        assert {(kind, way) for way in ("horovod", "horovod.torch", *peers)} <= measured
    assert {("allreduce", way) for way in ("horovod, hvd_alloc", "limit", "memcpy by all")} <= measured
    assert {("training step", way) for way in ("alone", "in step", "horovod", "DDP, gloo")} <= measured
    models = {r["subject"]["model"] for r in results["records"] if r["subject"]["kind"] == "training step"}
    assert models == {"400 small tensors", "29 M parameters", "CNN", "transformer, 14 M"}
    assert all(0 < r["median"] <= r["p99"] for r in results["records"])
    between_hosts = {
        (r["subject"]["link"], r["subject"]["bytes"], r["way"]) for r in results["records"] if r["subject"]["link"]
    }
    has_hosts = "LEFT OUT: hosts" not in ended.stderr
    host_peers = [name for name in ("gloo", "Open MPI") if name in peers]
    encryption = () if "LEFT OUT: encryption" in ended.stderr else ENCRYPTION_WAYS
    assert between_hosts == {
        (link, size, way)
        for link in ("unshaped", "1 Gbit/s")
        for size in (4, 64 << 10, 4 << 20)
        for way in ("horovod", *host_peers, "limit", *encryption)
        if has_hosts
    }
    missing = [line for line in ended.stdout.splitlines() if line.endswith("| not measured |")]
    assert [line.split("|")[1].strip() for line in missing] == [
        "allreduce on 4 ranks, every size",
        "allreduce on 7 ranks, every size",
        *([] if has_hosts else HOST_GOALS),
    ]
    report = (tmp_path / "smoke.md").read_text()
    costs = re.findall(r"^## Cost of encryption.*?\n((?:\||\n).*?)\n\n", report, re.MULTILINE | re.DOTALL)
    assert [table.count("| 1 a host |") for table in costs] == ([3, 3] if encryption else [])
    assert all("| all encrypted / in clear |" in table and " - |" not in table for table in costs)
    assert report.partition("## Goals\n")[2].partition("![")[0].strip() in ended.stdout
    assert (tmp_path / "smoke.png").read_bytes().startswith(b"\x89PNG")

    # A run of one section leaves the others as they were.
    again = run_benchmarks(*short, "--ranks", "2", "--only", "allreduce", "--sizes", "8")
    assert again.returncode == 0, again.stdout + again.stderr
    both = json.loads((tmp_path / "smoke.json").read_text())
    new = [record for record in both["records"] if record not in results["records"]]
    assert len(both["records"]) == len(results["records"]) + len(new)
    assert {(r["subject"]["ranks"], r["subject"]["bytes"]) for r in new} == {(2, 8)}
    assert {r["way"] for r in new} == {way for kind, way in measured if kind == "allreduce"}


@needs_libssl
@pytest.mark.parametrize("way", ENCRYPTION_WAYS)
def test_the_cost_of_encryption_is_that_of_what_is_encrypted(way: str) -> None:
    """What the three teams send each other can be seen on the cable, or not."""
    if reason := hosts.why_not():
        skip(reason)
    subject = Subject(ALLREDUCE, 2, 1 << 20, link=hosts.UNSHAPED)
    with hosts.TwoHosts() as two, tapping(two.pids[0], hosts.INTERFACE) as tap, EncryptionStadium(1, two) as stadium:
        (team,) = (team for team in stadium.teams if team.ways == (way,))
        assert team.prepare(subject, [way], 1 << 21)
        assert len(team.run(way, 3)) == 3
        stadium.close()
        seen = tap.stop()
    ones = np.ones(200, np.float32).tobytes()
    names = b"allreduce.1048576"
    assert (ones in seen, names in seen) == {
        "in clear": (True, True),
        "control encrypted": (True, False),
        "all encrypted": (False, False),
    }[way]
    assert len(seen) > 3 * 2 * subject.bytes


@needs_torch
@needs_bench
def test_a_wrong_size_is_explained() -> None:
    ended = run_benchmarks("--sizes", "6")
    assert ended.returncode == 2
    assert "'6' is no size: expected a multiple of 4 bytes, like 4, 64K or 256M" in ended.stderr


@needs_torch
def test_the_cost_of_a_gradient_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = [sys.executable, str(RUN.parent / "gradient_hook.py"), "--layers", "3", "--steps", "4"]
    launch = [sys.executable, "-P", "-m", "horovod.runner.launch", "-np", "2", *script, "--report", str(report)]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks, 6 gradients, 4 steps; microseconds" in ended.stdout
    medians = json.loads(report.read_text())
    assert set(medians) == {"hook_us", "end_us"}
    assert medians["end_us"] > 0


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="it compares with TensorFlow's own")
def test_steps_of_tensorflow_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = [sys.executable, str(RUN.parent / "tensorflow_steps.py"), "--models", "CNN", "--batch-size", "2"]
    short = ["--rounds", "2", "--steps", "2", "--report", str(report)]
    launch = [sys.executable, "-P", "-m", "horovod.runner.launch", "-np", "2", *script, *short]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks, CNN: alone" in ended.stdout
    medians = json.loads(report.read_text())
    assert set(medians["CNN"]) == {"alone", "horovod", "MultiWorkerMirroredStrategy"}
    assert all(median > 0 for median in medians["CNN"].values())


@needs_bench
def test_the_rendezvous_is_measured_and_plotted(tmp_path: Path) -> None:
    program = str(RUN.with_name("rendezvous_scaling.py"))
    sizes = ["--ranks", "6", "60", "--ranks-per-host", "1", "3", "--output", str(tmp_path)]
    ended = subprocess.run([sys.executable, program, *sizes], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    measured = json.loads((tmp_path / "rendezvous.json").read_text())
    assert [(each["hosts"], each["ranks"], each["connections"], each["most_open"]) for each in measured] == [
        (6, 6, 6, 6),
        (60, 60, 60, 60),
        (2, 6, 2, 2),
        (20, 60, 20, 20),
    ]
    names = ("bytes_sent", "bytes_received", "server_seconds", "seconds")
    assert all(each[name] > 0 for each in measured for name in names)
    assert (tmp_path / "rendezvous.md").read_text().count("\n| ") == 4
    assert (tmp_path / "rendezvous.png").read_bytes().startswith(b"\x89PNG")
    ended = subprocess.run([sys.executable, program, "--ranks", "9"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--ranks 9: expected at least two hosts with 8 ranks each" in ended.stderr
