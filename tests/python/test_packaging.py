"""The wheel: built without any framework, one for all Pythons, complete, quickly installed.

WHEEL in the environment names a wheel to test in place of a new one: `make test` has installed one, and
`make test-versions` has one for all Pythons. `make test-package` builds one as a user's pip does.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from documents import ROOT
from skipping import skip

SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "horovod", "pyproject.toml", "src")
# CPU time, which is the same on a busy machine: two cores have 120 s in a minute.
BUILD_CPU_SECONDS = 110
INSTALL_SECONDS = 30

# All that is compiled: in every wheel, whatever is installed where it is built.
LIBRARIES = ("_core.abi3.so", "libhorovod_core.so", "tensorflow/libhorovod_tensorflow.so")


def check_output(command: Sequence[str | Path], **environment: str) -> str:
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built by pip as a user's would be, from a copy of the sources."""
    if "WHEEL" in os.environ:
        return Path(os.environ["WHEEL"])
    sources, output = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, sources / name)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    check_output([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", output, sources])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < BUILD_CPU_SECONDS
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; its folder of programs."""
    folder = tmp_path_factory.mktemp("venv")
    check_output([sys.executable, "-m", "venv", folder])
    start = time.monotonic()
    check_output([folder / "bin" / "pip", "install", "--no-deps", wheel])
    assert time.monotonic() - start < INSTALL_SECONDS
    check_output([folder / "bin" / "pip", "install", wheel])  # and what it depends on
    return folder / "bin"


def test_one_wheel_serves_all_pythons(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.fullmatch(rf"horovod-{re.escape(version)}-cp311-abi3-\w*linux\w*\.whl", wheel.name)


def test_the_wheel_has_all_modules_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "horovod").rglob("*") if path.suffix in (".py", ".pyi")}
    expected |= {name for name in content if name.endswith("py.typed")}
    assert content - expected == {f"horovod/{name}" for name in LIBRARIES}
    assert expected <= content


def test_the_libraries_need_nothing_but_the_system(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("readelf") is None:
        skip("readelf is missing; install the Debian package binutils")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for name in LIBRARIES:
        dynamic = check_output(["readelf", "--dynamic", tmp_path / "horovod" / name])
        needed = {library.partition(".")[0] for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)}
        assert needed <= {"libhorovod_core", "libstdc++", "libm", "libgcc_s", "libc", "libpthread", "ld-linux-x86-64"}
        paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
        assert set(paths) <= {"$ORIGIN", "$ORIGIN/.."}, f"{name} looks for libraries in {paths}"


def test_the_versions_agree(venv: Path) -> None:
    import horovod

    assert check_output([venv / "horovodrun", "--version"]).strip() == horovod.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == horovod.__version__
    core = check_output([venv / "python", "-c", "import horovod._core as core; print(core.version())"])
    assert core.strip() == horovod.__version__


def test_an_installed_wheel_runs_a_job(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(
        "import horovod.numpy as hvd\nhvd.init()\nprint(hvd.allreduce([1.0], op=hvd.Sum))\nhvd.shutdown()\n"
    )
    out = check_output([venv / "horovodrun", "-np", "2", venv / "python", tmp_path / "sum.py"])
    assert sorted(out.splitlines()) == ["[0]<stdout>:[2.]", "[1]<stdout>:[2.]"]


@pytest.mark.parametrize(("framework", "shown"), [("torch", "PyTorch"), ("tensorflow", "TensorFlow")])
def test_without_a_framework_only_its_binding_is_missing(venv: Path, framework: str, shown: str) -> None:
    program = f"""
import horovod.numpy
try:
    import horovod.{framework}
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert check_output([venv / "python", "-c", program]).strip() == framework
    assert f"[ ] {shown}" in check_output([venv / "horovodrun", "--check-build"])
