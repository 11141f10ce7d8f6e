"""horovod.run: a function on every rank, with its values and errors."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from machines import machines
from skipping import import_or_skip
from waiting import wait_until

import horovod
import horovod.runner


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


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hosts": "a", "hostfile": "b"}, ValueError, "hosts or hostfile"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo or use_mpi"),
        ({"use_mpi": True}, NotImplementedError, "MPI"),
        ({"min_num_proc": 1}, NotImplementedError, "elastic"),
        ({"host_discovery_script": "s"}, NotImplementedError, "elastic"),
        ({"hosts": "localhost:1", "num_proc": 2}, RuntimeError, "exit code 2"),
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


def test_functions_run_on_other_machines_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, horovod\n"
        "def place():\n"
        "    import horovod.numpy as hvd\n"
        "    hvd.init()\n"
        "    if hvd.rank() == 3 and os.environ.get('FAIL'): raise ValueError('over there')\n"
        "    return hvd.rank(), os.uname().nodename, hvd.allreduce([1.0], op=hvd.Sum)[0]\n"
        "print(json.dumps(horovod.run(place, num_proc=4, hosts='h1:2,h2:2')))\n"
    )
    with machines(2, tmp_path) as cluster:
        out = cluster["h1"].run(f"{sys.executable} -P {program}")
        assert json.loads(out) == [[0, "h1", 4.0], [1, "h1", 4.0], [2, "h2", 4.0], [3, "h2", 4.0]]
        failed = subprocess.run(
            cluster["h1"].command(["env", "FAIL=1", sys.executable, "-P", str(program)]),
            capture_output=True,
            text=True,
            check=False,
        )
        assert failed.returncode == 1
        assert "RuntimeError: horovod.run: rank 3 of 4 failed: ValueError: over there" in failed.stderr
        cluster.wait_until_nothing_is_left()


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
