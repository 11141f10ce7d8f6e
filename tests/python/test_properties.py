"""Examples that nobody has thought of: every operation, dtype, shape, set and factor, against NumPy, to the last bit.

hypothesis makes the examples, always the same ones. A group of processes runs many of them, in batches that are started
together and so are partly fused; when one fails, its description is the whole example.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from sweeps import MOVED, REDUCED, SUMS, Array, check, expected, make_sets, ops_for, own_rows, start, values

import horovod.numpy as hvd
from horovod.common.process_sets import ProcessSet

BATCHES = {"shm": 50, "tcp": 15, "mixed": 25}  # of each group of ranks
LONGEST_BATCH = 12


@dataclasses.dataclass(frozen=True)
class Example:
    """One operation of some ranks."""

    kind: str
    dtype: Any
    shape: tuple[int, ...]
    op: int
    ranks: tuple[int, ...]
    prescale: float
    postscale: float
    seed: int
    in_place: bool
    wait: bool  # before the next one is started


def factors(dtype: Any) -> st.SearchStrategy[float]:
    return st.just(1.0) if dtype is np.bool_ else st.sampled_from([1.0, 1.0, 0.5, 3.0, -1.0, 1 / 3, 0.0, 1e-3])


@st.composite
def examples(draw: st.DrawFn, sets: list[tuple[int, ...]]) -> Example:
    kind = draw(st.sampled_from(["allreduce", "allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]))
    reduces = kind in ("allreduce", "reducescatter")
    dtype = draw(st.sampled_from(REDUCED if reduces else MOVED))
    smallest = 0 if kind in ("allreduce", "broadcast") else 1
    shape: list[int] = draw(st.lists(st.integers(0, 6), min_size=smallest, max_size=3))
    large: int = draw(st.sampled_from([0, 0, 28, 29, 113, 600, 10_000]))
    if shape and large:
        shape[draw(st.integers(0, len(shape) - 1))] = large
    allowed = [op for op in ops_for(dtype) if kind == "allreduce" or op in SUMS] if reduces else [hvd.Sum]
    return Example(
        kind=kind,
        dtype=dtype,
        shape=tuple(shape),
        op=draw(st.sampled_from(allowed)),
        ranks=draw(st.sampled_from(sets)),
        prescale=draw(factors(dtype)) if reduces else 1.0,
        postscale=draw(factors(dtype)) if reduces else 1.0,
        seed=draw(st.integers(0, 2**20)),
        in_place=draw(st.booleans()),
        wait=draw(st.sampled_from([False, False, True])),
    )


def make_batches(size: int, count: int) -> list[list[Example]]:
    """The examples of a group, by hypothesis's own choice, which is a function of nothing but this code."""
    sets = [tuple(range(size)), *(tuple(one.ranks or ()) for one in make_sets(size))]
    batches: list[list[Example]] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(examples(sets), min_size=LONGEST_BATCH // 2, max_size=LONGEST_BATCH))
    def collect(batch: list[Example]) -> None:
        batches.append(batch)

    collect()
    return batches


class Case:
    """An example on one of its ranks: its inputs, its handle, what should come out."""

    def __init__(self, example: Example, name: str, members: ProcessSet) -> None:
        self.example, self.name, self.members = example, name, members
        self.position = example.ranks.index(hvd.rank())
        self.inputs = [self.input_of(position) for position in range(len(example.ranks))]
        self.own = self.inputs[self.position].copy()

    def input_of(self, position: int) -> Array:
        example = self.example
        shape = example.shape
        if example.kind == "allgather":  # another number of rows on every rank
            shape = ((shape[0] + position * (example.seed % 4)) % 40, *shape[1:])
        elif example.kind == "alltoall":
            shape = (int(self.splits(position).sum()) + example.seed % 2, *shape[1:])
        return values(example.dtype, shape, example.ranks[position], example.seed)

    def splits(self, position: int) -> Any:
        table = np.random.default_rng(self.example.seed).integers(0, 4, (len(self.example.ranks),) * 2)
        return table[position]

    def start(self) -> int:
        example, name, members = self.example, self.name, self.members
        reduction = {
            "op": example.op,
            "prescale_factor": example.prescale,
            "postscale_factor": example.postscale,
            "name": name,
            "process_set": members,
        }
        match example.kind:
            case "allreduce":
                allreduce = hvd.allreduce_async_ if example.in_place else hvd.allreduce_async
                return allreduce(self.own, **reduction)  # type: ignore[arg-type]
            case "reducescatter":
                return hvd.reducescatter_async(self.own, **reduction)  # type: ignore[arg-type]
            case "broadcast":
                broadcast = hvd.broadcast_async_ if example.in_place else hvd.broadcast_async
                return broadcast(self.own, self.root(), name=name, process_set=members)
            case "allgather":
                return hvd.allgather_async(self.own, name=name, process_set=members)
            case _:
                return hvd.alltoall_async(self.own, self.splits(self.position), name=name, process_set=members)

    def root(self) -> int:
        return self.example.ranks[self.example.seed % len(self.example.ranks)]

    def total(self) -> Array:
        example = self.example
        return expected(self.inputs, example.op, example.prescale, example.postscale, ranks=example.ranks)

    def wanted(self) -> Array:
        example, me = self.example, self.position
        match example.kind:
            case "allreduce":
                return self.total()
            case "reducescatter":
                return own_rows(self.total(), me, len(self.inputs))
            case "broadcast":
                return self.inputs[example.ranks.index(self.root())]
            case "allgather":
                return np.concatenate(self.inputs)
            case _:
                splits = [self.splits(position) for position in range(len(self.inputs))]
                starts = [int(row[:me].sum()) for row in splits]
                parts = [a[s : s + int(row[me])] for a, s, row in zip(self.inputs, starts, splits, strict=True)]
                return np.concatenate(parts)

    def finish(self, handle: int) -> None:
        result = hvd.synchronize(handle)
        if self.example.kind == "alltoall":
            result, received = result
            assert received.tolist() == [self.splits(position)[self.position] for position in range(len(self.inputs))]
        check(result, self.wanted(), f"{self.name}: {self.example}")
        in_place = self.example.in_place and self.example.kind in ("allreduce", "broadcast")
        assert (result is self.own) == in_place
        if not in_place:
            check(self.own, self.inputs[self.position], f"{self.name}: the input of {self.example}")


def run_batches(batches: list[list[Example]], size: int) -> int:
    members = {tuple(one.ranks or ()): one for one in start(size)}
    count = 0
    for b, batch in enumerate(batches):
        under_way: list[tuple[Case, int]] = []
        for i, example in enumerate(batch):
            if hvd.rank() not in example.ranks:
                continue
            # Half of the names come again in later batches, with other dtypes and shapes.
            case = Case(example, f"{i}" if i % 2 else f"{b}.{i}", members[example.ranks])
            under_way.append((case, case.start()))
            count += 1
            if example.wait:
                case.finish(under_way.pop()[1])
        for case, handle in reversed(under_way):
            case.finish(handle)
    hvd.barrier()
    return count


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize(
    "variables",
    [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_CACHE_CAPACITY": "4"}],
    ids=["fused", "alone", "evicted"],
)
def test_any_operation_gives_what_numpy_says(size: int, variables: dict[str, str], transport: str) -> None:
    batches = make_batches(size, BATCHES[transport])
    counts = run_ranks(size, run_batches, batches, size, env=variables, timeout=120)
    assert sum(counts) > BATCHES[transport] * LONGEST_BATCH / 2


def test_the_examples_are_always_the_same() -> None:
    assert make_batches(3, 50) == make_batches(3, 50)
