"""How a target in Python is run: atheris, which is libFuzzer, with some inputs to begin with.

A target is one file here. It is called with a directory, into which the seeds are written first, or with a file, which
is run alone; other arguments are libFuzzer's.
"""

import os
import sys
from collections.abc import Callable, Sequence

import atheris


def run(target: Callable[[bytes], None], seeds: Sequence[bytes]) -> None:
    """Calls the target with one input after another, until it raises something or the time is over."""
    for argument in sys.argv[1:]:
        if os.path.isdir(argument):
            for number, seed in enumerate(seeds):
                with open(os.path.join(argument, f"seed-{number}"), "wb") as file:
                    file.write(seed)
            break
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
