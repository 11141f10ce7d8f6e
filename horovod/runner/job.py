"""A job from its start to its end: what becomes of workers' words and deaths, of signals, and of the launcher's death.

One thread, one loop: the crew (its processes and their output), signals and the launcher's pidfd. States of a job:

    running   until a worker fails, a signal asks for the end, the launcher is gone, or all workers have ended
    ending    everything that is left was sent a signal; after the grace time it is killed
    ended     the crew is gone: what the workers wrote last is read, the failure is reported

The culprit is the first worker to *end* badly: when one dies, the others fail almost at once for lack of it.

A worker that ends with 0 before the others is no failure. Processes that a worker leaves behind may go on as long as
the job does and are then ended with it.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import BinaryIO

from horovod.common.rendezvous.loop import READ, Loop
from horovod.runner.crew import Crew, CrewEvents, Stream
from horovod.runner.forwarding import WorkerStream, open_screens
from horovod.runner.hosts import Slot
from horovod.runner.run_job import PIECE
from horovod.runner.sink import Sink
from horovod.runner.supervisor import ENDING_SIGNALS, heeded_signals, signal_name

GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class JobPlan:
    """What to run, and what to do with its output."""

    command: Sequence[str]
    slots: Sequence[Slot]
    copies: Sequence[tuple[BinaryIO, BinaryIO]] = ()  # By rank, or none: files for stdout and stderr.
    results_fd: int | None = None  # Where what ranks return goes (run_job.py); who reads it is who wants the job.
    timestamps: bool = False
    verbose: bool = False
    grace_seconds: float = GRACE_SECONDS


@dataclass(frozen=True)
class _Culprit:
    """The first worker to fail."""

    slot: Slot
    code: int

    def outcome(self) -> str:
        """How the process ended, in words that follow "Process 3"."""
        if self.code >= 0:
            return f"exit with status code {self.code}"
        return f"was killed by signal {signal_name(-self.code)}"


class Job:
    """One job; it hears what its crew tells."""

    def __init__(
        self,
        plan: JobPlan,
        make_crew: Callable[[Loop, CrewEvents], Crew],
        launcher_pidfd: int,
        worker_mask: Set[int],
    ) -> None:
        """To be made in the supervisor process.

        Args:
            plan: What to run.
            make_crew: Makes those who start the workers.
            launcher_pidfd: See `supervisor.run_supervised`.
            worker_mask: See `supervisor.run_supervised`.
        """
        self._plan = plan
        self._loop = Loop()
        self._pids: dict[int, int] = {}  # By rank.
        self._left = {slot.rank for slot in plan.slots}  # Those that have not ended.
        self._streams: dict[tuple[int, Stream], WorkerStream] = {}
        self._lossy: set[Stream] = set()  # Those of the launcher's streams whose losses have been told.
        self._culprit: _Culprit | None = None
        self._exit_code = 0
        self._ending = False
        self._may_speak = False  # The first word starts a thread, and the crew forks before that.
        self._launcher_gone = False
        self._interrupted = False
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._screens = dict(zip((Stream.STDOUT, Stream.STDERR), open_screens(wake_fd, plan.timestamps), strict=True))
        self._loop.watch(wake_fd, READ, lambda _events: os.eventfd_read(wake_fd))
        self._results: Sink | None = None
        if plan.results_fd is not None:
            self._results = Sink(plan.results_fd, lambda: os.eventfd_write(wake_fd, 1))
            self._loop.watch(plan.results_fd, READ, lambda _events: self._on_reader_gone())
        self._launcher_pidfd = launcher_pidfd
        self._loop.watch(launcher_pidfd, READ, lambda _events: self._on_launcher_gone())
        self._watch_signals(worker_mask)
        self._crew = make_crew(self._loop, self)

    def run(self) -> int:
        """Run the job to its end and return the launcher's exit code."""
        self._crew.start()
        self._may_speak = True
        for rank, pid in self._pids.items():
            self._tell_start(rank, pid)
        while not self._crew.is_gone():
            self._loop.step(self._next_quiet())
            self._show_pending()
            self._tell_losses()
            self._crew.pause({stream for stream, screen in self._screens.items() if screen.sink.is_full()})
        self._crew.read_what_is_left()
        for stream in self._streams.values():
            stream.close()
        if self._culprit is not None:
            self._say(self._failure_report(self._culprit))
        for screen in self._screens.values():
            screen.end_row()
        self._flush()
        if self._tell_losses():
            self._flush()
        return self._exit_code

    # ---- What the crew tells ----------------------------------------------------------------------------------------

    def on_started(self, rank: int, pid: int) -> None:
        """A worker runs."""
        self._pids[rank] = pid
        if self._may_speak:
            self._tell_start(rank, pid)

    def on_output(self, rank: int, stream: Stream, data: bytes) -> None:
        """A worker wrote something."""
        if stream is not Stream.RESULT:
            self._stream(rank, stream).feed(data)
        elif self._results is not None:
            self._results.write(PIECE.pack(rank, len(data)) + data)

    def on_closed(self, rank: int, stream: Stream) -> None:
        """Nothing more comes from a stream."""
        if stream is not Stream.RESULT:
            self._stream(rank, stream).close()

    def on_ended(self, rank: int, code: int) -> None:
        """A worker has ended."""
        self._left.discard(rank)
        if code != 0 and not self._ending:
            self._culprit = _Culprit(self._plan.slots[rank], code)
            self._exit_code = code if code > 0 else 128 - code
            self._say(f"Process {rank} {self._culprit.outcome()}.")
            if self._left:
                self._say(f"Terminating remaining workers after failure of Process {rank}.")
            self._end(signal.SIGTERM)
        elif not self._left:
            self._crew.end(signal.SIGTERM)  # What the workers have left behind.

    def on_trouble(self, text: str, exit_code: int) -> None:
        """Something else than a worker went wrong, so that the job can't go on."""
        if not self._ending:
            self._exit_code = exit_code
            self._say(f"horovodrun: {text}")
            self._end(signal.SIGTERM)

    def on_word(self, text: str) -> None:
        """Something that the user should know."""
        self._say(f"horovodrun: {text}")

    # ---- Other events -----------------------------------------------------------------------------------------------

    def _watch_signals(self, worker_mask: Set[int]) -> None:
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in heeded_signals() | {signal.SIGCHLD}:
            signal.signal(signum, lambda *_: None)
        self._loop.watch(read_end, READ, lambda _events: self._on_signals(os.read(read_end, 4096)))
        signal.pthread_sigmask(signal.SIG_SETMASK, worker_mask)

    def _on_signals(self, numbers: bytes) -> None:
        for signum in numbers:
            self._on_signal(signum)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            return  # Only wakes the loop, which reaps.
        if signum not in ENDING_SIGNALS:
            self._crew.forward(signum)
        elif not self._ending:
            self._exit_code = 128 + signum
            self._say(
                f"horovodrun: {signal_name(signum)} received and sent to the workers;"
                f" those left in {self._plan.grace_seconds:g} s are killed"
            )
            self._end(signum)
        elif signum == signal.SIGINT:
            self._crew.kill()
        self._interrupted = self._interrupted or signum in ENDING_SIGNALS

    def _on_launcher_gone(self) -> None:
        self._loop.forget(self._launcher_pidfd)
        self._launcher_gone = True
        if not self._ending:
            self._exit_code = 128 + signal.SIGKILL
            self._end(signal.SIGTERM)

    def _on_reader_gone(self) -> None:
        assert self._plan.results_fd is not None
        self._loop.forget(self._plan.results_fd)
        self.on_trouble("the program that wanted the results has ended", 1)

    def _end(self, signum: int) -> None:
        self._ending = True
        self._crew.end(signum)

    # ---- Output -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._screens[Stream.STDERR].message(text)

    def _tell_start(self, rank: int, pid: int) -> None:
        if self._plan.verbose:
            self._say(f"Process {rank} started on {self._plan.slots[rank].hostname}: {pid}.")

    def _stream(self, rank: int, stream: Stream) -> WorkerStream:
        if (rank, stream) not in self._streams:
            copies = self._plan.copies[rank] if self._plan.copies else (None, None)
            copy = copies[0 if stream is Stream.STDOUT else 1]
            self._streams[rank, stream] = WorkerStream(rank, stream.name.lower(), self._screens[stream], copy)
        return self._streams[rank, stream]

    def _next_quiet(self) -> float | None:
        times = (stream.quiet_at for stream in self._streams.values())
        return min((when for when in times if when is not None), default=None)

    def _show_pending(self) -> None:
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.quiet_at is not None and stream.quiet_at <= now:
                stream.show_pending()

    def _tell_losses(self) -> bool:
        """Tells, once for each stream, that something could not be written; True if it was news."""
        lossy = {stream for stream, screen in self._screens.items() if screen.sink.loss}
        news = lossy - self._lossy
        self._lossy = lossy
        for stream in news:
            reason = self._screens[stream].sink.loss
            self._say(f"horovodrun: output is lost, since {stream.name.lower()} can't be written: {reason}")
        return bool(news)

    def _flush(self) -> None:
        """Wait until all is written, unless nobody waits for it any more."""
        already_interrupted = self._interrupted
        self._interrupted = False
        deadline = time.monotonic() + 1.0 if already_interrupted or self._launcher_gone else None
        sinks = [screen.sink for screen in set(self._screens.values())]
        sinks += [] if self._results is None else [self._results]
        while not all([sink.is_empty() for sink in sinks]):
            self._loop.step(deadline)
            if self._interrupted or self._launcher_gone or (deadline is not None and time.monotonic() >= deadline):
                return

    def _failure_report(self, culprit: _Culprit) -> str:
        rank = culprit.slot.rank
        lines = [
            f"horovodrun: the first process to fail was rank {rank} of {len(self._plan.slots)}: it"
            f" {culprit.outcome().replace('exit with', 'ended with')}.",
            f"  host:    {culprit.slot.hostname}",
            f"  pid:     {self._pids[rank]}",
            f"  command: {shlex.join(self._plan.command)}",
        ]
        if culprit.code == -signal.SIGKILL:
            lines.append(
                "  Nothing but another process or the kernel sends SIGKILL: was the host out of memory (dmesg)?"
            )
        tail = self._stream(rank, Stream.STDERR).tail.lines()
        if tail:
            lines.append("  last lines of its stderr:" if len(tail) > 1 else "  its stderr:")
            lines += [f"    {line}" for line in tail]
        else:
            lines.append("  It wrote nothing to stderr.")
        return "\n".join(lines)
