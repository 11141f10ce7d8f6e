"""The examples of TensorFlow and Keras run with horovodrun, and learn."""

import json
import re
import sys
from pathlib import Path

from documents import ROOT
from launching import Launcher
from tensorflow_arrays import ENVIRONMENT

RESULT = r"\[0\]<stdout>:2 process\(es\): accuracy [\d.]+%, [\d,]+ samples/s"


def run(example: str, *arguments: str) -> tuple[str, str]:
    command = ("-np", "2", sys.executable, str(ROOT / "examples" / example), *arguments)
    with Launcher(*command, OMP_NUM_THREADS="1", **ENVIRONMENT) as launcher:
        code, out, err = launcher.finish(240)
    assert code == 0, err
    return out, err


def check(report: Path, out: str, err: str) -> None:
    results = json.loads(report.read_text())
    assert results["processes"] == 2
    assert results["accuracy"] > 0.95
    assert results["samples_per_s"] > 0
    assert re.search(RESULT, out)
    assert "[1]<stdout>" not in out  # rank 0 alone speaks
    assert "[1]<stdout>" not in err


def test_the_digits_are_learned_in_a_loop(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out, err = run("tensorflow2_digits.py", "--epochs", "20", "--report", str(report))
    check(report, out, err)
    assert "20/20" in err


def test_the_digits_are_learned_by_keras(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out, err = run(
        "tensorflow2_keras_digits.py", "--epochs", "8", "--report", str(report), "--checkpoints", str(tmp_path)
    )
    check(report, out, err)
    assert "Epoch 8/8" in out
    assert {path.name for path in tmp_path.glob("*.keras")} == {f"epoch-{epoch}.keras" for epoch in range(1, 9)}
