"""The launcher's side of an agent: the process that leads to it, and what comes from it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

from horovod.common.rendezvous.loop import READ, Loop
from horovod.runner.agent_frames import FramePipe, Kind, encode_fields
from horovod.runner.heartbeat import Heartbeat
from horovod.runner.local_crew import begin_child, take_over
from horovod.runner.ssh import SshOptions, explain, local_agent_command, remote_agent_command
from horovod.runner.supervisor import signal_name

_MAX_STDERR = 8 << 10
# How long the process may take to end after its output has.
_EXIT_SECONDS = 3.0
# How long ssh may take to end once nothing is left there: it waits for whatever else holds the session's output, say an
# ssh-agent that a login script has started.
_GOODBYE_SECONDS = 1.0


class AgentEvents(Protocol):
    """What becomes of an agent."""

    def on_frame(self, agent: HostAgent, kind: Kind, body: bytes) -> None:
        """It says something."""

    def on_lost(self, agent: HostAgent, reason: str) -> None:
        """It is gone before it was done."""


class HostAgent:
    """The agent of one host.

    Attributes:
        host: Its name.
        ranks: Of its workers.
        greeted: It has said something.
        done: Nothing is left on its host.
    """

    def __init__(
        self, loop: Loop, events: AgentEvents, host: str, ranks: Sequence[int], ssh: SshOptions | None
    ) -> None:
        """`ssh`: how to get there; None: the host is this machine."""
        self.host, self.ranks = host, ranks
        self.greeted = False
        self.done = False
        self._loop, self._events, self._ssh = loop, events, ssh
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: FramePipe | None = None
        self._heartbeat: Heartbeat | None = None
        self._stderr = b""
        self._pidfd = self._stderr_fd = -1
        self._lost = ""

    def start(self) -> None:
        """Starts the process; this one must have a single thread.

        Raises:
            OSError: It can't be started.
        """
        parent = os.getpid()
        self._process = subprocess.Popen(
            local_agent_command() if self._ssh is None else remote_agent_command(self.host, self._ssh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: begin_child(parent),  # noqa: PLW1509
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._pipe = FramePipe(
            self._loop,
            take_over(self._process.stdout),
            take_over(self._process.stdin),
            self._on_frame,
            self._on_closed,
            after_mark=True,
        )
        self._stderr_fd = take_over(self._process.stderr)
        os.set_blocking(self._stderr_fd, False)
        self._loop.watch(self._stderr_fd, READ, lambda _events: self._read_stderr())
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.watch(self._pidfd, READ, lambda _events: self._on_exit())

    @property
    def pid(self) -> int:
        """Of the process that leads to it, until it is reaped; otherwise 0."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def is_running(self) -> bool:
        """Whether something can still be said to it."""
        return self._pipe is not None and not self._lost and not self.done

    def say(self, kind: Kind, body: bytes = b"", **fields: object) -> None:
        """Says something: bytes, or fields."""
        if self._pipe is not None and not self._lost:
            self._pipe.say(kind, encode_fields(**fields) if fields else body)

    def send(self, frame: bytes) -> None:
        """Says something that has been encoded."""
        if self._pipe is not None and not self._lost:
            self._pipe.send(frame)

    def listen_to_silence(self, limit: float) -> None:
        """Gives the agent up if it is silent for too long from now on."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._heartbeat = Heartbeat(self._loop, limit, lambda: self.say(Kind.ALIVE), self._on_silence)

    def hang_up(self) -> None:
        """Ends the process here; what is there then ends by itself."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._pipe is not None:
            self._pipe.close()
        if self.pid:
            assert self._process is not None
            self._process.kill()

    def why_silent(self) -> str:
        """Why it has not greeted, as far as is known."""
        if self._ssh is None:
            return "the agent on this machine did not answer"
        heard = self._pipe.noise() if self._pipe is not None else ""
        said = self._stderr.decode("utf-8", "replace").strip() or heard
        told = f" So far: {' / '.join(said.splitlines()[-3:])}" if said else ""
        return f"ssh got no answer from it. Try: {self._ssh.test_command(self.host)}.{told}"

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        if self._heartbeat is not None:
            self._heartbeat.heard()
        if kind is Kind.DONE:
            self.done = True
            self.hang_up_gently()
            self._loop.at(time.monotonic() + _GOODBYE_SECONDS, self.hang_up)
        elif kind is not Kind.ALIVE:
            self.greeted = True
            self._events.on_frame(self, kind, body)

    def hang_up_gently(self) -> None:
        """Says nothing more; the process ends by itself."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._pipe is not None:
            self._pipe.close()

    def _read_stderr(self) -> None:
        try:
            data = os.read(self._stderr_fd, _MAX_STDERR)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._stderr = (self._stderr + data)[-_MAX_STDERR:]
        else:
            self._close_stderr()

    def _close_stderr(self) -> None:
        if self._stderr_fd >= 0:
            self._loop.forget(self._stderr_fd)
            os.close(self._stderr_fd)
            self._stderr_fd = -1

    def _on_exit(self) -> None:
        assert self._process is not None and self._pipe is not None
        self._loop.forget(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._pipe.read()  # Its last words.
        if self._stderr_fd >= 0:
            self._read_stderr()
            self._close_stderr()
        self._tell_lost(f"the connection to it ended: {self._how_it_ended(self._process.returncode)}")

    def _on_closed(self, reason: str) -> None:
        # What the process says when it ends tells more.
        self._loop.at(time.monotonic() + _EXIT_SECONDS, lambda: self._tell_lost(f"its output ended: {reason}"))

    def _on_silence(self, seconds: float) -> None:
        self._tell_lost(f"nothing was heard from it for {seconds:g} s. Is it up, and the network between?")

    def _how_it_ended(self, code: int) -> str:
        """How the process here ended, and where to look for the cause."""
        program = "the agent on this machine" if self._ssh is None else "ssh"
        if code < 0:
            return f"{program} was killed by {signal_name(-code)} here. Was this machine out of memory (dmesg)?"
        where = "this machine" if self._ssh is None else self.host
        return f"{program} ended with exit code {code}. Has {where} gone down, or was the agent killed there (dmesg)?"

    def _tell_lost(self, reason: str) -> None:
        if self.done or self._lost:
            return
        stderr = self._stderr.decode("utf-8", "replace").strip()
        code = self._process.returncode if self._process is not None else None
        if not self.greeted and self._ssh is not None:
            noise = self._pipe.noise() if self._pipe is not None else ""
            reason = explain(self.host, self._ssh, code, stderr, noise)
        else:
            reason = "\n".join([reason, *(f"    {line}" for line in stderr.splitlines()[-12:])])
        self._lost = reason
        self.hang_up()
        self._events.on_lost(self, reason)
