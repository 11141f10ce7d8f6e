"""The examples of TensorFlow and Keras run with horovodrun, and learn."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from documents import ROOT
from launching import Launcher
from tensorflow_arrays import ENVIRONMENT

RESULT = r"\[0\]<stdout>:2 process\(es\): accuracy [\d.]+%"
needs_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="needs the Python package tf-keras"
)


def run(example: str, *arguments: str, **environment: str) -> tuple[str, str]:
    command = ("-np", "2", sys.executable, str(ROOT / "examples" / example), *arguments)
    with Launcher(*command, OMP_NUM_THREADS="1", **ENVIRONMENT, **environment) as launcher:
        code, out, err = launcher.finish(240)
    assert code == 0, err
    return out, err


def check(report: Path, out: str, err: str) -> None:
    results = json.loads(report.read_text())
    assert results["processes"] == 2
    assert results["accuracy"] > 0.95
    assert re.search(RESULT, out)
    assert "[1]<stdout>" not in out  # rank 0 alone speaks
    assert "[1]<stdout>" not in err


def test_the_digits_are_learned_in_a_loop(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out, err = run("tensorflow2_digits.py", "--epochs", "20", "--report", str(report))
    check(report, out, err)
    losses = [float(loss) for loss in re.findall(r"^\[0\]<stdout>:step \d+00: loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.parametrize("keras", ["3", pytest.param("2", marks=needs_tf_keras)])
def test_the_digits_are_learned_by_keras(keras: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--epochs", "4", "--report", str(report), "--checkpoints", str(tmp_path))
    out, err = run("tensorflow2_keras_digits.py", *arguments, TF_USE_LEGACY_KERAS=str(int(keras == "2")))
    check(report, out, err)
    assert "Epoch 4/4" in out
    assert "Epoch 3: finished gradual learning rate warmup to 0.002." in out
    assert {path.name for path in tmp_path.glob("*.h5")} == {f"checkpoint-{epoch}.h5" for epoch in range(1, 5)}


def test_the_digits_are_learned_by_a_session_of_tensorflow_1(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out, err = run("tensorflow1_digits.py", "--report", str(report), "--checkpoints", str(tmp_path))
    check(report, out, err)
    assert (tmp_path / "model.ckpt-600.index").exists()
