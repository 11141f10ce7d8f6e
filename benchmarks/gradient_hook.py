"""What DistributedOptimizer costs a backward pass for a small gradient, and the end of a step for many of them.

    horovodrun -np 2 python benchmarks/gradient_hook.py [--layers 100] [--steps 50]

Torch calls the hooks of a parameter in the order in which they were set. So one hook before Horovod's and one after it
read the clock; what the two cost without Horovod's between them is measured the same way and taken off. The times are
of rank 0, of all gradients of all steps but the first ones, in which the ranks agree on the names. Gradients are noted
by the hook and started 1 MiB at a time: the small ones of this model at the end of the step, in synchronize().
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import horovod.torch as hvd

_WARM_UP = 5
_WIDTH = 16
_PERCENTILES = (10, 50, 90, 99)

Times = NDArray[np.float64]


class Clock:
    """Times between two hooks of every parameter."""

    def __init__(self) -> None:
        """Has read nothing yet."""
        self.times: list[int] = []
        self._begin = 0

    def start(self, _parameter: torch.Tensor) -> None:
        """The hook before."""
        self._begin = time.perf_counter_ns()

    def stop(self, _parameter: torch.Tensor) -> None:
        """The hook after."""
        self.times.append(time.perf_counter_ns() - self._begin)

    def microseconds(self, skip: int) -> Times:
        """All times but the first."""
        return np.asarray(self.times[skip:], np.float64) / 1000


def set_hook(parameter: torch.Tensor, function: Any) -> None:
    """Torch's own function, which has no types."""
    register: Any = parameter.register_post_accumulate_grad_hook
    register(function)


def measure(layers: int, steps: int, distributed: bool) -> tuple[Times, Times]:
    """Returns the times between the hooks, and those of synchronize(), in microseconds."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    clock = Clock()
    for parameter in model.parameters():
        set_hook(parameter, clock.start)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for parameter in model.parameters():
        set_hook(parameter, clock.stop)
    ends = []
    for _ in range(_WARM_UP + steps):
        optimizer.zero_grad()
        loss: Any = model(torch.ones(1, _WIDTH)).sum()
        loss.backward()
        if distributed:
            hvd.barrier()
            begin = time.perf_counter_ns()
            optimizer.synchronize()
            ends.append(time.perf_counter_ns() - begin)
    skip = _WARM_UP * 2 * layers
    return clock.microseconds(skip), np.asarray(ends[_WARM_UP:], np.float64) / 1000


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=100, help="of two parameters each")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--report", type=Path, help="JSON file for the medians")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    empty, _ = measure(args.layers, args.steps, distributed=False)
    between, ends = measure(args.layers, args.steps, distributed=True)
    if hvd.rank() == 0:
        submitted = between - np.median(empty)
        print(f"{hvd.size()} ranks, {2 * args.layers} gradients, {args.steps} steps; microseconds")
        print(f"{'':>32}" + "".join(f"{f'p{p}':>8}" for p in _PERCENTILES))
        for what, times in (("in the hook of a gradient", submitted), ("end of a step", ends)):
            print(f"{what:>32}" + "".join(f"{value:>8.1f}" for value in np.percentile(times, _PERCENTILES)))
        if args.report:
            medians = {"hook_us": float(np.median(submitted)), "end_us": float(np.median(ends))}
            args.report.write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
