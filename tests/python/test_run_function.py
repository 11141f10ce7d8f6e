"""horovod.run: a function on every rank, with its values and errors."""

from __future__ import annotations

import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machines, machines
from skipping import import_or_skip
from waiting import wait_until

import horovod
import horovod.runner
from horovod.runner import agent


def total(first: float, second: float = 0.0) -> tuple[int, float]:
    import horovod.numpy as hvd

    hvd.init()
    print("rank", hvd.rank(), "is here", flush=True)
    return hvd.rank(), float(hvd.allreduce([first + second], op=hvd.Sum)[0])


def test_values_come_back_by_rank() -> None:
    assert horovod.run(total, (1.0,), {"second": 2.0}, num_proc=3) == [(0, 9.0), (1, 9.0), (2, 9.0)]
    assert horovod.run(total, (1.0,)) == [(0, 1.0)]


def test_what_ranks_write_appears_where_the_caller_writes(capsys: pytest.CaptureFixture[str]) -> None:
    horovod.run(total, (1.0,), num_proc=2)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{r}]<stdout>:rank {r} is here" for r in (0, 1)]


def test_functions_without_a_name_and_large_values_are_sent() -> None:
    block = os.urandom(20 << 20)
    values = horovod.run(lambda data: data[::-1], (block,), num_proc=2)
    assert values == [block[::-1]] * 2


def test_standard_input_is_empty_and_the_results_can_not_be_reached_by_children() -> None:
    def look() -> tuple[str, str, bool]:
        children = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout.split()
        return sys.stdin.read(), os.environ.get("HOROVOD_RESULT_FD", ""), len(children) <= 4

    assert horovod.run(look) == [("", "", True)]


def test_an_exception_comes_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("lost")
        hvd.allreduce([1.0])

    with pytest.raises(RuntimeError, match=r"^horovod.run: rank 1 of 2 failed: KeyError: 'lost'") as caught:
        horovod.run(fail, num_proc=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail" in str(caught.value) and 'raise KeyError("lost")' in str(caught.value)


def test_exceptions_and_values_that_can_not_be_sent() -> None:
    def odd() -> None:
        error = ValueError("odd")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RuntimeError, match="ValueError: odd") as caught:
        horovod.run(odd)
    assert caught.value.__cause__ is None
    with pytest.raises(RuntimeError, match="TypeError: the function returned a lock, which can't be sent"):
        horovod.run(threading.Lock)


