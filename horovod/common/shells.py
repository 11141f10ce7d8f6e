"""Whether this process was started by hand: from the prompt of a shell.

A shell with job control moves itself and its jobs to and from the terminal's foreground, for which it has to ignore the
signals SIGTSTP and SIGTTOU (POSIX, General Terminal Interface): so does every such shell, whatever its name, and next
to nothing else. A shell that runs a script or one command does not, and no shell leaves its jobs with these ignored.
"""

import os
import signal

_SIGNALS_OF_SHELLS = (signal.SIGTSTP, signal.SIGTTOU)


def is_started_from_prompt() -> bool:
    """Whether an ancestor of this process is a shell with job control, on a terminal that it is a part of."""
    pid = os.getppid()
    while pid > 0:
        try:
            parent, terminal = _parent_and_terminal(pid)
            if terminal and _ignores(pid, _SIGNALS_OF_SHELLS):
                return True
        except OSError:
            return False  # It has ended, or is hidden from us: nothing above it can be seen.
        pid = parent
    return False


def _parent_and_terminal(pid: int) -> tuple[int, int]:
    """The pid of the parent (0: outside of the container) and the number of the controlling terminal (0: none)."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        # The name may hold anything, but nothing after it holds a parenthesis: state, parent, group, session, terminal.
        _, parent, _, _, terminal = file.read().rpartition(")")[2].split()[:5]
    return int(parent), int(terminal)


def _ignores(pid: int, signals: tuple[signal.Signals, ...]) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigIgn:")), 0)
    return all(mask >> (number - 1) & 1 for number in signals)
