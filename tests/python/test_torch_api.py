"""The names, arguments and defaults of the existing horovod.torch are all here."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod.torch as hvd

# A line for each symbol: the module, the name, and of functions and constructors the arguments, without types.
EXISTING = [line.split(" ", 1) for line in Path(__file__).with_name("existing_torch_api.txt").read_text().splitlines()]


def arguments(function: Any) -> list[tuple[str, str]]:
    """Names and defaults as text."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else _text(parameter, parameter.default)
        found.append((star + parameter.name, default))
    return found


def _text(parameter: inspect.Parameter, default: Any) -> str:
    named = {id(hvd.global_process_set): "global_process_set", id(hvd.Compression.none): "Compression.none"}
    if parameter.name == "op" and default == hvd.Average:
        return "Average"
    return named.get(id(default), repr(default))


@pytest.mark.parametrize(("module", "symbol"), EXISTING, ids=[symbol.partition("(")[0] for _, symbol in EXISTING])
def test_it_has_the_arguments_of_the_existing_one(module: str, symbol: str) -> None:
    name, _, text = symbol.partition("(")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    if not text:
        return
    want = [argument.partition("=") for argument in text.removesuffix(")").split(", ") if argument not in ("", "self")]
    found = arguments(value)
    assert [argument for argument, _ in found][: len(want)] == [argument for argument, _, _ in want]
    for (argument, default), (_, _, existing) in zip(found, want, strict=False):
        # An argument may have got a default.
        assert not existing or default == existing, argument
    assert all(default for _, default in found[len(want) :]), "a new argument without a default"


def test_everything_that_is_exported_exists() -> None:
    for module in {module for module, _ in EXISTING}:
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", ()):
            assert hasattr(loaded, name), f"{module}.{name}"


def test_the_other_bindings_do_not_import_torch() -> None:
    program = "import sys, horovod.numpy, horovod.runner.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
