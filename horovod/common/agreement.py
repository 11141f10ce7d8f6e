"""What all ranks must have alike, compared before it is used: a difference is an error on all of them, not a hang."""

from horovod.common.objects import allgather_object
from horovod.common.process_sets import ProcessSet, global_process_set


def require_same(what: str, lines: list[str], process_set: ProcessSet = global_process_set) -> None:
    """Compares descriptions between the ranks of a set, a line for each thing.

    Raises:
        ValueError: They differ; the text is the same on every rank and says where.
    """
    everyone: list[list[str]] = allgather_object(lines, name=f"{what}.agreement", process_set=process_set)
    ranks = process_set.ranks or range(len(everyone))
    for rank, other in zip(ranks, everyone, strict=True):
        if other == everyone[0]:
            continue
        missing = [line for line in everyone[0] if line not in other]
        surplus = [line for line in other if line not in everyone[0]]
        if not missing and not surplus:
            raise ValueError(f"{what}: ranks {ranks[0]} and {rank} have the same tensors in another order.")
        raise ValueError(
            f"{what}: the ranks have different models. Only on rank {ranks[0]}: {_some(missing)}; only on rank {rank}: "
            f"{_some(surplus)}. Build the same model on all ranks."
        )


def _some(lines: list[str], limit: int = 5) -> str:
    shown = ", ".join(lines[:limit]) or "nothing"
    return f"{shown} and {len(lines) - limit} more" if len(lines) > limit else shown
