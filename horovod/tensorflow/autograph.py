"""AutoGraph, which rewrites the Python code that a tf.function calls, is not for this package's own code."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """A decorator for what users call in a tf.function: AutoGraph leaves it, and what it calls, as it is written.

    There is nothing in it to rewrite, and to find that out would take two seconds of a script's first step.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))
