"""What a job needs of those who start its workers: one crew on this machine, or agents on many.

A crew tells what happens through `CrewEvents`; the job decides what becomes of it and tells the crew.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol


class Stream(enum.IntEnum):
    """What a worker writes to."""

    STDOUT = 1
    STDERR = 2
    RESULT = 3  # What a function returned (horovod.run); not for people.


@dataclass(frozen=True)
class Task:
    """One worker to start."""

    rank: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Work:
    """What the workers of a crew are to do.

    Attributes:
        command: The program and its arguments.
        tasks: The workers.
        grace_seconds: How long they may take to end after they were asked to.
        payload: What they find on standard input; None: nothing, and they have no RESULT stream.
    """

    command: Sequence[str]
    tasks: Sequence[Task]
    grace_seconds: float
    payload: bytes | None = None


class CrewEvents(Protocol):
    """What a crew tells."""

    def on_started(self, rank: int, pid: int) -> None:
        """A worker runs."""

    def on_output(self, rank: int, stream: Stream, data: bytes) -> None:
        """A worker wrote something."""

    def on_closed(self, rank: int, stream: Stream) -> None:
        """Nothing more comes from a stream."""

    def on_ended(self, rank: int, code: int) -> None:
        """A worker has ended, with an exit code or minus the number of the signal that ended it."""

    def on_trouble(self, text: str, exit_code: int) -> None:
        """Something else than a worker went wrong, so that the job can't go on."""

    def on_word(self, text: str) -> None:
        """Something that the user should know."""


class Crew(Protocol):
    """Those who start the workers of a job."""

    def start(self) -> None:
        """Begins; to be called before this process has a second thread."""

    def forward(self, signum: int) -> None:
        """Sends a signal to the workers alone."""

    def end(self, signum: int) -> None:
        """Sends a signal to everything that is left; what is still there after the grace time is killed."""

    def kill(self) -> None:
        """Kills all that is left, now."""

    def pause(self, streams: Set[Stream]) -> None:
        """Takes no more output from these streams for now, and goes on with the others."""

    def is_gone(self) -> bool:
        """Whether nothing is left."""

    def read_what_is_left(self) -> None:
        """Tells the last words of those who have gone."""
