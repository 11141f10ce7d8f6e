"""State that all ranks shall have from one of them: variables and objects."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common import objects
from horovod.common.agreement import require_same
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.autograph import as_written
from horovod.tensorflow.mpi_ops import broadcast_
from horovod.tensorflow.util import description, reference


@as_written
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Gives variables the root's values.

    Args:
        variables: Variables of TensorFlow or Keras, the same on all ranks, in the same order.
        root_rank: The global rank whose values are sent.
        process_set: The ranks that take part.
        inplace: Makes no difference: all of them are sent together anyway.

    Returns:
        None when run eagerly, otherwise the operation that does it.

    Raises:
        ValueError: The ranks have different variables (run eagerly; it says which).
        tf.errors.FailedPreconditionError: The same, in a graph; or Horovod is not initialized.
        tf.errors.UnknownError: A rank was lost, or Horovod was shut down.
    """
    distinct = list({reference(variable): variable for variable in variables}.values())
    if not tf.executing_eagerly():
        return tf.group(*broadcast_(distinct, root_rank, "broadcast_variables", process_set))
    require_same("broadcast_variables", [description(variable) for variable in distinct], process_set)
    broadcast_(distinct, root_rank, "broadcast_variables", process_set)
    return None


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that gives all global variables of the current graph (of TensorFlow 1) the root's values.

    Raises:
        RuntimeError: There is no such graph: TensorFlow runs eagerly.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution, which has no collection of variables. "
            "Use hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all global variables the root's values as soon as a session has been made, or restored.

    Args:
        root_rank: The rank whose values are sent.
        device: Where the operation is to be run.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Keeps the arguments."""
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)


# Objects don't go through TensorFlow: there is nothing to run in a session.


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank of the set.

    Args:
        obj: The object; only the root's matters.
        root_rank: The global rank whose object is sent.
        session: Not needed.
        name: Name of the operation, the same on all ranks.
        process_set: The ranks that take part.

    Raises:
        ValueError: The root is not a member of the set.
        HorovodInternalError: A rank was lost.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns a function that returns the root's object: see broadcast_object."""

    def send(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return send


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks of the set, in rank order: see broadcast_object."""
    return objects.allgather_object(obj, name, process_set)
