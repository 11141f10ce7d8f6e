"""Python objects between ranks."""

from typing import Any

import pytest
from ranks import run_ranks

import horovod.numpy as hvd


def exchange() -> dict[str, Any]:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    rank = hvd.rank()
    mine = {"rank": rank, "text": "ä" * (rank * 100_000), "function": lambda x: x + rank}
    results: dict[str, Any] = {}
    from_last = hvd.broadcast_object(mine if rank == 2 else None, root_rank=2, name="last")
    results["broadcast"] = (from_last["rank"], len(from_last["text"]), from_last["function"](10))
    results["unnamed"] = [hvd.broadcast_object(i if rank == 0 else "nothing") for i in range(5)]
    results["gathered"] = [(item["rank"], len(item["text"])) for item in hvd.allgather_object(mine)]
    results["none"] = hvd.allgather_object(None, name="none")
    if pair.included():
        results["in the set"] = hvd.broadcast_object(rank, root_rank=2, process_set=pair)
        results["gathered in the set"] = hvd.allgather_object(rank, process_set=pair)
    else:
        with pytest.raises(ValueError):
            hvd.broadcast_object(rank, root_rank=2, process_set=pair)
    hvd.barrier()
    return results


def test_objects_travel() -> None:
    for rank, results in enumerate(run_ranks(3, exchange)):
        assert results["broadcast"] == (2, 200_000, 12)
        assert results["unnamed"] == [0, 1, 2, 3, 4]
        assert results["gathered"] == [(0, 0), (1, 100_000), (2, 200_000)]
        assert results["none"] == [None] * 3
        if rank != 1:
            assert results["in the set"] == 2
            assert results["gathered in the set"] == [0, 2]


def test_alone() -> None:
    assert run_ranks(1, alone) == [([{"a": 1}], [1, 2])]


def alone() -> tuple[list[Any], list[int]]:
    hvd.init()
    return hvd.allgather_object({"a": 1}), hvd.broadcast_object([1, 2])
