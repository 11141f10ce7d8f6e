"""Handles of operations: the engine's own, which are positive, and those of groups, which are negative.

A group is several operations that were started by one call. It has one handle and ends when all of them have ended.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from horovod import _core

_groups: dict[int, "_Group"] = {}
_next_group = itertools.count(-1, -1)


class _Group:
    def __init__(self, handles: list[int]) -> None:
        self.handles = handles
        self.lock = threading.Lock()
        # By those that have ended. Kept, so that a wait that was interrupted can be taken up again.
        self.results: list[Any] = []
        self.errors: list[Exception] = []

    def poll(self) -> bool:
        return all(_core.poll(handle) for handle in self.handles[len(self.results) :])

    def wait(self) -> list[Any]:
        """Waits for all, also when one has failed: the memory of the others is in use until they have ended."""
        with self.lock:
            _core.wait_all(self.handles, self.results, self.errors)
        if self.errors:
            raise self.errors[0]
        return self.results


def start_group(submissions: Iterable[Callable[[], int]]) -> int:
    """Starts the operations of a group and returns its handle.

    Args:
        submissions: Each starts one operation and returns its handle.

    Raises:
        ValueError: One of them was refused. Those before it go on, since other ranks may wait for them, but nobody
            gets their results.
    """
    handles: list[int] = []
    try:
        for submit in submissions:
            handles.append(submit())
    except BaseException:
        for handle in handles:
            _core.forget(handle)
        raise
    return group_of(handles)


def group_of(handles: list[int]) -> int:
    """Makes operations that were started a group and returns its handle."""
    group = next(_next_group)
    _groups[group] = _Group(handles)
    return group


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that synchronize will not wait.

    Raises:
        ValueError: There is no such handle, or synchronize has already returned it.
    """
    if handle >= 0:
        return _core.poll(handle)
    group = _groups.get(handle)
    if group is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return group.poll()


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result, that of a group as a list; None for an unknown handle.

    Raises:
        HorovodMismatchError: The ranks disagree about the tensor. The job goes on.
        HorovodInternalError: A rank was lost, or Horovod was shut down.
    """
    if handle >= 0:
        return _core.wait(handle)
    group = _groups.get(handle)
    if group is None:
        return None
    try:
        return group.wait()
    finally:
        if len(group.results) == len(group.handles):
            _groups.pop(handle, None)
