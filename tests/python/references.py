"""Whether what was done many times has kept references to objects, or given back some that were not its own."""

import sys
from collections.abc import Callable
from typing import Any

_TIMES = 50


def check_balanced(uses: dict[str, Callable[[], Any]], objects: list[Any], meet: Callable[[], Any]) -> None:
    """Fails with the name of the use that has not left the objects with about as many references as before.

    Args:
        uses: What is done, by name.
        objects: Whose references are counted.
        meet: Called after the last time of each, so that all ranks are done with it.
    """
    for name, use in uses.items():
        use()  # what is made once is made
        before = [sys.getrefcount(each) for each in objects]
        for _ in range(_TIMES):
            use()
        meet()
        for each, count in zip(objects, before, strict=True):
            assert abs(sys.getrefcount(each) - count) < _TIMES / 2, (name, type(each))
