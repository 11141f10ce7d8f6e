"""Process sets: groups of ranks that run collectives among themselves.

The global set (id 0) holds all ranks. Further sets are given to init(process_sets=[...]), the same on every rank, and
get the ids 1, 2, ... in that order; or they are added and removed later, by all ranks together. The id of a removed set
goes to the next one that is added. shutdown takes all ids away.

Every rank knows every set, also those that it is no member of: so all find the same mistakes without asking.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from horovod import _core
from horovod.common import names

GLOBAL_ID = 0

# This process's rank while the engine runs.
_own_rank: int | None = None
# The ranks of every set but the global one, by id.
_ranks_by_id: dict[int, list[int]] = {}
# Every object that has such an id. Several objects may stand for one set.
_registered: list["ProcessSet"] = []


class ProcessSet:
    """Some of the ranks, who run collectives together.

    Attributes:
        process_set_id: The set's number, None while the set is not registered with a running engine.
        ranks: The members' global ranks, ascending; of a communicator known from init on.
        mpi_comm: The communicator that the set was made of, if it was.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        """Makes a set to be given to init(process_sets=[...]) or to add_process_set.

        Args:
            ranks_or_comm: The members' global ranks, in any order; or a communicator of mpi4py, for init only.

        Raises:
            ValueError: Not a sequence of distinct ranks.
        """
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = sorted(int(rank) for rank in _ints_only(ranks_or_comm))
        except TypeError:
            raise ValueError(f"ProcessSet: expected a list of ranks, got {ranks_or_comm!r}.") from None
        self.ranks = ranks

    def included(self) -> bool | None:
        """Whether this process is a member; None while Horovod is not initialized."""
        if self.ranks is None or _own_rank is None:
            return None
        return _own_rank in self.ranks

    def size(self) -> int | None:
        """The number of members; None while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's position among the members; None while the set is not registered.

        Raises:
            ValueError: This process is not a member.
        """
        if self.process_set_id is None or self.ranks is None or _own_rank is None:
            return None
        if _own_rank not in self.ranks:
            raise ValueError(f"Rank {_own_rank} is not a member of {self}.")
        return self.ranks.index(_own_rank)

    def __str__(self) -> str:
        """As the existing Horovod writes it."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def is_communicator(value: Any) -> bool:
    """Whether it is a communicator of mpi4py, which need not be installed."""
    return hasattr(value, "Is_inter")  # groups and windows have ranks and sizes too


def _ints_only(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        # numpy's integers are welcome, 1.5 and "1" are not.
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(value)
        yield value


def _make_global_set() -> ProcessSet:
    process_set = ProcessSet([])
    process_set.process_set_id = GLOBAL_ID
    process_set.ranks = None
    return process_set


global_process_set = _make_global_set()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set after init. Every rank of the job must call it, with the same ranks.

    Args:
        process_set: A set that is not registered yet, or the ranks of one.

    Returns:
        The set, which now has an id.

    Raises:
        ValueError: An invalid rank, or a set that exists already; nothing was started.
        NotImplementedError: The set is made of a communicator: only init takes these.
        HorovodMismatchError: The ranks have called it with different sets. The job goes on.
        HorovodInternalError: A rank was lost, or there are too many sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    what = f"add_process_set: {process_set}"
    if process_set.mpi_comm is not None:
        raise NotImplementedError(f"{what}: only hvd.init(process_sets=[...]) takes communicators.")
    if global_process_set.ranks is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    ranks = _checked_ranks(process_set, len(global_process_set.ranks), what)
    for set_id, existing in _ranks_by_id.items():
        if existing == ranks:
            raise ValueError(f"{what}: duplicate of the process set with the id {set_id}, which has the same ranks.")
    set_id = _change(_core.ADD_PROCESS_SET, 0, ranks)
    names.restart_counting(set_id)
    _ranks_by_id[set_id] = ranks
    _give_id(process_set, set_id)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, and takes the id from all objects that stand for it. Every rank of the job must call it.

    Returns:
        Whether it was removed: False for the global set and for one that is not registered.

    Raises:
        HorovodMismatchError: The ranks have called it with different sets. The job goes on.
        HorovodInternalError: A rank was lost.
    """
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL_ID:
        return False
    _change(_core.REMOVE_PROCESS_SET, set_id, None)
    _ranks_by_id.pop(set_id, None)
    for known in [known for known in _registered if known.process_set_id == set_id]:
        known.process_set_id = None
        _registered.remove(known)
    return True


def _change(op: int, set_id: int, ranks: list[int] | None) -> Any:
    # One name for both: ranks of which one adds and another removes disagree, and don't wait for each other.
    return _core.run(
        op, "process_set", _core.UINT8, (), 0, 0, _core.SUM, set_id, GLOBAL_ID, 1.0, 1.0, None, None, ranks
    )


