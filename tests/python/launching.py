"""Real horovodrun processes for tests, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from waiting import wait_until

# -P: the horovod that the tests import, not what lies in the current directory.
HOROVODRUN = [sys.executable, "-P", "-m", "horovod.runner.launch"]


def script(text: str) -> list[str]:
    """A command that runs Python source with the usual modules; `rank` is the worker's rank."""
    setup = "import os, signal, subprocess, sys, time\nrank = int(os.environ['HOROVOD_RANK'])\n"
    return [sys.executable, "-c", setup + textwrap.dedent(text)]


class Launcher:
    """A running horovodrun. Its processes, also those it has lost, are found by a mark in their environment."""

    on_terminal = False

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._start([*HOROVODRUN, *arguments], environment)

    def _start(self, launcher: list[str], environment: dict[str, str]) -> None:
        self._mark = f"TEST_MARK={uuid.uuid4().hex}"
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "HOROVOD_GRACE_SECONDS")}
        env |= dict([self._mark.split("=")]) | environment
        self.master = -1
        if self.on_terminal:
            self.master, slave = pty.openpty()
            # A session whose controlling terminal is the pty, as a shell's job has: Ctrl-C works.
            command = ["setsid", "--ctty", "--wait", *launcher]
            self.process = subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=slave)
            os.close(slave)
        else:
            self.process = subprocess.Popen(
                launcher,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,  # who reads a line takes no more than that, and leaves the rest to finish()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait(20)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if self.master >= 0:
            os.close(self.master)

    @property
    def pid(self) -> int:
        return self.process.pid

    def supervisor(self) -> int:
        """The pid of the process between the launcher and the workers."""

        def find() -> int:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return next((int(c) for c in children if Path(f"/proc/{c}/comm").read_text().strip() == "horovod-job"), 0)

        return wait_until(find, "a supervisor")

    def living(self) -> list[int]:
        """All processes that descend from this launcher, by their environment; the launcher itself included."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                marked = self._mark.encode() in (folder / "environ").read_bytes()
                ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if marked and not ended:
                found.append(int(folder.name))
        return found

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.living(), "no process of the job is left")

    def read_stderr_until(self, text: str) -> str:
        """Reads what it says, line by line, up to one with a text; `finish` returns what comes after that."""
        assert self.process.stderr is not None
        told = ""
        while text not in told:
            line = self.process.stderr.readline().decode()
            assert line, f"it has ended without '{text}': {told}"
            told += line
        return told

    def finish(self, seconds: float = 30.0) -> tuple[int, str, str]:
        """Wait for the end and return exit code, stdout and stderr; nothing may be left of the job."""
        outcome = self.finish_here(seconds)
        assert self.living() == []
        return outcome

    def finish_here(self, seconds: float = 30.0) -> tuple[int, str, str]:
        """As `finish`, but something may be left on a machine that can't be reached."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out.decode(), err.decode()


class TerminalLauncher(Launcher):
    """A running horovodrun whose standard streams are a terminal; `master` is its other side."""

    on_terminal = True

    def read_terminal(self) -> str:
        """All that is written on the terminal until the end."""
        data = bytearray()
        while True:
            try:
                piece = os.read(self.master, 65536)
            except OSError:  # EIO: nobody has the other side open any more.
                piece = b""
            if not piece:
                self.process.wait(20)
                return data.decode()
            data += piece


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run horovodrun to its end: exit code, stdout, stderr."""
    with Launcher(*arguments, **environment) as launcher:
        return launcher.finish()
