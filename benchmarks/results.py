"""What is kept of a run, and how it is stored."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from subject import Subject
from teams import Seconds


@dataclasses.dataclass(frozen=True)
class Record:
    """A subject, done in one way, timed in rounds that alternated with those of other ways.

    Attributes:
        subject: What was timed.
        way: How it was done.
        median: Seconds of an iteration.
        p99: Seconds; with fewer than a hundred samples nearly the slowest.
        samples: How many iterations were timed.
        by_round: The median of each round: far apart means a noisy machine.
        cpu: Seconds of processor time of a rank, of an iteration without a gate: the round with the least. None where
            ranks wait for each other at a gate. Other programs change it less than they change the time.
    """

    subject: Subject
    way: str
    median: float
    p99: float
    samples: int
    by_round: tuple[float, ...]
    cpu: float | None = None

    @classmethod
    def of(cls, subject: Subject, way: str, rounds: list[Seconds], cpu: float | None) -> Self:
        """Summarises the seconds of all rounds."""
        every = np.concatenate(rounds)
        medians = tuple(float(np.median(seconds)) for seconds in rounds)
        return cls(subject, way, float(np.median(every)), float(np.percentile(every, 99)), every.size, medians, cpu)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A single number that is no time of an iteration: what, for how many ranks, done by whom."""

    what: str
    ranks: int
    way: str
    value: float


@dataclasses.dataclass
class Results:
    """All of a run; machine describes each section that was measured."""

    machine: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    records: list[Record] = dataclasses.field(default_factory=list)
    figures: list[Figure] = dataclasses.field(default_factory=list)

    def add(self, records: Iterable[Record] = (), figures: Iterable[Figure] = ()) -> None:
        """Adds what was measured, in place of what was measured before of the same."""
        for record in records:
            same = (record.subject, record.way)
            self.records = [old for old in self.records if (old.subject, old.way) != same] + [record]
        for figure in figures:
            key = (figure.what, figure.ranks, figure.way)
            self.figures = [old for old in self.figures if (old.what, old.ranks, old.way) != key] + [figure]

    def find(self, subject: Subject, way: str) -> Record | None:
        """The record of a subject and way, if it was measured."""
        return next((record for record in self.records if (record.subject, record.way) == (subject, way)), None)

    def subjects(self, kind: str, ranks: int | None = None, link: str = "") -> list[Subject]:
        """All subjects of a kind, on one host or over a link, without doubles, by ranks, dtype and size."""
        every = {record.subject for record in self.records}
        found = {subject for subject in every if (subject.kind, subject.link) == (kind, link)}
        chosen = [subject for subject in found if ranks is None or subject.ranks == ranks]
        return sorted(chosen, key=lambda s: (s.ranks, s.dtype != "float32", s.dtype, s.model, s.bytes))

    def figure(self, what: str, ranks: int, way: str) -> float | None:
        """A single number, if it was measured."""
        return next((f.value for f in self.figures if (f.what, f.ranks, f.way) == (what, ranks, way)), None)

    def save(self, path: Path) -> None:
        """Writes a JSON file, one record a line."""
        records = [json.dumps(dataclasses.asdict(record)) for record in self.records]
        figures = [json.dumps(dataclasses.asdict(figure)) for figure in self.figures]
        text = (
            f'{{"machine": {json.dumps(self.machine, indent=1)},\n"records": [\n'
            + ",\n".join(records)
            + '\n],\n"figures": [\n'
            + ",\n".join(figures)
            + "\n]}\n"
        )
        path.write_text(text)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what save has written."""
        stored: dict[str, Any] = json.loads(path.read_text())
        records = [
            Record(**fields | {"subject": Subject(**fields["subject"]), "by_round": tuple(fields["by_round"])})
            for fields in stored["records"]
        ]
        return cls(stored["machine"], records, [Figure(**fields) for fields in stored["figures"]])
