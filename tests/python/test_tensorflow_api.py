"""The names, arguments and defaults of the existing horovod.tensorflow and horovod.keras are all here."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import horovod.tensorflow as hvd

# A line for each symbol: the module, the name, and of functions and constructors the arguments, without types.
_FILE = Path(__file__).with_name("existing_tensorflow_api.txt")
EXISTING = [line.split(" ", 1) for line in _FILE.read_text().splitlines()]


def _text(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    named = {id(hvd.global_process_set): "global_process_set", id(hvd.Compression.none): "Compression.none"}
    if parameter.name == "op" and parameter.default == hvd.Average:
        return "Average"
    return named.get(id(parameter.default), repr(parameter.default))


@pytest.mark.parametrize(("module", "symbol"), EXISTING, ids=[f"{m}.{s.partition('(')[0]}" for m, s in EXISTING])
def test_it_has_the_arguments_of_the_existing_one(module: str, symbol: str) -> None:
    name, _, text = symbol.partition("(")
    value: Any = getattr(importlib.import_module(module), name)
    if not text:
        return
    want = [argument.partition("=") for argument in text.removesuffix(")").split(", ") if argument]
    found = [
        (str(p).partition(":")[0].partition("=")[0], _text(p)) for p in inspect.signature(value).parameters.values()
    ]
    assert [argument for argument, _ in found][: len(want)] == [argument for argument, _, _ in want]
    for (argument, default), (_, _, existing) in zip(found, want, strict=False):
        # An argument may have got a default.
        assert not existing or default == existing, argument
    assert all(default for _, default in found[len(want) :]), "a new argument without a default"


@pytest.mark.parametrize("module", sorted({module for module, _ in EXISTING}))
def test_everything_that_is_exported_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), f"{module}.{name}"
