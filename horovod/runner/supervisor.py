"""The process between the launcher and the workers, so that nothing outlives a launcher.

    launcher     the pid that the user sees: forwards signals, waits, passes the exit code on
      supervisor   a fork of it in its own session: starts the workers and owns all they leave behind
        worker 0     in its own session and process group
        worker 1 ...

Whoever dies, somebody is left who knows all descendants, because both upper processes are child subreapers
(process_tree.py):
  - The launcher dies, even by SIGKILL: the supervisor holds a pidfd of it, taken before the fork, which becomes
    readable. (A pipe would do as well, but its other end could leak into a worker.) It ends the job and exits.
  - The supervisor dies: the kernel kills the workers (PR_SET_PDEATHSIG) and gives all other descendants to the
    launcher, which kills them. It leaves alone what were its children before: a shell may have had some.
  - Both are killed at once, say by `pkill -9 -f horovodrun`: the workers die by PR_SET_PDEATHSIG. Processes that the
    workers had started are then on their own; that is the one case that is not covered.

Terminal signals reach only the launcher, since the supervisor has its own session: it sends each on, once. Signals
that the launcher was told to ignore (nohup; a job in the background of a script) stay ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Set

from horovod.runner import process_tree

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
FORWARDED_SIGNALS = ENDING_SIGNALS | {signal.SIGUSR1, signal.SIGUSR2}


def heeded_signals() -> frozenset[signal.Signals]:
    """The signals to forward: all but those that this process was started to ignore."""
    return frozenset(s for s in FORWARDED_SIGNALS if signal.getsignal(s) != signal.SIG_IGN)


def run_supervised(job: Callable[[int, Set[int]], int]) -> int:
    """Run a job in a supervisor process and wait for its end.

    Args:
        job: Called in the supervisor with a descriptor that is readable once the launcher is gone, and the signal mask
            that workers are to have. The signals to forward are blocked at that time. Returns the exit code.

    Returns:
        The exit code for the launcher.
    """
    process_tree.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ignored by our parent, children could not be waited for.
    heeded = heeded_signals()
    worker_mask = signal.pthread_sigmask(signal.SIG_BLOCK, heeded | {signal.SIGCHLD})
    # Those of the shell that we took the place of: `exec horovodrun`, or the tee of `horovodrun > >(tee log)`.
    not_ours = process_tree.children()
    launcher_pidfd = os.pidfd_open(os.getpid())
    _flush_standard_streams()
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(job, launcher_pidfd, worker_mask)
    os.close(launcher_pidfd)

    while True:
        signum = signal.sigwait(heeded | {signal.SIGCHLD})
        if signum != signal.SIGCHLD:
            os.kill(supervisor, signum)  # Not reaped yet, so the pid is still its own.
            continue
        pid, status = os.waitpid(supervisor, os.WNOHANG)
        if pid == supervisor:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(
            f"horovodrun: the job's supervisor (pid {supervisor}) was killed by {signal_name(-code)};"
            " the workers were killed",
            file=sys.stderr,
        )
        code = 128 - code
        process_tree.kill_descendants(spared=not_ours)
    return code


def _supervise(job: Callable[[int, Set[int]], int], launcher_pidfd: int, worker_mask: Set[int]) -> None:
    """Be the supervisor; does not return."""
    code = 1
    try:
        os.setsid()
        process_tree.become_subreaper()
        process_tree.set_process_name("horovod-job")
        code = job(launcher_pidfd, worker_mask)
    except BaseException:
        traceback.print_exc()
    finally:
        process_tree.kill_descendants()
        _flush_standard_streams()
        os._exit(code)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or its reader has gone.
            stream.flush()


def signal_name(signum: int) -> str:
    """A signal's name and number, such as "SIGKILL (9)"."""
    try:
        return f"{signal.Signals(signum).name} ({signum})"
    except ValueError:
        return f"signal {signum}"
