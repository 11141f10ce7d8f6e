"""The workers on this machine, and everything that they start.

Used by a job on one machine, and by the agent that a job has on each of several (agent.py). The process that has a crew
is a subreaper: the crew is gone when it has no children any more (process_tree.py).

epoll hands out pidfds in the order in which they became readable, which is the order of death, however late we look.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Set
from typing import IO

from horovod.common.rendezvous.loop import READ, Loop, Timer
from horovod.runner import open_files, process_tree
from horovod.runner.crew import CrewEvents, Stream, Task, Work

READ_BYTES = 64 << 10
NOT_STARTABLE = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ENOTDIR, errno.ELOOP)
# Where a worker finds the descriptor that its result is to be written to.
RESULT_VARIABLE = "HOROVOD_RESULT_FD"


class LocalCrew:
    """Starts workers as children of this process, which must have a single thread at that time."""

    def __init__(self, loop: Loop, events: CrewEvents, work: Work, on_behalf_of: str = "") -> None:
        """`on_behalf_of` stands in messages, where this is not the user's machine: " on host h2"."""
        self._loop = loop
        self._events = events
        self._work = work
        self._where = on_behalf_of
        self._alive: dict[int, int] = {}  # Pid -> pidfd, until reaped: their pids and groups can't be reused.
        self._streams: dict[int, tuple[int, Stream]] = {}  # Descriptor -> rank and stream, until their end.
        self._paused: Set[Stream] = frozenset()
        self._kill_timer: Timer | None = None  # Set: all are to end.
        self._given_up = False

    def start(self) -> None:
        """Starts the workers one after the other, until one can't be started: that is told as trouble."""
        payload = _memory_file(self._work.payload) if self._work.payload is not None else None
        try:
            for task in self._work.tasks:
                try:
                    self._start_one(task, payload)
                except (OSError, subprocess.SubprocessError) as error:
                    code = 2 if getattr(error, "errno", None) in NOT_STARTABLE else 1
                    reason = getattr(error, "strerror", None) or error
                    text = f"can't start rank {task.rank}{self._where}: {self._work.command[0]}: {reason}"
                    self._events.on_trouble(text, code)
                    return
        finally:
            if payload is not None:
                os.close(payload)

    def forward(self, signum: int) -> None:
        """Sends a signal to the workers alone: helper processes rarely expect SIGUSR1 and would die."""
        for pid in self._alive:
            os.kill(pid, signum)

    def end(self, signum: int) -> None:
        """Sends a signal to everything that is left; what is still there after the grace time is killed."""
        if self._kill_timer is None:
            self._kill_timer = self._loop.at(time.monotonic() + self._work.grace_seconds, self.kill)
        for group in self._alive:
            with contextlib.suppress(OSError):  # All of the group have ended, or became another user's.
                os.killpg(group, signum)
        process_tree.signal_descendants(signum, except_groups=self._alive)

    def kill(self) -> None:
        """Kills all that is left, now."""
        for pidfd in self._alive.values():
            self._loop.forget(pidfd)
            os.close(pidfd)
        self._alive.clear()
        unkillable = process_tree.kill_descendants()
        if unkillable:
            pids = ", ".join(map(str, unkillable))
            self._events.on_word(f"could not kill{self._where}: {pids} (stuck in the kernel, or of another user)")
            self._given_up = True

    def pause(self, streams: Set[Stream]) -> None:
        """Takes no more output from these streams for now, and goes on with the others."""
        if streams == self._paused:
            return
        for fd, (_, stream) in self._streams.items():
            if stream in streams and stream not in self._paused:
                self._loop.forget(fd)
            elif stream not in streams and stream in self._paused:
                self._watch_stream(fd)
        self._paused = streams

    def is_gone(self) -> bool:
        """Whether no descendant is left; also reaps those that have ended."""
        return self._given_up or not process_tree.reap_orphans(own=self._alive)

    def read_what_is_left(self) -> None:
        """Reads what the pipes still hold. Nobody writes any more, so this is at most a pipe's capacity each."""
        for fd in list(self._streams):
            while fd in self._streams and self._read(fd):
                pass
        for fd in list(self._streams):  # Held open by something that could not be killed.
            self._close(fd)

    def _start_one(self, task: Task, payload: int | None) -> None:
        parent = os.getpid()
        environment = dict(task.environment)
        with contextlib.ExitStack() as ends:  # The worker's ends of what joins it to us.
            passed: list[int] = []
            stdin = subprocess.DEVNULL
            if payload is not None:
                # Opened again for each, so that each has a position of its own.
                stdin = os.open(f"/proc/self/fd/{payload}", os.O_RDONLY | os.O_CLOEXEC)
                ends.callback(os.close, stdin)
                result, write_end = os.pipe2(os.O_CLOEXEC)
                ends.callback(os.close, write_end)
                self._adopt_stream(task.rank, Stream.RESULT, result)
                environment[RESULT_VARIABLE] = str(write_end)
                passed.append(write_end)
            process = subprocess.Popen(
                self._work.command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                pass_fds=passed,
                # Safe here: this process has a single thread until the first output is forwarded.
                preexec_fn=lambda: begin_child(parent),  # noqa: PLW1509
            )
        assert process.stdout is not None and process.stderr is not None
        self._adopt_stream(task.rank, Stream.STDOUT, take_over(process.stdout))
        self._adopt_stream(task.rank, Stream.STDERR, take_over(process.stderr))
        pidfd = os.pidfd_open(process.pid)
        self._alive[process.pid] = pidfd
        self._loop.watch(pidfd, READ, lambda _events: self._on_worker_ended(task.rank, process))
        self._events.on_started(task.rank, process.pid)

    def _on_worker_ended(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        pidfd = self._alive.pop(process.pid)
        self._loop.forget(pidfd)
        os.close(pidfd)
        self._events.on_ended(rank, process.wait())

    def _adopt_stream(self, rank: int, stream: Stream, fd: int) -> None:
        os.set_blocking(fd, False)
        self._streams[fd] = rank, stream
        self._watch_stream(fd)

    def _watch_stream(self, fd: int) -> None:
        self._loop.watch(fd, READ, lambda _events: self._read(fd))

    def _read(self, fd: int) -> bool:
        """Reads a piece of a stream; False if there is nothing to read (now, or ever)."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._events.on_output(*self._streams[fd], data)
            return True
        self._close(fd)
        return False

    def _close(self, fd: int) -> None:
        rank, stream = self._streams.pop(fd)
        self._loop.forget(fd)
        os.close(fd)
        self._events.on_closed(rank, stream)


def begin_child(parent: int) -> None:
    """What a process that we start does between fork and exec."""
    process_tree.die_with_parent(parent)
    open_files.allow_as_before()


def take_over(pipe: IO[bytes]) -> int:
    """A descriptor that is ours, whatever the Popen object does to its own."""
    fd = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 3)
    pipe.close()
    return fd


def _memory_file(content: bytes) -> int:
    """A file that has no name and ends with its last reader."""
    fd = os.memfd_create("horovod-task", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    return fd
