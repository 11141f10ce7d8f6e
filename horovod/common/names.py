"""Names of operations: what matches an operation of one rank with those of the others.

A named operation is "<op>.<name>". One without a name is "<op>.noname.<n>", where n counts the unnamed operations of
that kind in that process set since init. So ranks need to make their unnamed calls of one kind and set in the same
order, and nothing else: what a rank does in a set that others are not members of does not disturb the count.
"""

import itertools
from collections import defaultdict

_unnamed: defaultdict[tuple[str, int], "itertools.count[int]"] = defaultdict(itertools.count)


def operation_name(op: str, name: str | None, process_set_id: int) -> str:
    """Returns the name under which the ranks agree on an operation."""
    if name is not None:
        return f"{op}.{name}"
    return f"{op}.noname.{next(_unnamed[op, process_set_id])}"


def restart_counting() -> None:
    """Begins again at zero: after init all ranks count alike, also those that were started later."""
    _unnamed.clear()
