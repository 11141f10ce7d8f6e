"""How many files a launcher or an agent may have open.

It has several for each worker, which are too many for the usual limit of 1024 from some 200 workers on. The limit that
counts for the workers is the one that the launcher was started with: programs that use select() rely on its being low.
"""

from __future__ import annotations

import contextlib
import resource

_before: tuple[int, int] | None = None


def allow_many() -> None:
    """Raises the limit of this process as far as it may."""
    global _before  # noqa: PLW0603
    if _before is None:
        _before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # Not allowed here: then the old one has to do.
            resource.setrlimit(resource.RLIMIT_NOFILE, (_before[1], _before[1]))


def allow_as_before() -> None:
    """Undoes it; to be called between fork and exec."""
    if _before is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _before)