def test_a_rank_that_is_killed_or_exits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the job ended with exit code 137"):
        horovod.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert "Process 0 was killed by signal SIGKILL (9)." in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        horovod.run(lambda: sys.exit(3))
    assert horovod.run(lambda: sys.exit(0)) == [None]
    with pytest.raises(RuntimeError, match=r"no value came from 1 of 2 ranks \(1\): .* exit code 0 before"):
        horovod.run(lambda: os._exit(0) if os.environ["HOROVOD_RANK"] == "1" else 5, num_proc=2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hosts": "a", "hostfile": "b"}, ValueError, "hosts or hostfile"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo or use_mpi"),
        ({"use_mpi": True}, NotImplementedError, "MPI"),
        ({"min_num_proc": 1}, NotImplementedError, "elastic"),
        ({"host_discovery_script": "s"}, NotImplementedError, "elastic"),
        ({"hosts": "localhost:1", "num_proc": 2}, ValueError, r"^horovod\.run: .*slots"),
        ({"hosts": "h1:x"}, ValueError, r"^horovod\.run: -H: expected host:slots, such as localhost:4, got 'h1:x'$"),
        ({"num_proc": 0}, ValueError, r"^horovod\.run: argument -np/--num-proc: must be at least 1, not 0"),
    ],
)
def test_arguments_that_can_not_be(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        horovod.run(os.getpid, **arguments)


def test_the_old_name_of_an_argument_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert len(horovod.run(os.getpid, np=2)) == 2


def test_the_signature_is_that_of_the_existing_horovod() -> None:
    assert horovod.run is horovod.runner.run
    names = (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose "
        "use_gloo use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    )
    parameters = inspect.signature(horovod.run).parameters
    assert list(parameters) == names.split()
    defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.default is not None}
    assert defaults == {"func": inspect.Parameter.empty, "args": (), "num_proc": 1}


CALLER = """
import os, sys, time
import horovod

def wait(path):
    open(f"{path}.{os.environ['HOROVOD_RANK']}", "w").write(str(os.getpid()))
    time.sleep(100)

try:
    horovod.run(wait, (sys.argv[1],), num_proc=2)
except KeyboardInterrupt:
    sys.exit(42)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_caller_is_interrupted_or_killed(signum: int, tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    arguments = [sys.executable, "-P", str(tmp_path / "caller.py"), str(tmp_path / "pid")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as caller:

        def pids() -> list[int]:
            texts = [path.read_text() for path in tmp_path.glob("pid.*")]
            return [int(text) for text in texts] if len(texts) == 2 and all(texts) else []

        workers = wait_until(pids, "both ranks run")
        caller.send_signal(signum)
        assert caller.wait(30) == (42 if signum == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers are gone", 30)


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_the_caller_s_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    program = """
import horovod, sys
values = horovod.run(lambda: print("here") or print("there", file=sys.stderr) or 5, num_proc=2)
open(sys.argv[1], "w").write(str(values))
"""
    call = [sys.executable, "-P", "-c", program, str(tmp_path / "values")]
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *call], check=True)
    assert (tmp_path / "values").read_text() == "[5, 5]"


def caller_of_stubborn_ranks(tmp_path: Path, *, ignore_interrupts: bool) -> subprocess.Popen[bytes]:
    """A program whose SIGTERM raises SystemExit(43), and that runs a function which does not heed SIGINT."""
    program = """
import os, signal, sys, time
import horovod

def leave(*_):
    sys.exit(43)

def wait(path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    open(path, "w").close()
    time.sleep(100)

signal.signal(signal.SIGTERM, leave)
if sys.argv[2] == "True":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # As in a background job of a script.
horovod.run(wait, (sys.argv[1],))
"""
    arguments = [sys.executable, "-P", "-c", program, str(tmp_path / "runs"), str(ignore_interrupts)]
    caller = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    wait_until((tmp_path / "runs").exists, "the function runs")
    return caller


def test_an_exception_in_the_caller_ends_the_job(tmp_path: Path) -> None:
    with caller_of_stubborn_ranks(tmp_path, ignore_interrupts=True) as caller:
        caller.send_signal(signal.SIGTERM)
        assert caller.wait(20) == 43


def test_a_second_interrupt_of_the_caller_kills_the_job_at_once(tmp_path: Path) -> None:
    with caller_of_stubborn_ranks(tmp_path, ignore_interrupts=False) as caller:
        caller.send_signal(signal.SIGINT)
        assert caller.stderr is not None
        while b"received and sent to the workers" not in caller.stderr.readline():
            pass
        interrupted = time.monotonic()
        caller.send_signal(signal.SIGINT)
        assert caller.wait(20) == -signal.SIGINT
        assert time.monotonic() - interrupted < 4  # The grace time is 5 seconds.


def test_ranks_are_waited_for_as_long_as_the_caller_says() -> None:
    def come_or_stay_away() -> None:
        import horovod.numpy as hvd

        if os.environ["HOROVOD_RANK"] == "0":
            hvd.init()
        sys.stdin.read()
        threading.Event().wait()

    with pytest.raises(RuntimeError, match=r"rank 0 of 2 failed: .* rank 1 .* did not arrive within 1 s"):
        horovod.run(come_or_stay_away, num_proc=2, start_timeout=1)


def test_a_network_interface_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"^horovod\.run: --network-interfaces: there is no no0 here"):
        horovod.run(os.getpid, network_interfaces=["lo", "no0"])
    with (
        pytest.warns(DeprecationWarning, match="network_interface is deprecated, use network_interfaces"),
        pytest.raises(ValueError, match=r"^horovod\.run: --network-interfaces: there is no no1 here"),
    ):
        horovod.run(os.getpid, network_interface="no1")


def python_wrapper(path: Path, *, environment: str) -> str:
    """A Python that is this one, with something in its environment."""
    path.write_text(f'#!/bin/sh\n{environment} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


# What does not run another Python, but says so: functions do not survive the way from one to another, whatever it is.
OTHER_MINOR = 'import platform\nplatform.python_version = lambda: "3.99.1"\n'


def test_workers_with_a_python_of_another_minor_version_say_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_MINOR)
    other = python_wrapper(tmp_path / "python", environment=f"PYTHONPATH={tmp_path}")
    versions = rf"\S+ is Python 3\.99\.1, the caller's is {platform.python_version()}"
    with pytest.raises(RuntimeError, match=f"rank 0 of 1 failed: RuntimeError: {versions}") as caught:
        horovod.run(os.getpid, executable=other)
    assert "All hosts need the same minor version." in str(caught.value)


def test_workers_with_another_python_have_its_packages_and_the_caller_s_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "environment"
    venv.create(other, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(other)}))
    (packages / "package_of_the_other.py").write_text("where = 'there'")
    (packages / "horovod_here.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "script").mkdir()
    (tmp_path / "script/module_of_the_user.py").write_text("where = 'here'")

    def look() -> tuple[str, str, str]:
        import module_of_the_user  # type: ignore[import-not-found]
        import package_of_the_other  # type: ignore[import-not-found]

        return sys.prefix, package_of_the_other.where, module_of_the_user.where

    monkeypatch.setattr(sys, "path", [str(tmp_path / "script"), *sys.path])
    assert horovod.run(look, executable=str(other / "bin/python")) == [(str(other), "there", "here")]


# Calls horovod.run with the arguments that it is called with, in JSON.
PROGRAM = """
import json, os, sys, horovod

def place():
    import horovod.numpy as hvd
    hvd.init()
    if hvd.rank() == 3:
        raise ValueError('over there')
    print('mark', os.environ.get('MARK'), flush=True)
    return [hvd.rank(), os.uname().nodename, hvd.allreduce([1.0], op=hvd.Sum)[0]]

values = horovod.run(place, **json.loads(sys.argv[1]))
print("values", json.dumps(values))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines, h1 and h2; every test leaves them as they were."""
    with machines(2, tmp_path_factory.mktemp("machines")) as made:
        yield made


def run_on(cluster: Machines, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """Calls horovod.run on h1."""
    call = [sys.executable, "-P", "-c", PROGRAM, json.dumps(arguments)]
    done = subprocess.run(cluster["h1"].command(call), capture_output=True, text=True, check=False)
    cluster.wait_until_nothing_is_left()
    return done


def values(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("values "))[7:])


def test_functions_run_on_other_machines_too(cluster: Machines) -> None:
    assert values(run_on(cluster, num_proc=3, hosts="h1:2,h2:2")) == [[0, "h1", 3.0], [1, "h1", 3.0], [2, "h2", 3.0]]
    failed = run_on(cluster, num_proc=4, hosts="h1:2,h2:2")
    assert failed.returncode == 1
    assert "RuntimeError: horovod.run: rank 3 of 4 failed: ValueError: over there" in failed.stderr


def test_arguments_about_hosts_ssh_and_output_do_what_they_say(cluster: Machines, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h2 slots=1\nh1 slots=1\n")
    key = tmp_path / "other.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    # Who comes to the usual port, or with the usual key, is not let in.
    with cluster["h2"].with_sshd_options("ListenAddress 10.77.0.2:2222", f"AuthorizedKeysFile {key}.pub"):
        done = run_on(
            cluster,
            num_proc=2,
            hostfile=str(tmp_path / "hosts"),
            ssh_port=2222,
            ssh_identity_file=str(key),
            start_timeout=77,
            output_filename=str(tmp_path / "logs"),
            network_interfaces=["ib0", "eth0"],
            verbose=True,
            use_gloo=True,
            executable=python_wrapper(tmp_path / "python", environment="MARK=wrapped"),
        )
    assert values(done) == [[0, "h2", 2.0], [1, "h1", 2.0]]
    for rank in (0, 1):
        assert f"[{rank}]<stdout>:mark wrapped\n" in done.stdout
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_text() == "mark wrapped\n"
    said = done.stderr.splitlines()
    assert "Remote host found: h2" in said
    assert any("Setting HOROVOD_START_TIMEOUT=77" in line for line in said)
    assert any("Host h2 is reached at 10.77.0.2 (eth0)" in line for line in said)


def test_a_host_with_a_python_of_another_minor_version(cluster: Machines, tmp_path: Path) -> None:
    original = Path(agent.__file__)
    (tmp_path / "agent.py").write_text(original.read_text().replace("platform.python_version()", '"3.99.1"'))
    with cluster["h2"].mounted(str(tmp_path / "agent.py"), str(original)):
        done = run_on(cluster, num_proc=2, hosts="h1,h2")
    assert done.returncode == 1
    assert "mark" not in done.stdout
    reason = (
        f"  h2: it has Python 3.99.1, this machine {platform.python_version()}: a function can't be sent from one to"
    )
    assert f"1 of 2 hosts can't be used:\n{reason}" in done.stderr
    assert done.stderr.count("3.99.1") == 1
    assert "h1: " not in done.stderr


def test_the_example_notebook_runs() -> None:
    nbformat = import_or_skip("nbformat")
    nbclient = import_or_skip("nbclient")
    path = Path(__file__).resolve().parent.parent.parent / "examples/notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "[0]<stdout>:y = " in printed and "[1]<stdout>:y = " in printed
    assert "horovod.run: rank 0 of 2 failed: " in printed or "horovod.run: rank 1 of 2 failed: " in printed
