"""Real ranks for tests: N processes with a worker's environment, each running one function.

    results = run_ranks(3, sweep, args...)          every rank must return; a failure shows each rank's output
    run_ranks(3, sweep, hosts=[2, 1])               the same over two hosts: what is shared memory here is TCP there
    with start_ranks(3, victim) as group:           for faults: signals, ranks that are meant to die
        group.kill(1)
        outcomes = group.wait(timeout=10)

Where a test does not say which hosts, RANKS_TOPOLOGY does: shm (one host, the default), tcp (every rank is a host of
its own), mixed (several hosts of equal or unequal numbers of ranks) or encrypted (the same, with HOROVOD_ENCRYPT=1).
The fixture `transport` sets it. Hosts are such by their names only; the rendezvous server runs in the test's process.

Nothing survives the block: every process is killed at its end, and dies with its parent too. The functions are pickled
by reference, so they must be importable: top-level functions of the test's module.
"""

import ctypes
import dataclasses
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import forking
from waiting import wait_until

from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.runner.hosts import Host, assign_slots

_PR_SET_PDEATHSIG = 1
DEFAULT_TIMEOUT = 60.0
# How a number of ranks is spread over hosts where both transports are wanted; two halves unless it is here.
MIXED = {5: [1, 3, 1], 7: [3, 1, 2, 1]}


@dataclasses.dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    returncode: int | None  # None: it still ran when the time was over
    finished: bool  # the function returned or raised
    value: Any
    error: str | None  # the exception's class name
    message: str
    stderr: str

    def __str__(self) -> str:
        state = "still running" if self.returncode is None else f"exit status {self.returncode}"
        return f"--- rank {self.rank}: {state}, {self.error or 'no exception'}: {self.message}\n{self.stderr}"


