"""What is measured: how the director names it to the ranks, and to the tables."""

import dataclasses
from typing import Any, Self

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
)
COLLECTIVES = (ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER)
TOGETHER = "400 tensors together"
TRAINING = "training step"

# Ways to do it. Those of one team run in the same processes.
HOROVOD, HOROVOD_TORCH, HOROVOD_SHARED = "horovod", "horovod.torch", "horovod, hvd_alloc"
GLOO, OPEN_MPI, MPICH = "gloo", "Open MPI", "MPICH"
LIMIT, LIMIT_OWN_PAGES, MEMCPY = "limit", "limit, own pages", "memcpy by all"
PEERS = (GLOO, OPEN_MPI, MPICH)
# This project, by what it encrypts: nothing, as it does by default, and as with HOROVOD_ENCRYPT=1.
IN_CLEAR, CONTROL_ENCRYPTED, ALL_ENCRYPTED = "in clear", "control encrypted", "all encrypted"
ENCRYPTION_WAYS = (IN_CLEAR, CONTROL_ENCRYPTED, ALL_ENCRYPTED)
ALONE, IN_STEP, DDP = "alone", "in step", "DDP, gloo"
STEP_WAYS = (ALONE, IN_STEP, HOROVOD, DDP)
ONE, ASYNC, GROUPED = "one tensor", "horovod, one by one", "horovod, grouped"
TORCH_ASYNC, TORCH_GROUPED, GLOO_ASYNC = "horovod.torch, one by one", "horovod.torch, grouped", "gloo, one by one"
TOGETHER_WAYS = (ONE, ASYNC, GROUPED, TORCH_ASYNC, TORCH_GROUPED, GLOO_ASYNC)

SMALL, LARGE, CNN, TRANSFORMER = "400 small tensors", "29 M parameters", "CNN", "transformer, 14 M"
MODELS = (SMALL, LARGE, CNN, TRANSFORMER)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One thing that is timed in several ways.

    Attributes:
        kind: A collective, TOGETHER or TRAINING.
        ranks: How many take part.
        bytes: Of the largest buffer of a rank: the input of a reducescatter, the result of an allgather.
        dtype: Of the elements.
        model: Of a training step.
        link: Between two hosts that share the ranks; "" if all ranks are on one.
    """

    kind: str
    ranks: int
    bytes: int = 0
    dtype: str = "float32"
    model: str = ""
    link: str = ""

    def to_message(self) -> dict[str, Any]:
        """For the ranks."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, fields: dict[str, Any]) -> Self:
        """The other way round."""
        return cls(**fields)
