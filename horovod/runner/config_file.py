"""The YAML file of --config-file.

    controller: gloo
    params:
      fusion_threshold_mb: 64
    logging:
      level: DEBUG

Sections and keys are those of `tunables.TUNABLES`, and `controller`. An unknown one is an error: a misspelt setting
that is silently left out costs more than the message. `null` is no setting.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from horovod.runner.errors import UsageError
from horovod.runner.tunables import SECTIONS, TUNABLES, Tunable, cores, log_level, share

_BY_KEY = {(tunable.section, tunable.key): tunable for tunable in TUNABLES}
_CONTROLLERS = ("gloo", "mpi")

# What YAML has to have made of a value, and how to say so.
_EXPECTED: dict[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    share: ((int, float), "a number"),
    str: ((str,), "text"),
    log_level: ((str,), "text"),
    cores: ((int, str), "a core number or a comma-separated list"),
}


def _load(path: str) -> dict[object, Any]:
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config-file: can't read {path}: {error.strerror}") from None
    except Exception as error:  # PyYAML has errors of its own, but lets those of e.g. a 31st of June through
        raise UsageError(f"--config-file: {path} is not YAML: {str(error) or type(error).__name__}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"--config-file: {path}: expected sections ({', '.join(SECTIONS)}), got {document!r}")
    return document


def _setting(path: str, tunable: Tunable, value: object) -> Any:
    types, expected = _EXPECTED[tunable.type]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"--config-file: {path}: {tunable.section}.{tunable.key} must be {expected}, not {value!r}")
    try:
        return tunable.type(value)
    except (ValueError, OverflowError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--config-file: {path}: {tunable.section}.{tunable.key}: {error}") from None


def read_config_file(path: str) -> tuple[dict[str, Any], str | None]:
    """Read a configuration file.

    Returns:
        Settings by attribute name (`Tunable.name`), and the controller, if the file names one.

    Raises:
        UsageError: The file can't be read, or has something in it that is not a setting.
    """
    settings: dict[str, Any] = {}
    controller = None
    for section, content in _load(path).items():
        if content is None:
            continue
        if section == "controller":
            controller = str(content).lower()
            if controller not in _CONTROLLERS:
                raise UsageError(f"--config-file: {path}: No such controller supported: {content}")
            continue
        if section not in SECTIONS:
            known = ", ".join(["controller", *SECTIONS])
            raise UsageError(f"--config-file: {path}: unknown section '{section}' (there are: {known})")
        if not isinstance(content, dict):
            raise UsageError(f"--config-file: {path}: section {section} must hold keys and values, not {content!r}")
        for key, value in content.items():
            tunable = _BY_KEY.get((section, key))
            if tunable is None:
                known = ", ".join(t.key for t in TUNABLES if t.section == section)
                raise UsageError(
                    f"--config-file: {path}: unknown key '{key}' in section {section} (there are: {known})"
                )
            if value is not None:
                settings[tunable.name] = _setting(path, tunable, value)
    return settings, controller
