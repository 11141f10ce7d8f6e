"""Tests for which something of this machine is missing: left out, but not in CI, where nobody would notice."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def skip(reason: str, *, can_be_had: bool = True) -> NoReturn:
    """Skips a test; where CI is set in the environment, fails it.

    Args:
        reason: What is missing, and what would bring it.
        can_be_had: Whether it can be brought: what there is not for this machine is no fault of CI.
    """
    if os.environ.get("CI") and can_be_had:
        pytest.fail(f"{reason}. In CI that is no reason to leave a test out.", pytrace=False)
    pytest.skip(reason)


def import_or_skip(name: str) -> Any:
    """A module that the tests need; without it, as `skip`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        skip(f"not installed: {error.name}, which the extra `test` has")
