"""What is kept of a measurement: one line of a table."""

import dataclasses
from typing import Any, Self

import numpy as np
from measure import Seconds


@dataclasses.dataclass(frozen=True)
class Subject:
    """What was measured."""

    benchmark: str
    ranks: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Horovod and another way to do the same, timed in alternating rounds. Times are in seconds.

    Attributes:
        subject: What was measured.
        median: Of horovod's iterations.
        p99: Of horovod's iterations; with fewer than a hundred of them nearly the slowest.
        other: The other way.
        other_median: Of the other's iterations.
        other_p99: Of the other's iterations.
        ratio: other_median / median: above 1 horovod is faster.
        ratio_low: The same ratio in the round that was worst for horovod. Far from ratio_high: a noisy machine.
        ratio_high: The same ratio in the round that was best for it.
        samples: How many iterations of each were timed.
    """

    subject: Subject
    median: float
    p99: float
    other: str
    other_median: float
    other_p99: float
    ratio: float
    ratio_low: float
    ratio_high: float
    samples: int

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The reverse of dataclasses.asdict."""
        return cls(**fields | {"subject": Subject(**fields["subject"])})


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Processor time of a rank that waited for a late one, in seconds; the most of all ranks that waited."""

    peer: str
    ranks: int
    waited: float
    cpu_seconds: float


def compare(subject: Subject, ours: Seconds, other: str, theirs: Seconds) -> Comparison:
    """Summarises the seconds of horovod and of another, each by round and iteration."""
    ratios = np.median(theirs, axis=1) / np.median(ours, axis=1)
    return Comparison(
        subject=subject,
        median=float(np.median(ours)),
        p99=float(np.percentile(ours, 99)),
        other=other,
        other_median=float(np.median(theirs)),
        other_p99=float(np.percentile(theirs, 99)),
        ratio=float(np.median(theirs) / np.median(ours)),
        ratio_low=float(ratios.min()),
        ratio_high=float(ratios.max()),
        samples=ours.size,
    )
