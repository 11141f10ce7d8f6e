"""The names of an optimizer's parameters: what matches their gradients with those of the other ranks."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


def names_by_parameter(named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str]:
    """Checks what the user gave as named_parameters and turns it around.

    Returns:
        The name of every parameter, empty if nothing was given. A parameter that was given twice has its first name.

    Raises:
        ValueError: Not pairs of a name and a tensor, or a name that is given twice.
    """
    pairs = [] if named_parameters is None else list(named_parameters)
    for pair in pairs:
        if not _is_named_parameter(pair):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                f"model.named_parameters(); it holds {_short(pair)}."
            )
    duplicates = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names: dict[torch.Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    return names


def name_group(number: int, group: dict[str, Any], given: dict[torch.Tensor, str]) -> list[tuple[str, torch.Tensor]]:
    """Names the parameters of one parameter group of an optimizer.

    The name is what the user gave, else what the optimizer was given (torch.optim.SGD(model.named_parameters())), else
    the position and shape: with the shape in it, several unnamed models in turn do not undo each other's agreements.
    """
    own_names = group.get("param_names")
    named = []
    for index, parameter in enumerate(group["params"]):
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        default = own_names[index] if own_names else f"parameter.{number}.{index}.{shape}"
        named.append((given.get(parameter, default), parameter))
    return named


def check_all_named(param_groups: Iterable[dict[str, Any]], given: dict[torch.Tensor, str]) -> None:
    """Fails unless the user has named every parameter of the optimizer, or none.

    Raises:
        ValueError: Some have names and some have none.
    """
    if not given:
        return
    unnamed = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in given
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed)}. Give the named_parameters() of all models whose parameters the optimizer has."
        )


def _is_named_parameter(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)


def _short(value: object) -> str:
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."
