"""Many small cases in one group of ranks: starting Python with a framework takes longer than most cases.

cases = Cases()

@cases.add
def something_is_so() -> None: ...               # runs on every rank, in the order in which they were added

@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(2)

@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ranks import run_ranks

Case = Callable[[], Any]


@dataclass
class Outcomes:
    """What came of the cases: for each rank, by case, the traceback of its failure or nothing."""

    failures: list[dict[str, str]]

    def check(self, case: str) -> None:
        """Fails if the case failed on any rank."""
        texts = [f"--- rank {rank}:\n{failures[case]}" for rank, failures in enumerate(self.failures) if failures[case]]
        assert not texts, "\n".join([f"{case} failed", *texts])


class Cases:
    """The cases of a test module."""

    def __init__(self) -> None:
        self._cases: list[Case] = []

    def add(self, function: Case) -> Case:
        """Decorates a case."""
        self._cases.append(function)
        return function

    def include(self, others: "Cases") -> None:
        """Adds the cases of another module."""
        self._cases += others._cases

    def names(self) -> list[str]:
        """Of all cases."""
        return [case.__name__ for case in self._cases]

    def run(self, size: int, start: Case, timeout: float = 240.0, env: dict[str, str] | None = None) -> Outcomes:
        """Runs all cases on as many ranks, each of which first calls start()."""
        module = self._cases[-1].__module__
        return Outcomes(run_ranks(size, _run_all, start, self._cases, timeout=timeout, env=env, module=module))


def _run_all(start: Case, cases: list[Case]) -> dict[str, str]:
    start()
    failures = {}
    failed = ""
    for case in cases:
        name = case.__name__
        failures[name] = failed and f"not run, because {failed} failed\n"
        try:
            if not failed:
                case()
        except Exception:
            # The ranks are no longer in step: what came after this would fail for that reason, or wait for ever.
            failures[name], failed = traceback.format_exc(), name
    return failures


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """As pytest.raises, but every text must occur in the message."""
    try:
        yield
    except kind as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in: {error}"
        return
    raise AssertionError(f"{kind.__name__} was not raised")
