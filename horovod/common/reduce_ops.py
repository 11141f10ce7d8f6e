"""The reductions, and how the arguments of all bindings name one."""

from horovod.common.basics import basics
from horovod.common.util import get_average_backwards_compatibility_fun

Average: int = basics.Average
Sum: int = basics.Sum
Adasum: int = basics.Adasum
Min: int = basics.Min
Max: int = basics.Max
Product: int = basics.Product

ALL = frozenset((Average, Sum, Adasum, Min, Max, Product))

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(basics)


def reduce_op(op: int | None, average: bool | None) -> int:
    """The reduction that these two arguments ask for.

    Raises:
        ValueError: Both were given, or there is no such op.
    """
    if average is not None or op is None:
        op = handle_average_backwards_compatibility(op, average)
    if op not in ALL:
        raise ValueError(f"unknown op {op!r}; expected Average, Sum, Adasum, Min, Max or Product.")
    return op
