"""Fixtures for all tests: each ends, leaves nothing behind, and does not depend on who runs it."""

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from skipping import skip
from waiting import wait_until

from horovod.common.rendezvous.encryption import find_encryption

TEST_SECONDS = 600  # far more than any needs: a test that hangs is to say so

# A script's background job and nohup have signals ignored, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Frameworks are not there for every Python: without one its tests are left out, and pytest's first lines say so.
_INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("torch", "tensorflow")}
collect_ignore_glob = [f"test_{name}_*.py" for name, installed in _INSTALLED.items() if not installed]


def pytest_report_header() -> list[str]:
    """Says what is not tested."""
    state = {True: "installed", False: "NOT installed, its tests are left out"}
    return [f"{name}: {state[installed]}" for name, installed in _INSTALLED.items()]


def _left_over() -> set[str]:
    """What a job could leave behind: files in shared memory and abstract sockets."""
    files = {str(path) for path in Path("/dev/shm").iterdir()} if os.path.isdir("/dev/shm") else set()
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@horovod-" in line}
    return files | sockets


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test after which there is a new shared-memory file or socket of ours.

    Another job on this machine has such sockets too, but only for a moment: what was left behind stays.
    """
    before = _left_over()
    yield
    new = {name for name in _left_over() - before if "horovod" in name or "hvd" in name}
    if new:
        wait_until(lambda: not new & _left_over(), f"gone after the test: {new}", 40)


@pytest.fixture(scope="session", autouse=True)
def files_of_open_mpi() -> Iterator[None]:
    """A process of Open MPI that no mpirun has started leaves a file behind, which would be in /dev/shm.

    Whoever uses PyTorch Lightning is one, since that looks whether there is MPI.
    """
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMPI_MCA_btl_sm_backing_directory", place)
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not see the settings of whoever runs them."""
    for name in list(os.environ):
        if name.startswith("HOROVOD_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=["shm", "tcp", "mixed", "encrypted"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test over shared memory, over TCP, over both, and (some suites) over both with data encrypted.

    To be used so: `pytestmark = pytest.mark.usefixtures("transport")`.
    """
    if request.param == "encrypted" and not find_encryption().library:
        skip("needs OpenSSL 3 (Debian's package libssl3)")
    monkeypatch.setenv("RANKS_TOPOLOGY", request.param)
    return str(request.param)


# The sizes that are worth it there: 2, 3 and 4 hosts, with equal and unequal numbers of ranks (see ranks.topology).
SIZES_OVER = {"tcp": (2, 3), "mixed": (3, 4, 5, 7), "encrypted": (4,)}
# Where encryption may make a difference: all kinds of transfers, and ends of connections. The others only cost time.
ENCRYPTED_SUITES = ("test_alltoall", "test_faults", "test_numpy_collectives", "test_random_order")


# Begun first, the longest in front: a file stays on one worker, and at the end the others would wait for it.
LONG_FILES = (
    "test_benchmarks",
    "test_docs",
    "test_tensorflow_keras",
    "test_torch_compile",
    "test_tensorflow_training",
    "test_faults",
    "test_torch_equivalence",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out other values of `size` of tests over several hosts (fixture `transport`), and sorts the files."""
    left_out = set()
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        sizes = SIZES_OVER.get(str(parameters.get("transport")), ())
        if sizes and "size" in parameters and parameters["size"] not in sizes:
            left_out.add(item)
        if parameters.get("transport") == "encrypted" and item.path.stem not in ENCRYPTED_SUITES:
            left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    places = {stem: place for place, stem in enumerate(LONG_FILES)}
    kept = [item for item in items if item not in left_out]
    items[:] = sorted(kept, key=lambda item: places.get(item.path.stem, len(places)))  # stable: the rest as before


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Fails a test that hangs, wherever it does: a terminal that stays silent has no time limit of its own."""

    def expire(_number: int, _frame: object) -> None:
        pytest.fail(f"the test has not ended within {TEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
