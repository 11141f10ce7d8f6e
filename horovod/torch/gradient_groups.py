"""Groups of parameters whose gradients are reduced together, when all of them are there."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod.common.util import split_list

Groups = int | list[list[torch.Tensor]]

_EXPECTED = "groups should be a non-negative integer or a list of list of torch.Tensor."


def check_groups(groups: Any) -> None:
    """Fails unless `groups` is None, a positive number, or lists of tensors none of which is in two of them.

    Raises:
        ValueError: It is something else.
    """
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise ValueError(f"{_EXPECTED} It is {groups}: for no groups leave it out.")
        return
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"{_EXPECTED} It is {_kind(groups)}.")
    seen: set[torch.Tensor] = set()
    for number, group in enumerate(groups):
        for tensor in group:
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{_EXPECTED} groups[{number}] holds {_kind(tensor)}.")
            if tensor in seen:
                raise ValueError(f"groups[{number}] holds a parameter that is in another group, or in this one twice.")
            seen.add(tensor)


def group_numbers(groups: Groups | None, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Which group each parameter belongs to; one that is missing here is reduced by itself.

    Args:
        groups: As check_groups accepts them. A number makes that many groups of neighbours.
        parameters: All parameters of the optimizer, in its order.
    """
    if groups is None:
        return {}
    parts: Iterable[Sequence[torch.Tensor]]
    if isinstance(groups, int):
        parts = split_list([parameter for parameter in parameters if parameter.requires_grad], groups)
    else:
        known = set(parameters)
        parts = [[parameter for parameter in group if parameter in known] for group in groups]
    return {parameter: number for number, part in enumerate(parts) for parameter in part}


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
