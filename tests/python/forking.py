"""Processes that begin with a test's module imported: forked off one that has done it, once for all of its tests.

    process = start(module, arguments, env, output)

Importing TensorFlow takes seven seconds of a core, PyTorch three: without this, most of what tests do is import. The
server imports the module and those that its FORKED_WITH lists, and does nothing more, so a framework has no threads and
no state yet when it forks. What it forks becomes this process's own child (by a grandchild whose parent ends while this
process is the reaper), so that it can be waited for, has an exit status, and dies with this process.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl
# What is read when it is needed, not when something is imported.
_LATE_VARIABLES = ("HOROVOD_", "RANKS_", "PYTEST_")
_LARGEST_MESSAGE = 1 << 20


class Forked:
    """A child of this process that subprocess has not made; what tests use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or minus a signal's number, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        if self.poll() is None:
            fd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(fd)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(["a forked rank"], timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that has imported a module."""

    def __init__(self, module: str, env: dict[str, str]) -> None:
        self.module, self.environment = module, _early(env)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, module, str(theirs.fileno()), str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, arguments: list[str], env: dict[str, str], output: IO[bytes]) -> Forked:
        """Has it fork a process that calls ranks.main with these arguments."""
        message = json.dumps([arguments, env, os.getcwd()]).encode()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._control, [message], [output.fileno()])
            answer = self._control.recv(64)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the process that imports {self.module} has ended"
        return Forked(int(answer))

    def close(self) -> None:
        """Ends it."""
        self._control.close()
        self._process.kill()
        self._process.wait()


_servers: list[_Server] = []  # the last one; tests of a module follow each other


@atexit.register
def _close() -> None:
    while _servers:
        _servers.pop().close()


def _early(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_LATE_VARIABLES)}


def start(module: str, arguments: list[str], env: dict[str, str], output: IO[bytes]) -> Forked:
    """Starts ranks.main with these arguments, in a process that has imported the module in this environment."""
    if not _servers or (_servers[0].module, _servers[0].environment) != (module, _early(env)):
        _close()
        _servers.append(_Server(module, env))
    return _servers[0].fork(arguments, env, output)


# ---- The server ------------------------------------------------------------------------------------------------------


def _fork_as_told(control: socket.socket, parent: int) -> bool:
    """Forks once for each message. Returns True in what was forked, False at the end."""
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, _LARGEST_MESSAGE, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        here, there = os.pipe()
        between = os.fork()
        if between == 0:
            own = os.getpid()
            pid = os.fork()
            if pid != 0:
                os.write(there, str(pid).encode())
                os._exit(0)
            while os.getppid() == own:  # which is about to end
                time.sleep(0.0001)
            if os.getppid() != parent:  # there is nobody to work for
                os._exit(1)
            arguments, env, folder = json.loads(message)
            _become(arguments, env, folder, fds[0])
            for fd in (control.detach(), here, there, *fds):
                os.close(fd)
            return True
        os.waitpid(between, 0)
        control.send(os.read(here, 64))
        for fd in (here, there, *fds):
            os.close(fd)


def _become(arguments: list[str], env: dict[str, str], folder: str, output: int) -> None:
    """Makes this process look as if it had been started like that."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = arguments
    if "numpy" in sys.modules:  # the ranks must not all have the same
        sys.modules["numpy"].random.seed()


def _main() -> None:
    module, control, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.insert(0, str(Path(__file__).parent))
    for name in getattr(importlib.import_module(module), "FORKED_WITH", ()):
        importlib.import_module(name)
    ranks = importlib.import_module("ranks")
    gc.freeze()
    if _fork_as_told(socket.socket(fileno=control), parent):
        ranks.main()


if __name__ == "__main__":
    _main()
