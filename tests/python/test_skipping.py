"""What is missing on a machine: a reason to leave a test out for a user, a failure in CI."""

from __future__ import annotations

import pytest
from machines import machines
from skipping import import_or_skip, skip


@pytest.fixture(params=["", "true"])
def outcome(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """How a test ends that something is missing for: on a user's machine, and in CI."""
    monkeypatch.setenv("CI", request.param)
    return pytest.fail.Exception if request.param else pytest.skip.Exception


def test_machines_that_can_not_be_made(
    outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(outcome, match="machines of namespaces need root"), machines(1, tmp_path_factory.mktemp("one")):
        pass


def test_a_python_package_that_is_not_installed(outcome: type[BaseException]) -> None:
    with pytest.raises(outcome, match="not installed: no_such_package"):
        import_or_skip("no_such_package")


@pytest.mark.usefixtures("outcome")
def test_what_can_not_be_had_is_never_a_failure() -> None:
    with pytest.raises(pytest.skip.Exception, match="not for this processor"):
        skip("not for this processor", can_be_had=False)
