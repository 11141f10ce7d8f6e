"""Operations without data, by which ranks wait for each other."""

from horovod import _core
from horovod.common import names
from horovod.common.process_sets import GLOBAL_ID, ProcessSet, global_process_set, require_id


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. Pending operations need not have ended.

    Raises:
        ValueError: Another thread of this rank is in a barrier of this set.
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    wait_for_all(require_id(process_set))


def wait_for_all(set_id: int) -> None:
    """The barrier of the set with this id."""
    _core.run(_core.BARRIER, "barrier.noname", _core.UINT8, (), 0, 0, _core.SUM, 0, set_id, 1.0, 1.0, None, None)


def join() -> int:
    """Says that this rank has no more data, and returns when every rank has said so.

    Until then the others' allreduces, allgathers and alltoalls go on: this rank takes part without contributing
    anything, though an Average is still divided by the number of all ranks. A broadcast or reducescatter needs all
    ranks, and fails where it is called.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: A rank was lost, or Horovod is not running.
    """
    last: int = _core.run(
        _core.JOIN, "join.noname", _core.UINT8, (), 0, 0, _core.SUM, 0, GLOBAL_ID, 1.0, 1.0, None, None
    )
    # The ranks that joined early have counted fewer unnamed operations.
    names.restart_counting()
    return last
