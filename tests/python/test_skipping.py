"""What is missing on a machine: a reason to leave a test out for a user, a failure in CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from machines import machines
from skipping import import_or_skip, skip


def outcome(call: Callable[[], object]) -> str:
    """How a test ends that calls this. A skip that is not caught here would skip the test of it."""
    try:
        call()
    except pytest.skip.Exception as skipped:
        return f"skipped: {skipped.msg}"
    except pytest.fail.Exception as failed:
        return f"failed: {failed.msg}"
    return "passed"


@pytest.mark.parametrize(("ci", "ends"), [("", "skipped: "), ("true", "failed: ")])
def test_what_is_missing(ci: str, ends: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert outcome(machines(1, tmp_path).__enter__).startswith(ends + "machines of namespaces need root")
    assert outcome(lambda: import_or_skip("no_such_package")).startswith(ends + "not installed: no_such_package")
    # What there is not for this machine is no fault of CI.
    assert outcome(lambda: skip("not for this processor", can_be_had=False)) == "skipped: not for this processor"
