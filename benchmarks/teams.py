"""Teams: the processes of the competitors, as the director sees them.

All teams of a number of ranks live at the same time, but only the one that was asked works; the others sleep. So rounds
of different peers can alternate although peers can't share processes: two MPI libraries exclude each other.
"""

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from conversation import Line
from hosts import pause
from mpi_environments import Mpi
from numpy.typing import NDArray
from subject import (
    ALLREDUCE,
    GLOO,
    HOROVOD,
    HOROVOD_SHARED,
    HOROVOD_TORCH,
    LIMIT,
    LIMIT_OWN_PAGES,
    MEMCPY,
    STEP_WAYS,
    TOGETHER_WAYS,
    Subject,
)

Seconds = NDArray[np.float64]

_HERE = Path(__file__).resolve().parent
_START_SECONDS = 120.0
_ANSWER_SECONDS = 180.0
_STOP_SECONDS = 10.0


class TeamFailed(Exception):
    """A team could not be started, or one of its ranks has failed."""


class Team(Protocol):
    """What the director needs of a team."""

    name: str
    ways: tuple[str, ...]
    cpu: float  # seconds of processor time of a rank and iteration in the last run; nan where it is not known

    def prepare(self, subject: Subject, ways: Sequence[str], footprint: int) -> bool:
        """Gets ready to run a subject in some ways, on so many bytes each; False if the team can't."""

    def run(self, way: str, iterations: int) -> Seconds:
        """Runs so many iterations and returns the seconds of each."""

    def drop(self) -> None:
        """Gives back what was prepared."""

    def close(self) -> None:
        """Ends all processes."""


class RankTeam:
    """Ranks that run worker.py."""

    def __init__(self, name: str, ways: tuple[str, ...], process: "subprocess.Popen[bytes]", output: Path) -> None:
        """Takes the launcher's process; its ranks will call."""
        self.name = name
        self.ways = ways
        self._process = process
        self.cpu = math.nan
        self._output = output
        self._lines: list[Line] = []

    def await_ranks(self, listener: socket.socket, ranks: int) -> None:
        """Waits until all ranks have called.

        Raises:
            TeamFailed: They don't.
        """
        found: dict[int, Line] = {}
        deadline = time.monotonic() + _START_SECONDS
        listener.settimeout(0.5)
        while len(found) < ranks:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TeamFailed(f"{self.name}: {len(found)} of {ranks} ranks came. {self._last_words()}")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(_ANSWER_SECONDS)
            line = Line(connection)
            hello = line.hear()
            if hello is None or hello["team"] != self.name:
                raise TeamFailed(f"{self.name}: a stranger called: {hello}")
            found[hello["rank"]] = line
        self._lines = [found[rank] for rank in sorted(found)]

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """Asks all ranks and returns their answers.

        Raises:
            TeamFailed: A rank has failed, or does not answer.
        """
        for line in self._lines:
            line.say(question)
        answers = []
        for rank, line in enumerate(self._lines):
            try:
                answer = line.hear()
            except TimeoutError:
                answer = {"error": f"no answer to {question} within {_ANSWER_SECONDS:.0f} s"}
            if answer is None:
                raise TeamFailed(f"{self.name}: rank {rank} ended. {self._last_words()}")
            if "error" in answer:
                raise TeamFailed(f"{self.name}: rank {rank}: {answer['error']}")
            answers.append(answer)
        return answers

    def prepare(self, subject: Subject, ways: Sequence[str], footprint: int) -> bool:
        """See Team."""
        question = {"do": "prepare", "subject": subject.to_message(), "ways": list(ways), "footprint": footprint}
        answers = self.ask(question)
        return not any("unsupported" in answer for answer in answers)

    def run(self, way: str, iterations: int) -> Seconds:
        """See Team. Without a gate before each iteration, the mean of the ranks' times."""
        answers = self.ask({"do": "run", "way": way, "iterations": iterations})
        self.cpu = sum(answer["cpu"] for answer in answers) / len(answers)
        starts = np.asarray([answer["starts"] for answer in answers])
        ends = np.asarray([answer["ends"] for answer in answers])
        if answers[0]["gated"]:
            return np.asarray((ends.max(axis=0) - starts.max(axis=0)) * 1e-9)
        return np.asarray((ends - starts).mean(axis=0) * 1e-9)

    def drop(self) -> None:
        """See Team."""
        self.ask({"do": "drop"})

    def close(self) -> None:
        """Hangs up, which ends the ranks, and sees to it that they end."""
        for line in self._lines:
            line.close()
        self._lines = []
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        _end_group(self._process)

    def _last_words(self) -> str:
        return "Its last words: " + self._output.read_text(errors="replace")[-2000:]


_LIMIT_COMMANDS = {LIMIT: "allreduce", LIMIT_OWN_PAGES: "own-pages", MEMCPY: "memcpy"}


