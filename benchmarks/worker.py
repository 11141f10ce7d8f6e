"""One rank of a benchmark, started by run.py through horovodrun. Rank 0 writes what was measured to a file.

worker.py <scratch directory> <plan as JSON>
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from gradient_stream import Model, measure_stream
from latency import measure_size
from measure import Gate
from peers import Gloo, Horovod, Peer
from plan import Plan
from slow_rank import measure_waiting
from summary import Comparison, Waiting

import horovod.numpy as hvd


def main() -> None:
    """Runs the plan."""
    scratch, plan = Path(sys.argv[1]), Plan.from_json(sys.argv[2])
    torch.set_num_threads(1)  # the ranks already use the cores there are
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    gate = Gate(rank, ranks, scratch)
    horovod, gloo = Horovod(), Gloo(rank, ranks, scratch)
    peers: list[Peer] = [horovod, gloo]
    comparisons: list[Comparison] = []
    waits: list[Waiting] = []

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if "latency" in plan.benchmarks:
        for size_bytes in plan.sizes:
            comparisons += measure_size(peers, gate, ranks, size_bytes, plan.rounds)
            say(f"{ranks} ranks, allreduce of {size_bytes} bytes: gloo / horovod = {comparisons[-1].ratio:.2f}")
    if "stream" in plan.benchmarks:
        model = Model(large_elements=plan.large_elements)
        for computes in (False, True):
            new = measure_stream(horovod, gloo, gate, model, ranks=ranks, rounds=plan.rounds, computes=computes)
            comparisons += new
            for line in new:
                say(f"{ranks} ranks, {line.subject.benchmark}: {line.other} / horovod = {line.ratio:.2f}")
    if "waiting" in plan.benchmarks and ranks > 1:
        for peer in peers:
            waits.append(measure_waiting(peer, gate, rank, ranks, plan.wait_seconds))
            say(f"{ranks} ranks, waiting {plan.wait_seconds} s: {peer.name} burns {waits[-1].cpu_seconds:.4f} s")
    if rank == 0:
        results = {
            "comparisons": [dataclasses.asdict(line) for line in comparisons],
            "waits": [dataclasses.asdict(line) for line in waits],
        }
        (scratch / "results.json").write_text(json.dumps(results))
    for peer in reversed(peers):
        peer.close()


if __name__ == "__main__":
    main()
