"""A worker of `horovod.run`: `python -m horovod.runner.run_task`.

The function comes on standard input, what becomes of it goes to the descriptor that HOROVOD_RESULT_FD names; both lead
to the launcher and nowhere else (local_crew.py, agent.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from horovod.runner.local_crew import RESULT_VARIABLE

DIFFERENT_MINORS = "a function can't be sent from one to the other. All hosts need the same minor version."


def understand_each_other(python: str, other: str) -> bool:
    """Whether functions can be sent from one version of Python to another: their code is that of a minor version."""
    return python.split(".")[:2] == other.split(".")[:2]


@dataclass(frozen=True)
class Call:
    """What to run."""

    python: str  # The version of the caller's.
    prefix: str  # Where that is installed, or its virtual environment.
    path: list[str]  # Where it finds its modules.
    users_path: list[str]  # Those of these places that are not its own: where another Python has to look as well.
    function: bytes  # Function, args and kwargs, by cloudpickle: can be read only with that path.


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    Attributes:
        value: What the function returned, pickled; None if it raised.
        error: The type and words of what it raised.
        traceback: Where.
        exception: The exception itself, pickled, if that is possible.
    """

    value: bytes | None = None
    error: str = ""
    traceback: str = ""
    exception: bytes | None = None


def _run(call: Call) -> Outcome:
    import cloudpickle

    try:
        own = platform.python_version()
        if not understand_each_other(call.python, own):  # Before any of its code is read.
            raise RuntimeError(f"{sys.executable} is Python {own}, the caller's is {call.python}: {DIFFERENT_MINORS}")
        # Another Python, by `executable`, has its own packages.
        sys.path[:] = call.path if call.prefix == sys.prefix else [*call.users_path, *sys.path]
        function, args, kwargs = pickle.loads(call.function)
        value = function(*args, **kwargs)
        try:
            return Outcome(value=cloudpickle.dumps(value))
        except Exception as error:
            raise TypeError(f"the function returned a {type(value).__name__}, which can't be sent: {error}") from error
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return Outcome(value=cloudpickle.dumps(None))
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        exception = None
        with contextlib.suppress(Exception):  # It may hold anything.
            exception = cloudpickle.dumps(error)
            pickle.loads(exception)
        words = traceback.format_exception_only(error)[-1].strip()
        return Outcome(error=words, traceback=text, exception=exception)


def _send(fd: int, data: Any) -> None:
    with open(fd, "wb") as pipe:
        pickle.dump(data, pipe)


def main() -> None:
    """Be a worker; ends the process."""
    fd = int(os.environ.pop(RESULT_VARIABLE))
    os.set_inheritable(fd, False)
    call = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = [""]
    outcome = _run(call)
    _send(fd, outcome)
    sys.exit(0 if outcome.value is not None else 1)


if __name__ == "__main__":
    # Under its own name: what is pickled here is read elsewhere.
    from horovod.runner import run_task  # noqa: PLW0406

    run_task.main()
