"""What a run of the benchmarks measures: how run.py tells its workers."""

import dataclasses
import json
from typing import Self

BENCHMARKS = ("latency", "stream", "waiting")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parameters of a run."""

    benchmarks: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    large_elements: int
    wait_seconds: float

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The other way round."""
        fields = json.loads(text)
        return cls(**fields | {"benchmarks": tuple(fields["benchmarks"]), "sizes": tuple(fields["sizes"])})
