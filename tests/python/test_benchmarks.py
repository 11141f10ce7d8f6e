"""The benchmarks run and print their tables. How fast is no matter for a test: see docs/performance.md."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the benchmarks compare with torch.distributed, and need torch"
)


def run_benchmarks(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@needs_torch
def test_a_small_run_writes_its_tables(tmp_path: Path) -> None:
    ended = run_benchmarks(
        *("--ranks", "1", "2", "--sizes", "4", "64K", "--rounds", "1", "--large", "4K", "--wait", "0.2"),
        *("--name", "smoke", "--output", str(tmp_path)),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads((tmp_path / "smoke.json").read_text())
    measured = [(line["subject"]["benchmark"], line["subject"]["ranks"]) for line in results["comparisons"]]
    for ranks in (1, 2):
        assert measured.count(("allreduce", ranks)) == 2
        assert measured.count(("gradient stream", ranks)) == 2
        assert measured.count(("gradient stream with computation", ranks)) == 2
    assert all(line["median"] > 0 and line["other_median"] > 0 for line in results["comparisons"])
    assert [(line["peer"], line["ranks"]) for line in results["waits"]] == [("horovod", 2), ("gloo", 2)]
    report = (tmp_path / "smoke.md").read_text()
    assert "| 2 | 4 B |" in report
    assert "| 1 | 64 KiB |" in report
    assert report.partition("\n\n")[2].strip() in ended.stdout


@needs_torch
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
    assert set(medians) == {"gradient_to_submitted_us", "end_us"}
    assert medians["end_us"] > 0


def test_the_rendezvous_is_measured_and_plotted(tmp_path: Path) -> None:
    program = str(RUN.with_name("rendezvous_scaling.py"))
    sizes = ["--hosts", "2", "20", "--ranks-per-host", "1", "3", "--output", str(tmp_path)]
    ended = subprocess.run([sys.executable, program, *sizes], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    measured = json.loads((tmp_path / "rendezvous.json").read_text())
    assert [(each["hosts"], each["ranks"], each["connections"]) for each in measured] == [
        (2, 2, 2),
        (20, 20, 20),
        (2, 6, 2),
        (20, 60, 20),
    ]
    assert all(each["bytes_sent"] > 0 and each["seconds"] > 0 for each in measured)
    for ranks in (1, 3):
        assert (tmp_path / f"rendezvous-{ranks}-per-host.svg").read_text().count("<polyline") == 3
