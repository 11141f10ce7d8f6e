"""Functions of the existing horovod.common.util that have a meaning without per-framework extensions."""

import contextlib
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class ReduceOps(Protocol):
    """Anything that carries the reduce ops as attributes, e.g. HorovodBasics."""

    @property
    def Average(self) -> int:  # noqa: D102
        ...

    @property
    def Sum(self) -> int:  # noqa: D102
        ...


def get_average_backwards_compatibility_fun(reduce_ops: ReduceOps) -> Callable[[int | None, bool | None], int]:
    """Returns the function that maps the arguments (op, average) to a reduce op."""
    default, plain_sum = reduce_ops.Average, reduce_ops.Sum

    def handle_average(op: int | None, average: bool | None) -> int:
        if average is None:
            return default if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
        return default if average else plain_sum

    return handle_average


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables for the time of a block; those given as None are left alone."""
    changes = {key: value for key, value in kwargs.items() if value is not None}
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def split_list(items: Sequence[_T], n: int) -> list[Sequence[_T]]:
    """Splits a list into n consecutive parts whose lengths differ by at most one, the longer ones first."""
    if n <= 0:
        raise ValueError(f"expected a positive number of parts, got {n}")
    length, longer = divmod(len(items), n)
    starts = [i * length + min(i, longer) for i in range(n + 1)]
    return [items[starts[i] : starts[i + 1]] for i in range(n)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a positive power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    """Whether iter(x) works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or later; only the leading three numbers are compared."""
    parts = target.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"expected a target version of three numbers such as 1.2.3, got {target!r}")
    numbers = [int(number) for number in re.findall(r"(?:^|\.)(\d+)", ver.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers))) >= tuple(int(part) for part in parts)


def get_ext_suffix() -> str:
    """The file suffix of Python extension modules on this interpreter."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))
