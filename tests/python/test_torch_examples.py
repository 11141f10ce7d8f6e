"""The examples of PyTorch run, alone and with horovodrun, and learn."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from documents import ROOT
from launching import Launcher

EXAMPLES = ROOT / "examples"
RESULT = r"(\d) process\(es\): accuracy [\d.]+%, [\d,]+ samples/s"

needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")


def run(example: str, processes: int, *arguments: str, **environment: str) -> tuple[int, str, str]:
    command = ("-np", str(processes), sys.executable, str(EXAMPLES / example), *arguments)
    with Launcher(*command, OMP_NUM_THREADS="1", **environment) as launcher:
        return launcher.finish(120)


def test_the_digits_are_learned(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, err = run("pytorch_digits.py", 2, "--epochs", "20", "--report", str(report))
    assert code == 0, err
    results = json.loads(report.read_text())
    assert results["processes"] == 2
    assert results["accuracy"] > 0.95
    assert results["samples_per_s"] > 0
    assert re.fullmatch(rf"\[0\]<stdout>:{RESULT}\n", out)  # rank 0 alone speaks,
    assert "20/20" in err  # and shows progress
    assert "[1]<" not in err


def test_the_synthetic_benchmark_tells_its_rates() -> None:
    small = ("--model", "resnet18", "--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1")
    short = ("--num-batches-per-iter", "1", "--num-iters", "2", "--no-cuda", "--fp16-allreduce", "--use-adasum")
    code, out, err = run("pytorch_synthetic_benchmark.py", 2, *small, *short)
    assert code == 0, err
    lines = [line.removeprefix("[0]<stdout>:") for line in out.splitlines()]
    assert lines[:3] == ["Model: resnet18", "Batch size: 2", "Number of CPUs: 2"]
    assert sum(bool(re.fullmatch(r"Iter #\d: [\d.]+ img/sec per CPU", line)) for line in lines) == 2
    assert re.fullmatch(r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+", lines[-1])
    assert "2/2" in err
    assert "[1]<" not in out + err


def test_an_unknown_model_is_explained() -> None:
    code, _, err = run("pytorch_synthetic_benchmark.py", 1, "--model", "resnet19")
    assert code != 0
    assert "--model resnet19: " in err


@needs_lightning
def test_the_digits_are_learned_with_lightning(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, err = run("pytorch_lightning_digits.py", 2, "--epochs", "12", "--report", str(report))
    assert code == 0, err
    results = json.loads(report.read_text())
    assert results["processes"] == 2
    assert results["accuracy"] > 0.9
    assert re.search(rf"\[0\]<stdout>:{RESULT}", out)
    assert "Epoch 11" in out + err
    assert "[1]<" not in out + err