def require_id(process_set: ProcessSet) -> int:
    """Returns the set's id.

    Raises:
        ValueError: The set is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(
            f"{process_set} is not registered. Give it to hvd.init(process_sets=[...]) or hvd.add_process_set on every "
            "rank."
        )
    return process_set.process_set_id


def position_in(set_id: int) -> int:
    """This rank's position among the members of the registered set with this id."""
    if _own_rank is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _own_rank if set_id == GLOBAL_ID else _ranks_by_id[set_id].index(_own_rank)


def own_share(rows: int, process_set: ProcessSet) -> int:
    """How many rows of a reducescatter are this rank's: of n the r-th of s ranks gets n / s, and one more if r < n % s.

    Of a set that this rank is no member of, all: the engine will refuse it.
    """
    if not process_set.ranks or not process_set.included():
        return rows
    share, longer = divmod(rows, len(process_set.ranks))
    return share + (1 if process_set.rank() < longer else 0)  # type: ignore[operator]


def _checked_ranks(process_set: ProcessSet, size: int, what: str) -> list[int]:
    """The ranks of a set that could be registered."""
    ranks = list(range(size)) if process_set is global_process_set else (process_set.ranks or [])
    if not ranks:
        raise ValueError(f"{what}: a process set needs at least one rank.")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"{what}: a rank is given more than once.")
    invalid = [rank for rank in ranks if not 0 <= rank < size]
    if invalid:
        raise ValueError(f"{what}: invalid rank {invalid[0]}, the job has the ranks 0 to {size - 1}.")
    if len(ranks) == size:
        raise ValueError(f"{what}: duplicate of the global process set, which always exists.")
    return ranks


def _give_id(process_set: ProcessSet, set_id: int) -> None:
    process_set.process_set_id = set_id
    if not any(known is process_set for known in _registered):
        _registered.append(process_set)


# ---- For init and shutdown -------------------------------------------------------------------------------------------


def static_sets(process_sets: Any) -> list[ProcessSet]:
    """The sets that the argument of init asks for: none of them if it is "dynamic", which sets always are here.

    Raises:
        ValueError: Not a sequence of sets.
    """
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":
            return []
        raise ValueError(f'init: expected a list of process sets or "dynamic", got {process_sets!r}.')
    sets = list(process_sets)
    for index, process_set in enumerate(sets):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"init: process_sets[{index}] = {process_set}: expected a ProcessSet.")
    return sets


def check_static_sets(process_sets: Sequence[ProcessSet], size: int) -> list[list[int]]:
    """Checks the sets for init and returns the ranks of each.

    Raises:
        ValueError: An invalid rank, or a set that is given twice.
    """
    checked: list[list[int]] = []
    for index, process_set in enumerate(process_sets):
        what = f"init: process_sets[{index}] = {process_set}"
        ranks = _checked_ranks(process_set, size, what)
        if ranks in checked:
            raise ValueError(f"{what}: duplicate of process_sets[{checked.index(ranks)}].")
        checked.append(ranks)
    return checked


def register(process_sets: Sequence[ProcessSet], rank: int, size: int) -> None:
    """Gives the sets of init their ids, in order from 1."""
    global _own_rank  # noqa: PLW0603
    _own_rank = rank
    global_process_set.ranks = list(range(size))
    for set_id, process_set in enumerate(process_sets, 1):
        _ranks_by_id[set_id] = list(process_set.ranks or [])
        _give_id(process_set, set_id)


def register_again(process_sets: Sequence[ProcessSet], ranks_of_sets: list[list[int]]) -> None:
    """Has further objects stand for sets that exist: for an init while Horovod runs.

    Raises:
        ValueError: There are other sets than these.
    """
    existing = [_ranks_by_id[set_id] for set_id in sorted(_ranks_by_id)]
    if sorted(ranks_of_sets) != sorted(existing):
        raise ValueError(
            f"init: Horovod runs already, with the process sets {existing}; it can't be given {ranks_of_sets} before "
            "hvd.shutdown(). To add or remove one use hvd.add_process_set and hvd.remove_process_set."
        )
    ids = {tuple(ranks): set_id for set_id, ranks in _ranks_by_id.items()}
    for process_set, ranks in zip(process_sets, ranks_of_sets, strict=True):
        _give_id(process_set, ids[tuple(ranks)])


def invalidate() -> None:
    """Takes the ids away from all sets: the engine that knew them is gone."""
    global _own_rank  # noqa: PLW0603
    _own_rank = None
    global_process_set.ranks = None
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()
    _ranks_by_id.clear()
