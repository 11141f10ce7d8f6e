"""Process sets: groups of ranks that run collectives among themselves.

The global set (id 0) holds all ranks. Further sets are given to init(process_sets=[...]), the same on every rank, and
get the ids 1, 2, ... in that order. shutdown takes the ids away again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

GLOBAL_ID = 0

# This process's rank while the engine runs.
_own_rank: int | None = None
# Every object that has an id, the global set's included. Several objects may stand for one set.
_registered: list["ProcessSet"] = []


class ProcessSet:
    """Some of the ranks, who run collectives together.

    Attributes:
        process_set_id: The set's number, None while the set is not registered with a running engine.
        ranks: The members' global ranks, ascending.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Makes a set to be given to init(process_sets=[...]).

        Args:
            ranks_or_comm: The members' global ranks, in any order. Communicators of mpi4py need MPI and are refused.

        Raises:
            ValueError: Not a sequence of distinct ranks.
        """
        if hasattr(ranks_or_comm, "Get_rank"):
            raise ValueError("ProcessSet: this version has no MPI and takes a list of ranks, not an MPI communicator.")
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
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


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
    """Would register a set after init, which this version can't.

    Raises:
        NotImplementedError: Always; it says what to do instead.
    """
    raise NotImplementedError(
        f"add_process_set({process_set}): this version can't add process sets after init. "
        "Give them all to hvd.init(process_sets=[...])."
    )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, which this version can't; False for the global set or one that is not registered.

    Raises:
        NotImplementedError: The set is registered.
    """
    if process_set.process_set_id in (None, GLOBAL_ID):
        return False
    raise NotImplementedError(
        f"remove_process_set({process_set}): this version can't remove process sets before shutdown. "
        "Sets are given to hvd.init(process_sets=[...]); one that is not used costs nothing."
    )


def require_id(process_set: ProcessSet) -> int:
    """Returns the set's id.

    Raises:
        ValueError: The set is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered. Give it to hvd.init(process_sets=[...]) on every rank.")
    return process_set.process_set_id


# ---- For init and shutdown -------------------------------------------------------------------------------------------


def check_static_sets(process_sets: Any, size: int) -> list[list[int]]:
    """Checks the argument of init and returns the ranks of each set.

    Raises:
        ValueError: Not a sequence of sets, an invalid rank, or a set that is given twice.
        NotImplementedError: Dynamic process sets.
    """
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":
            raise NotImplementedError(
                'init(process_sets="dynamic"): this version has no dynamic process sets. '
                "Give all sets to hvd.init(process_sets=[...])."
            )
        raise ValueError(f"init: expected a list of process sets, got {process_sets!r}.")
    checked: list[list[int]] = []
    for index, process_set in enumerate(process_sets):
        entry = f"process_sets[{index}] = {process_set}"
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"init: {entry}: expected a ProcessSet.")
        ranks = list(range(size)) if process_set is global_process_set else (process_set.ranks or [])
        if not ranks:
            raise ValueError(f"init: {entry}: a process set needs at least one rank.")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"init: {entry}: a rank is given more than once.")
        invalid = [rank for rank in ranks if not 0 <= rank < size]
        if invalid:
            raise ValueError(f"init: {entry}: invalid rank {invalid[0]}, the job has the ranks 0 to {size - 1}.")
        if len(ranks) == size:
            raise ValueError(f"init: {entry}: duplicate of the global process set, which always exists.")
        if ranks in checked:
            raise ValueError(f"init: {entry}: duplicate of process_sets[{checked.index(ranks)}].")
        checked.append(ranks)
    return checked


def register(process_sets: Sequence[ProcessSet], rank: int, size: int) -> None:
    """Gives the sets their ids, in order from 1."""
    global _own_rank  # noqa: PLW0603
    _own_rank = rank
    global_process_set.ranks = list(range(size))
    for index, process_set in enumerate(process_sets):
        process_set.process_set_id = index + 1
        _registered.append(process_set)


def invalidate() -> None:
    """Takes the ids away from all sets: the engine that knew them is gone."""
    global _own_rank  # noqa: PLW0603
    _own_rank = None
    global_process_set.ranks = None
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()
