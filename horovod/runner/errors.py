"""Errors that are the user's to correct."""

from __future__ import annotations


class UsageError(Exception):
    """Input that can't be used: shown as one line, exit code 2."""

    def __str__(self) -> str:
        """The message on one line, whatever its source (YAML's messages have several)."""
        return " ".join(super().__str__().split())