class LimitTeam:
    """A C++ program: limit.cc, or wire_limit.cc between hosts, which has no copying of memory."""

    name: str = LIMIT
    ways: tuple[str, ...] = (LIMIT, LIMIT_OWN_PAGES, MEMCPY)
    cpu: float = math.nan

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._subject: Subject | None = None
        self._way = ""
        self._footprint = 0

    def prepare(self, subject: Subject, ways: Sequence[str], footprint: int) -> bool:
        """See Team: memory is taken when a way is run first."""
        del ways
        self._subject, self._way, self._footprint = subject, "", footprint
        return subject.kind == ALLREDUCE and subject.dtype == "float32"

    def run(self, way: str, iterations: int) -> Seconds:
        """See Team."""
        assert self._subject is not None
        if way != self._way:  # rewriting all of it before each round is as good as rotating
            size = max(4, self._subject.bytes)
            buffers = min(4096, max(2, -(-self._footprint // size)))
            self._ask(f"{_LIMIT_COMMANDS[way]} {size} {buffers}")
            self._way = way
        command = f"run {iterations}"
        if self._subject.link:
            command += f" {round(1e6 * pause(self._subject.link, self._subject.bytes))}"
        return np.asarray([int(text) * 1e-9 for text in self._ask(command).split()])

    def drop(self) -> None:
        """See Team."""
        self._ask("allreduce 4 2")

    def close(self) -> None:
        """See Team."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        _end_group(self._process)

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)
        answer = self._process.stdout.readline() if ready else ""  # one line, written at once
        if not answer:
            raise TeamFailed(f"{self.name}: ended, or has no answer, at {command!r}")
        return answer


def build_program(source: Path, program: Path, libraries: Sequence[Path] = (), more: Sequence[str] = ()) -> Path:
    """Compiles a C++ program of one file for this machine, unless that was done.

    Raises:
        subprocess.CalledProcessError: The compiler has said why.
    """
    newest = max(path.stat().st_mtime for path in (source, *libraries))
    if not program.exists() or program.stat().st_mtime < newest:
        program.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX", "c++")
        options = ["-std=c++20", "-O3", "-march=native", "-Wall", "-Wextra", "-Wshadow"]
        subprocess.run([compiler, *options, *more, source, *libraries, "-o", program], check=True)
    return program


def _end_group(process: "subprocess.Popen[Any]") -> None:
    """Ends a process that was started in a session of its own, with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return


def _environment(more: dict[str, str]) -> dict[str, str]:
    single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | single_thread | more


def horovodrun(ranks: int) -> list[str]:
    """How this project's launcher is called. -P: the installed horovod, not what lies in the current directory."""
    return [sys.executable, "-P", "-m", "horovod.runner.launch", "-np", str(ranks)]


class Stadium(contextlib.ExitStack):
    """All teams of a number of ranks."""

    def __init__(self, ranks: int, mpis: Sequence[Mpi], limit: Path | None) -> None:
        """Starts them when entered; teams of MPI that don't start are left out, and say why."""
        super().__init__()
        self.ranks = ranks
        self.teams: list[Team] = []
        self._mpis = mpis
        self._limit = limit

    def __enter__(self) -> Self:
        """Starts all teams."""
        super().__enter__()
        try:
            self._scratch = Path(
                self.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True))
            )
            self._start_teams()
        except BaseException:
            self.close()
            raise
        return self

    def _start_teams(self) -> None:
        ways = (HOROVOD, HOROVOD_TORCH, HOROVOD_SHARED, GLOO, *TOGETHER_WAYS, *STEP_WAYS)
        self._start("torch", "torch", ways, [*horovodrun(self.ranks), sys.executable], {})
        for mpi in self._mpis:
            with told():
                launch = mpi.launch(self.ranks)
                self._start("mpi", mpi.name, (mpi.name,), launch, mpi.environment(self.ranks))
        if self._limit is not None:
            self._add(LimitTeam([str(self._limit), str(self.ranks)]))

    @property
    def torch_team(self) -> RankTeam:
        """The team of this project, gloo and the training."""
        team = self.teams[0]
        assert isinstance(team, RankTeam)
        return team

    def _start(self, kind: str, name: str, ways: tuple[str, ...], launch: list[str], more: dict[str, str]) -> None:
        folder = self._scratch / name.replace(" ", "")
        folder.mkdir()
        output = folder / "output"
        with socket.socket(socket.AF_UNIX) as listener, open(output, "wb") as sink:
            listener.bind(str(folder / "director"))
            listener.listen(64)
            command = [*launch, str(_HERE / "worker.py"), kind, name, str(folder / "director"), str(folder)]
            process = subprocess.Popen(
                command,
                env=_environment(more),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            team = RankTeam(name, ways, process, output)
            try:
                team.await_ranks(listener, self.ranks)
            except BaseException:
                team.close()
                raise
        self._add(team)

    def _add(self, team: Team) -> None:
        self.callback(team.close)
        self.teams.append(team)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Lets a team that does not start be missing, and says so."""
    try:
        yield
    except TeamFailed as failure:
        print(f"LEFT OUT: {failure}", file=sys.stderr)
