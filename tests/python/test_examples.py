"""The examples run, alone and with horovodrun, and learn."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from launching import run

DIGITS = str(ROOT / "examples" / "numpy_digits.py")


@pytest.mark.parametrize("hosts", ["localhost:1", "localhost:2", "localhost:3", "localhost:2,127.0.0.2:2"])
def test_the_digits_are_learned_on_any_number_of_processes_and_hosts(hosts: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    processes = sum(int(host.split(":")[1]) for host in hosts.split(","))
    script = [sys.executable, DIGITS, "--epochs", "20", "--report", str(report)]
    code, out, err = run("-np", str(processes), "-H", hosts, *script, TQDM_DISABLE="1")
    assert code == 0, err
    results = json.loads(report.read_text())
    assert results["processes"] == processes
    assert results["accuracy"] > 0.95
    assert results["samples_per_s"] > 0
    # Rank 0 alone speaks.
    assert re.fullmatch(rf"\[0\]<stdout>:{processes} process\(es\): accuracy [\d.]+%, [\d,]+ samples/s\n", out)


def test_only_rank_0_shows_progress() -> None:
    code, _, err = run("-np", "2", sys.executable, DIGITS, "--epochs", "3")
    assert code == 0, err
    assert "3/3" in err
    assert "[1]<" not in err


def test_the_digits_without_horovodrun() -> None:
    ended = subprocess.run(
        [sys.executable, DIGITS, "--epochs", "1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("1 process(es): accuracy")


def test_too_many_samples_are_refused() -> None:
    code, _, err = run("-np", "2", sys.executable, DIGITS, "--batch-size", "1000")
    assert code == 2
    assert "2 processes x 1000 samples are more than the 1437 that exist" in err


def test_the_demo_compares_one_process_with_two() -> None:
    demo = [sys.executable, "examples/speedup.py", "examples/numpy_digits.py", "--epochs", "5"]
    ended = subprocess.run(
        demo, cwd=ROOT, env={**os.environ, "CI": "true"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"^ +[12] +[\d.]+% +([\d,]+)$", ended.stdout, re.M)]
    assert len(rates) == 2
    told = re.search(r"Two processes were ([\d.]+) times as fast as one", ended.stdout)
    assert told
    assert float(told[1]) == pytest.approx(rates[1] / rates[0], abs=0.02)
    assert "\r" not in ended.stdout + ended.stderr  # no live display in a log


def test_the_demo_fails_if_the_script_does() -> None:
    demo = [sys.executable, "examples/speedup.py", "examples/numpy_digits.py", "--epochs", "none"]
    ended = subprocess.run(demo, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "invalid int value" in ended.stderr
