"""Names of operations: what matches an operation of one rank with those of the others.

A named operation is "<op>.<name>". One without a name is "<op>.noname.<n>", where n counts the unnamed operations of
that kind in that process set since init. So ranks need to make their unnamed calls of one kind and set in the same
order, and nothing else: what a rank does in a set that others are not members of does not disturb the count. The i-th
of the n members of a group is "<op>.<name>_<i>of<n>".
"""

import itertools
from collections import defaultdict

_unnamed: defaultdict[tuple[str, int], "itertools.count[int]"] = defaultdict(itertools.count)


def operation_name(op: str, name: str | None, process_set_id: int) -> str:
    """Returns the name under which the ranks agree on an operation."""
    if name is not None:
        return f"{op}.{name}"
    return f"{op}.noname.{next(_unnamed[op, process_set_id])}"


def member_names(op: str, name: str | None, process_set_id: int, count: int) -> list[str]:
    """Returns the names of the members of a group."""
    return members_of(operation_name(op, name, process_set_id), count)


def members_of(group: str, count: int) -> list[str]:
    """Returns the names of the members of a group whose own name is known."""
    return [f"{group}_{i}of{count}" for i in range(1, count + 1)]


def restart_counting(process_set_id: int | None = None) -> None:
    """Begins again at zero, in one set or in all.

    Ranks must count alike from here on: after init, also those that were started later; in a new process set, whose id
    another may have had before; after a join, before which some ranks had more operations than others.
    """
    if process_set_id is None:
        _unnamed.clear()
        return
    for key in [key for key in _unnamed if key[1] == process_set_id]:
        del _unnamed[key]