def topology(size: int, name: str) -> list[int]:
    """How many ranks each host has, by a name of RANKS_TOPOLOGY."""
    halves = [size - size // 2, size // 2] if size > 1 else [1]
    mixed = MIXED.get(size, halves)
    return {"shm": [size], "tcp": [1] * size, "mixed": mixed, "encrypted": mixed}[name]


def worker_environments(hosts: Sequence[int], job_id: str, key: str) -> list[dict[str, str]]:
    """What horovodrun sets for each worker, but for the server."""
    names = ["testhost"] if len(hosts) == 1 else [f"testhost{index}" for index in range(len(hosts))]
    slots = assign_slots([Host(name, count) for name, count in zip(names, hosts, strict=True)], sum(hosts))
    return [
        {
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_JOB_ID": job_id,
            "HOROVOD_SECRET_KEY": key,
        }
        for slot in slots
    ]


class Group:
    """The running ranks."""

    def __init__(
        self,
        *,
        size: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        env: dict[str, str],
        env_of_rank: Callable[[int], dict[str, str | None]],
        folder: Path,
        hosts: Sequence[int],
        server_address: str,
        module: str,
    ) -> None:
        assert sum(hosts) == size, f"{size} ranks on hosts with {hosts}"
        self.job_id, self.key = secrets.token_hex(8), secrets.token_hex(32)
        self.folder = folder
        self._resources = ExitStack()
        environments = worker_environments(hosts, self.job_id, self.key)
        if len(hosts) > 1:
            server = self._serve(server_address, [environment["HOROVOD_HOSTNAME"] for environment in environments])
            env = {**server, **env}
            if os.environ.get("RANKS_TOPOLOGY") == "encrypted":
                env.setdefault("HOROVOD_ENCRYPT", "1")
        (folder / "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        self.processes = []
        base = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        base["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        # More ranks than cores: threads of BLAS would only get in each other's way.
        base.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(size):
            environment: dict[str, str | None] = {**base, **environments[rank]}
            environment["RANKS_HOSTS"] = ",".join(map(str, hosts))
            environment.update(env)
            environment.update(env_of_rank(rank))
            with open(folder / f"stderr.{rank}", "wb") as output:
                self.processes.append(
                    forking.start(
                        module,
                        [str(folder), str(rank), str(os.getpid())],
                        {name: value for name, value in environment.items() if value is not None},
                        output,
                    )
                )

    def _serve(self, address: str, host_of_rank: list[str]) -> dict[str, str]:
        """Runs the rendezvous server, and returns what tells workers so."""
        listener = listen_at(address, 0)
        port = listener.getsockname()[1]
        self.server = RendezvousServer(listener, host_key(self.key.encode(), self.job_id), host_of_rank)
        self._resources.enter_context(serving(self.server))
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_RENDEZVOUS_SERVER": "launcher",
        }

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank."""
        self.processes[rank].send_signal(signum)

    def wait_for_file(self, name: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Waits until a rank has called mark(name): the way to know that it has come to some point."""
        try:
            wait_until((self.folder / name).exists, f"a rank comes to {name!r}", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def wait(self, timeout: float = DEFAULT_TIMEOUT, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Waits for some ranks (all) to end, for at most the time, and returns how they did."""
        deadline = time.monotonic() + timeout
        chosen = range(len(self.processes)) if ranks is None else ranks
        for rank in chosen:
            try:
                self.processes[rank].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        return [self._outcome(rank) for rank in chosen]

    def describe(self) -> str:
        """Every rank's state and output."""
        return "\n".join(str(self._outcome(rank)) for rank in range(len(self.processes)))

    def close(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        self._resources.close()

    def _outcome(self, rank: int) -> Outcome:
        stderr = (self.folder / f"stderr.{rank}").read_text(errors="replace")
        path = self.folder / f"result.{rank}"
        finished, value, error, message = False, None, None, ""
        if path.exists():
            value, error, message = pickle.loads(path.read_bytes())
            finished = True
        return Outcome(rank, self.processes[rank].poll(), finished, value, error, message, stderr)


def _same_for_all(_rank: int) -> dict[str, str | None]:
    return {}


@contextmanager
def start_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    env_of_rank: Callable[[int], dict[str, str | None]] = _same_for_all,
    hosts: Sequence[int] | None = None,
    server_address: str = "127.0.0.1",
    module: str | None = None,
) -> Iterator[Group]:
    """Starts ranks that each call function(*args); all are killed at the end of the block.

    Args:
        size: How many.
        function: What they run.
        args: Its arguments.
        env: Further variables for all of them.
        env_of_rank: Further variables for each; None takes one away.
        hosts: How many ranks each host has; see above for where it is not given.
        server_address: Where the rendezvous server listens, if there are several hosts.
        module: What they have imported when they begin (forking.py); the function's own by default.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        group = Group(
            size=size,
            function=function,
            args=args,
            env=env or {},
            env_of_rank=env_of_rank,
            folder=Path(folder),
            hosts=hosts or topology(size, os.environ.get("RANKS_TOPOLOGY", "shm")),
            server_address=server_address,
            module=module or function.__module__,
        )
        try:
            yield group
        finally:
            group.close()


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    env_of_rank: Callable[[int], dict[str, str | None]] = _same_for_all,
    hosts: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    module: str | None = None,
) -> list[Any]:
    """Runs function(*args) on every rank and returns the values by rank.

    Raises:
        AssertionError: A rank raised, died or did not end in time; it shows every rank's output.
    """
    with start_ranks(size, function, *args, env=env, env_of_rank=env_of_rank, hosts=hosts, module=module) as group:
        outcomes = group.wait(timeout)
        failed = [outcome for outcome in outcomes if not outcome.finished or outcome.error or outcome.returncode]
        if failed:
            ranks = ", ".join(str(outcome.rank) for outcome in failed)
            raise AssertionError(f"rank {ranks} of {size} failed (time limit {timeout:g} s)\n{group.describe()}")
        return [outcome.value for outcome in outcomes]


def host_of(rank: int) -> int:
    """Called by a rank: the host of any rank."""
    for host, count in enumerate(map(int, os.environ["RANKS_HOSTS"].split(","))):
        if rank < count:
            return host
        rank -= count
    raise AssertionError("there is no such rank")


def mark(name: str, text: str = "") -> None:
    """Called by a rank: says that it has come to the point `name`, and what there is to say of it."""
    part = Path(sys.argv[1]) / f"part of {name}.{os.getpid()}"
    part.write_text(text)
    part.rename(part.with_name(name))


def marked(name: str) -> bool:
    """Called by a rank: whether some rank has marked `name`."""
    return (Path(sys.argv[1]) / name).exists()


def wait_for_mark(name: str, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Called by a rank: waits until some rank has marked `name`."""
    wait_until(lambda: marked(name), f"a rank comes to {name!r}", timeout)


def come_together(ranks: Iterable[int]) -> None:
    """Called by several ranks: waits until all are here, so that it does not count how long each took to start."""
    mark(f"came {sys.argv[2]}")
    for rank in ranks:
        wait_for_mark(f"came {rank}")


def wait_for_output(rank: int, text: str) -> None:
    """Called by a rank: waits until that rank has written the text to stderr."""
    output = Path(sys.argv[1]) / f"stderr.{rank}"
    wait_until(lambda: text in output.read_text(errors="replace"), f"rank {rank} writes {text!r}", DEFAULT_TIMEOUT)


def main() -> None:
    """What a rank's process does."""
    folder, rank, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    value, error, message = None, None, ""
    try:
        function, args = pickle.loads((folder / "call").read_bytes())
        value = function(*args)
    except BaseException as exception:
        traceback.print_exc()
        error, message = type(exception).__name__, str(exception)
    result = cloudpickle.dumps((value, error, message))
    (folder / f"part.{rank}").write_bytes(result)
    (folder / f"part.{rank}").rename(folder / f"result.{rank}")
