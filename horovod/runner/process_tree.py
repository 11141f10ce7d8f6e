"""Finding, signalling and reaping every descendant of this process.

A process that is a *child subreaper* (prctl) adopts every orphan among its descendants, also those that made a new
session or forked twice to become a daemon. So for a subreaper "I have no children" means "nothing of mine is left",
and that, not a list of pids, is how the launcher knows that a job is gone.

Pids are reused. A child that we have not reaped keeps its number, so signalling children and their groups is safe.
For deeper descendants a pidfd is taken first and the parent is read again after that: a number that changed hands in
between has another parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Container, Set

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# How long to go on killing before a process counts as unkillable (stuck in the kernel, or another user's).
KILL_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def become_subreaper() -> None:
    """Adopt all orphans among the descendants of this process from now on."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that ps, top and killall show for this process (15 bytes)."""
    _prctl(PR_SET_NAME, name.encode()[:15])


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; to be called between fork and exec."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before we asked.
        os.kill(os.getpid(), signal.SIGKILL)


def _parent_and_group(pid: int) -> tuple[int, int] | None:
    """The parent and the process group of a process; None for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name (second field) may hold spaces and parentheses.
            state, parent, group = file.read().rpartition(b")")[2].split(None, 3)[:3]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else (int(parent), int(group))


def children() -> frozenset[int]:
    """The living children of this process."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # The usual case: there are none, and nothing has to be searched.
        return frozenset()
    return frozenset(pid for pid, parent in descendants().items() if parent == os.getpid())


def descendants(spared: Container[int] = ()) -> dict[int, int]:
    """All living descendants of this process, without those that are spared and what they have started.

    Returns:
        Pid to parent pid, parents before their children.
    """
    by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (facts := _parent_and_group(int(name))) is not None:
            by_parent.setdefault(facts[0], []).append(int(name))
    found: dict[int, int] = {}
    unvisited = [os.getpid()]
    while unvisited:
        parent = unvisited.pop()
        for child in by_parent.get(parent, ()):
            if child not in spared:
                found[child] = parent
                unvisited.append(child)
    return found


def signal_descendants(signum: int, except_groups: Container[int] = (), spared: Container[int] = ()) -> None:
    """Send a signal to every living descendant that is not in one of the given process groups."""
    for pid, parent in descendants(spared).items():
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            facts = _parent_and_group(pid)
            if facts is not None and facts[0] == parent and facts[1] not in except_groups:
                signal.pidfd_send_signal(pidfd, signum)
        except OSError:  # It ended just now, or belongs to another user: `kill_descendants` reports the latter.
            pass
        finally:
            os.close(pidfd)


def reap_orphans(own: Container[int] = ()) -> bool:
    """Reap ended children other than those in `own`, whose exit status somebody else wants.

    Returns:
        Whether any child, running or unreaped, is left.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None or ended.si_pid in own:
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_descendants(spared: Set[int] = frozenset()) -> list[int]:
    """Kill every descendant and wait until none is left.

    Args:
        spared: Children that are left alone, with all that they have started.

    Returns:
        The pids that could not be killed within KILL_SECONDS.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while descendants(spared) if spared else reap_orphans():
        if time.monotonic() > deadline:
            return list(descendants(spared))
        signal_descendants(signal.SIGKILL, spared=spared)
        time.sleep(0.005)
    return []
