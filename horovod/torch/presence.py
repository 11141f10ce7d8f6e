"""How the ranks agree, once a step, on which parameters have a gradient somewhere.

A rank starts the reduction of a gradient when it appears. A parameter that a rank has not used has no gradient there;
if another rank has one, this rank must contribute zeros, or the other waits for ever. If no rank has one, none may
start it, so that it stays None, as with one process. And a rank can't know by itself what the others have.

So every rank takes part in a small allreduce at the end of every backward pass, whatever it has itself:

1. **The meeting.** Each rank hashes its model (names, shapes, data types, groups) together with its pattern (for each
   parameter: no gradient, a dense one, a sparse one) to three numbers q of 24 bits, and contributes 1 and every q and
   q * q. From the sums k, Q and S each rank computes whether k * S = Q * Q, which is so if and only if all k ranks have
   the same q (Cauchy and Schwarz; nothing overflows up to 2^15 ranks). All compute it from the same numbers, so all
   come to the same decision. If all are the same, every gradient was started by all ranks or by none: done. This is
   every step of most programs, also of those with unused or sparse parameters, and costs 56 bytes: a message of the
   smallest kind.
2. **The patterns.** Otherwise all ranks add up vectors with one number a parameter: how many have a dense gradient, and
   2^32 times how many have a sparse one. Now all know what exists anywhere; who has not started it adds zeros, or no
   rows. A gradient is then started by all or by none again.
3. **The models**, if they differ: each rank's description is gathered, and all raise the same error, which says which
   parameter it is.

It can't hang: whether a rank takes part in 1 depends on nothing but that it has come to the end of the step, and in 2
and 3 on sums that are the same everywhere. The meeting comes before any wait for a gradient, so that no rank waits for
one which the others do not have. Ranks that have joined contribute zeros and are not counted in k.

One name serves all optimizers of a process set, since a name made from the model would never match if the models
differ. So the optimizers of one set are to be stepped by one thread at a time, in the same order on all ranks.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from horovod import _core
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodMismatchError
from horovod.common.objects import allgather_object
from horovod.common.process_sets import ProcessSet, require_id

NONE, DENSE, SPARSE = 0, 1, 2
_PIECES, _PIECE_BYTES = 3, 3
_SPARSE_UNIT = 1 << 32
_ADDED = (0, 1, _SPARSE_UNIT)  # by kind

_MEETING = "allreduce.DistributedOptimizer.meeting"
_PATTERNS = "allreduce.DistributedOptimizer.patterns"


@dataclass(frozen=True)
class Description:
    """What must be the same on all ranks about one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense gradients are reduced as they lie in memory
    dtype: str
    group: int | None  # the number of the group in which it is reduced

    def __str__(self) -> str:
        """For an error: what a user would look for first."""
        grouped = "" if self.group is None else f", reduced in group {self.group}"
        return f"{self.dtype}, shape {list(self.shape)}, strides {list(self.stride)}{grouped}"


class Presence:
    """The agreement of the ranks of a set on the gradients of one model."""

    def __init__(self, descriptions: Sequence[Description], process_set: ProcessSet) -> None:
        """Keeps the model's description; the order of the parameters must be the same on all ranks."""
        self._descriptions = list(descriptions)
        self._process_set = process_set
        self._model = hashlib.blake2b(repr(self._descriptions).encode(), digest_size=16).digest()
        self._usual_pattern = bytes([DENSE]) * len(self._descriptions)
        self._usual_words = self._words(self._usual_pattern)

    def agree(self, pattern: bytes | None) -> list[tuple[bool, bool]] | None:
        """Finds out which gradients exist on any rank. Every rank of the set calls it, once a step.

        Args:
            pattern: For each parameter the kind of its gradient on this rank; None: all are dense.

        Returns:
            None if all ranks have the same pattern. Otherwise, for each parameter, whether a rank has a dense gradient
            for it, and whether one has a sparse gradient.

        Raises:
            HorovodMismatchError: The models differ.
            HorovodInternalError: A rank was lost, or Horovod is not running.
        """
        words = array("q", self._usual_words if pattern is None else self._words(pattern))
        self._add(words, _MEETING)
        if _all_same(words):
            return None
        return self._combine(self._usual_pattern if pattern is None else pattern)

    def _combine(self, pattern: bytes) -> list[tuple[bool, bool]]:
        head = self._words(b"")
        sums = array("q", [*head, *(_ADDED[kind] for kind in pattern)])
        try:
            self._add(sums, _PATTERNS)
        except HorovodMismatchError:  # another number of parameters
            self._tell_the_difference()
        if not _all_same(sums):
            self._tell_the_difference()
        return [(total % _SPARSE_UNIT > 0, total >= _SPARSE_UNIT) for total in sums[len(head) :]]

    def _words(self, pattern: bytes) -> list[int]:
        """What this rank adds to the meeting: 1, then a piece of the hash and its square, for each piece."""
        digest = hashlib.blake2b(self._model + pattern, digest_size=_PIECES * _PIECE_BYTES).digest()
        words = [1]
        for start in range(0, len(digest), _PIECE_BYTES):
            piece = int.from_bytes(digest[start : start + _PIECE_BYTES], "little")
            words += [piece, piece * piece]
        return words

    def _add(self, words: "array[int]", name: str) -> None:
        set_id = require_id(self._process_set)
        _core.run_buffers(_core.ALLREDUCE, name, _core.INT64, words, words, _core.SUM, 0, set_id, 1.0, 1.0)

    def _tell_the_difference(self) -> None:
        """Raises on every rank the same error, with the first difference between the models of two ranks."""
        own = (basics.rank(), self._descriptions)
        models = allgather_object(own, name="DistributedOptimizer.models", process_set=self._process_set)
        first_rank, first = models[0]
        for rank, other in models[1:]:
            if other != first:
                raise HorovodMismatchError(_difference(first_rank, first, rank, other))
        raise HorovodMismatchError(
            "DistributedOptimizer: the ranks do not step the same optimizer at the same time. Step the optimizers of a "
            "process set in the same order on all ranks, in one thread."
        )


def _all_same(sums: "array[int]") -> bool:
    count = sums[0]
    return all(count * sums[i + 1] == sums[i] * sums[i] for i in range(1, 1 + 2 * _PIECES, 2))


def _difference(rank: int, model: list[Description], other_rank: int, other: list[Description]) -> str:
    what = "DistributedOptimizer: the ranks have different models:"
    advice = "Every rank must build the same model and give the same parameters to its optimizer."
    mine, theirs = ({parameter.name: parameter for parameter in one} for one in (model, other))
    for name, description in mine.items():
        if name not in theirs:
            return f"{what} parameter {name!r} ({description}) of rank {rank} is not on rank {other_rank}. {advice}"
        if theirs[name] != description:
            return (
                f"{what} parameter {name!r} is {description} on rank {rank}, and {theirs[name]} on rank {other_rank}. "
                f"{advice}"
            )
    name = next(name for name in theirs if name not in mine)
    return f"{what} parameter {name!r} ({theirs[name]}) of rank {other_rank} is not on rank {rank}. {advice}"
