"""Starts the workers of a job on this host, watches them and ends them.

One thread, one selector: pidfds of the workers, their output, signals, the launcher's pidfd, and the rendezvous server
if the job has several hosts. States of a job:

    running   until a worker fails, a signal asks for the end, the launcher is gone, or all workers have ended
    ending    everything that is left was sent a signal; at `kill_at` it is killed
    ended     no descendant is left (process_tree.py): what the workers wrote last is read, the failure is reported

The culprit is the first worker to *end* badly: when one dies, the others fail almost at once for lack of it. epoll
hands out pidfds in the order in which they became readable, which is the order of death, however late we look.

A worker that ends with 0 before the others is no failure. Processes that a worker leaves behind may go on as long as
the job does and are then ended with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import BinaryIO

from horovod.common.rendezvous.loop import LONGEST_WAIT
from horovod.common.rendezvous.server import RendezvousServer
from horovod.runner import process_tree
from horovod.runner.forwarding import Screen, WorkerStream, open_screens
from horovod.runner.hosts import Slot
from horovod.runner.supervisor import ENDING_SIGNALS, heeded_signals, signal_name

GRACE_SECONDS = 5.0
READ_BYTES = 64 << 10
NOT_STARTABLE = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class JobPlan:
    """What to start."""

    command: Sequence[str]
    slots: Sequence[Slot]
    copies: Sequence[tuple[BinaryIO, BinaryIO]] = ()  # By rank, or none: files for stdout and stderr.
    timestamps: bool = False
    verbose: bool = False
    grace_seconds: float = GRACE_SECONDS


@dataclass
class Worker:
    """One rank's process."""

    slot: Slot
    process: subprocess.Popen[bytes]
    pidfd: int
    stderr: WorkerStream = field(repr=False)

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.slot.rank

    def outcome(self) -> str:
        """How the process ended, in words that follow "Process 3"."""
        code = self.process.returncode
        return f"exit with status code {code}" if code >= 0 else f"was killed by signal {signal_name(-code)}"


