"""Names of operations in TensorFlow: what matches an operation of one rank with those of the others.

    <scopes>/<name>                          in a graph, with the name scopes around it; else without
    allreduce.<function>/<scopes>/noname     one without a name, in a tf.function
    allreduce.noname                         one without a name that is run eagerly: there is only one at a time

What an operation does is not part of a name that the user has given: where ranks do different things by the same name,
the engine says so, instead of waiting for the other ranks of each.

Within a graph a name that is there already gets a number. So what is in one graph can be under way at the same time,
and ranks may run it in any order; they may build it in any order too, if all of it has names. (TensorFlow's own names
of tensors are no help: some have numbers in them that differ between processes.)
"""

import re
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

_used: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()


def operation_name(kind: str, name: str | None, *, ignore_name_scope: bool = False) -> str:
    """The name under which the ranks agree on an operation.

    Args:
        kind: What it does, e.g. "allreduce".
        name: What the user has called it.
        ignore_name_scope: Leave out the name scopes of a graph.

    Raises:
        NotImplementedError: It would be compiled by XLA.
    """
    if tf.executing_eagerly():
        return name or f"{kind}.noname"
    graph = tf.compat.v1.get_default_graph()
    # Functions of loops and branches have numbers at the end of their names, which differ between processes.
    function = "" if name else re.sub(r"[_\d]+$", "", getattr(graph, "name", ""))
    scope = "" if ignore_name_scope else graph.get_name_scope()
    path = "/".join(filter(None, (function, scope, name or "noname")))
    return unique_name(path if name else f"{kind}.{path}")


def unique_name(name: str) -> str:
    """The name, with a number at its end if the graph that is being built has it already.

    Raises:
        NotImplementedError: The graph will be compiled by XLA.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise NotImplementedError(
            f"{name}: Horovod's operations can't be compiled by XLA in this version. Leave out jit_compile=True: of "
            "tf.function, or of model.compile(jit_compile=False)."
        )
    counts = _used.setdefault(graph, Counter())
    number = counts[name]
    counts[name] += 1
    return f"{name}_{number}" if number else name