class LocalJob:
    """The workers of one job and everything that they start."""

    def __init__(
        self,
        plan: JobPlan,
        environments: Sequence[Mapping[str, str]],
        server: RendezvousServer | None,
        launcher_pidfd: int,
        worker_mask: Set[int],
    ) -> None:
        """To be made in the supervisor process.

        Args:
            plan: What to start.
            environments: Of the workers, by rank.
            server: The rendezvous server, to be run along with the job.
            launcher_pidfd: See `supervisor.run_supervised`.
            worker_mask: See `supervisor.run_supervised`.
        """
        self._plan = plan
        self._environments = environments
        self._server = server
        self._worker_mask = worker_mask
        self._selector = selectors.EpollSelector()  # By name: its order of events matters.
        self._alive: dict[int, Worker] = {}  # By pid, until reaped: their pids and groups can't be reused.
        self._streams: dict[int, WorkerStream] = {}  # By descriptor, until their end.
        self._paused: set[int] = set()
        self._culprit: Worker | None = None
        self._exit_code = 0
        self._kill_at: float | None = None  # Set: the job is ending.
        self._launcher_gone = False
        self._interrupted = False
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stdout, self._stderr = open_screens(wake_fd, plan.timestamps)
        self._watch(wake_fd, lambda: os.eventfd_read(wake_fd))
        if server is not None:
            server.tell = lambda text: self._stderr.message(f"horovodrun: {text}")
            self._watch(server.fileno(), server.step)
        self._launcher_pidfd = launcher_pidfd
        self._watch(launcher_pidfd, self._on_launcher_gone)
        self._watch_signals()

    def run(self) -> int:
        """Run the job to its end and return the launcher's exit code."""
        self._start_workers()
        while process_tree.reap_orphans(own=self._alive):
            self._wait_for_events(self._next_deadline())
            if self._kill_at is not None and time.monotonic() >= self._kill_at and not self._kill():
                break
        self._read_what_is_left()
        if self._culprit is not None:
            self._stderr.message(self._failure_report(self._culprit))
        for screen in self._screens():
            screen.end_row()
        self._flush()
        return self._exit_code

    # ---- Events -----------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _watch_signals(self) -> None:
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in heeded_signals() | {signal.SIGCHLD}:
            signal.signal(signum, lambda *_: None)
        self._watch(read_end, lambda: self._on_signals(os.read(read_end, 4096)))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._worker_mask)

    def _wait_for_events(self, deadline: float | None) -> None:
        timeout = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        if self._server is not None and (due := self._server.next_time()) is not None and due <= now:
            self._server.step()
        for stream in self._streams.values():
            if stream.quiet_at is not None and stream.quiet_at <= now:
                stream.show_pending()
        self._pause_or_resume_reading()

    def _next_deadline(self) -> float | None:
        deadlines = [stream.quiet_at for stream in self._streams.values()]
        deadlines += [self._kill_at, self._server.next_time() if self._server is not None else None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _on_signals(self, numbers: bytes) -> None:
        for signum in numbers:
            self._on_signal(signum)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            return  # Only wakes the loop, which reaps.
        if signum not in ENDING_SIGNALS:
            # To the workers alone: helper processes rarely expect these, and would die.
            for pid in self._alive:
                os.kill(pid, signum)
        elif self._kill_at is None:
            self._exit_code = 128 + signum
            self._stderr.message(
                f"horovodrun: {signal_name(signum)} received and sent to the workers;"
                f" those left in {self._plan.grace_seconds:g} s are killed"
            )
            self._end(signum)
        elif signum == signal.SIGINT:
            self._kill_at = time.monotonic()
        self._interrupted = self._interrupted or signum in ENDING_SIGNALS

    def _on_launcher_gone(self) -> None:
        self._selector.unregister(self._launcher_pidfd)
        self._launcher_gone = True
        if self._kill_at is None:
            self._exit_code = 128 + signal.SIGKILL
            self._end(signal.SIGTERM)

    def _on_worker_ended(self, worker: Worker) -> None:
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        del self._alive[worker.process.pid]
        code = worker.process.wait()
        if code != 0 and self._kill_at is None:
            self._culprit = worker
            self._exit_code = code if code > 0 else 128 - code
            self._stderr.message(f"Process {worker.rank} {worker.outcome()}.")
            if self._alive:
                self._stderr.message(f"Terminating remaining workers after failure of Process {worker.rank}.")
            self._end(signal.SIGTERM)
        elif not self._alive and process_tree.reap_orphans():
            self._end(signal.SIGTERM)  # What the workers have left behind.

    # ---- Workers ----------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        supervisor = os.getpid()
        for slot in self._plan.slots:
            try:
                process = subprocess.Popen(
                    self._plan.command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._environments[slot.rank],
                    start_new_session=True,
                    # Safe here: this process has a single thread until the first output is forwarded.
                    preexec_fn=lambda: process_tree.die_with_parent(supervisor),  # noqa: PLW1509
                )
            except (OSError, subprocess.SubprocessError) as error:
                code = getattr(error, "errno", None)
                self._exit_code = 2 if code in NOT_STARTABLE else 1
                reason = getattr(error, "strerror", None) or error
                self._stderr.message(f"horovodrun: can't start rank {slot.rank}: {self._plan.command[0]}: {reason}")
                self._end(signal.SIGTERM)
                return
            self._adopt(slot, process)
        if self._plan.verbose:
            for worker in self._alive.values():
                self._stderr.message(f"Process {worker.rank} started on {worker.slot.hostname}: {worker.process.pid}.")

    def _adopt(self, slot: Slot, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        copies = self._plan.copies[slot.rank] if self._plan.copies else (None, None)
        out = WorkerStream(slot.rank, "stdout", self._stdout, copies[0])
        err = WorkerStream(slot.rank, "stderr", self._stderr, copies[1])
        for pipe, stream in ((process.stdout, out), (process.stderr, err)):
            fd = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 3)  # Ours, whatever the Popen object does to its own.
            pipe.close()
            os.set_blocking(fd, False)
            self._streams[fd] = stream
            self._watch_stream(fd)
        worker = Worker(slot, process, os.pidfd_open(process.pid), err)
        self._alive[process.pid] = worker
        self._watch(worker.pidfd, lambda: self._on_worker_ended(worker))

    def _end(self, signum: int) -> None:
        """Send a signal to everything that is left; what is still there after the grace time is killed."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._plan.grace_seconds
        for group in self._alive:
            with contextlib.suppress(OSError):  # All of the group have ended, or became another user's.
                os.killpg(group, signum)
        process_tree.signal_descendants(signum, except_groups=self._alive)

    def _kill(self) -> bool:
        """Kill all that is left; False if that is not possible."""
        for worker in list(self._alive.values()):
            self._selector.unregister(worker.pidfd)
        self._alive.clear()
        unkillable = process_tree.kill_descendants()
        if unkillable:
            pids = ", ".join(map(str, unkillable))
            self._stderr.message(f"horovodrun: could not kill: {pids} (stuck in the kernel, or of another user)")
        return not unkillable

    # ---- Output -----------------------------------------------------------------------------------------------------

    def _screens(self) -> set[Screen]:
        return {self._stdout, self._stderr}

    def _watch_stream(self, fd: int) -> None:
        self._watch(fd, lambda: self._read(fd))

    def _read(self, fd: int) -> bool:
        """Read a piece of a stream; False if there is nothing to read (now, or ever)."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._streams[fd].feed(data)
            return True
        self._streams.pop(fd).close()
        if fd not in self._paused:
            self._selector.unregister(fd)
        self._paused.discard(fd)
        os.close(fd)
        return False

    def _pause_or_resume_reading(self) -> None:
        full = {screen for screen in self._screens() if screen.sink.is_full()}
        for fd, stream in self._streams.items():
            if stream.screen in full and fd not in self._paused:
                self._selector.unregister(fd)
                self._paused.add(fd)
            elif stream.screen not in full and fd in self._paused:
                self._paused.discard(fd)
                self._watch_stream(fd)

    def _read_what_is_left(self) -> None:
        """Read what the pipes still hold. Nobody writes any more, so this is at most a pipe's capacity each."""
        for fd in list(self._streams):
            while fd in self._streams and self._read(fd):
                pass
        for stream in self._streams.values():  # Held open by something that could not be killed.
            stream.close()

    def _flush(self) -> None:
        """Wait until all is written, unless nobody waits for it any more."""
        already_interrupted = self._interrupted
        self._interrupted = False
        deadline = time.monotonic() + 1.0 if already_interrupted or self._launcher_gone else None
        while not all([screen.sink.is_empty() for screen in self._screens()]):
            for key, _ in self._selector.select(None if deadline is None else deadline - time.monotonic()):
                key.data()
            if self._interrupted or self._launcher_gone or (deadline is not None and time.monotonic() >= deadline):
                return

    def _failure_report(self, worker: Worker) -> str:
        lines = [
            f"horovodrun: the first process to fail was rank {worker.rank} of {len(self._plan.slots)}: it"
            f" {worker.outcome().replace('exit with', 'ended with')}.",
            f"  host:    {worker.slot.hostname}",
            f"  pid:     {worker.process.pid}",
            f"  command: {shlex.join(self._plan.command)}",
        ]
        if worker.process.returncode == -signal.SIGKILL:
            lines.append(
                "  Nothing but another process or the kernel sends SIGKILL: was the host out of memory (dmesg)?"
            )
        tail = worker.stderr.tail.lines()
        if tail:
            lines.append("  last lines of its stderr:" if len(tail) > 1 else "  its stderr:")
            lines += [f"    {line}" for line in tail]
        else:
            lines.append("  It wrote nothing to stderr.")
        return "\n".join(lines)
