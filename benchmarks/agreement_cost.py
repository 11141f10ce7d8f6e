"""Processor time of agreement: a step of 400 tiny tensors, repeated.

The tensors have one element each, so that next to nothing of it is data. Counted is what the engine's own threads use,
and what the calling thread uses while it waits, because a thread that waits drives the engine. Submitting the tensors
from Python is not agreement and is told apart.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import Gate

import horovod.numpy as hvd
from horovod import _core

_TENSORS = 400


def _cpu_of_engine_threads() -> int:
    """Nanoseconds of all threads of the engine in this process, where PyTorch, gloo and BLAS have theirs, too."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("hvd-"):
            total += int((task / "schedstat").read_text().split()[0])
    return total


def measure_agreement(gate: Gate, steps: int) -> dict[str, Any]:
    """Returns nanoseconds of each step: of engine threads, of waiting, of submitting; and messages of a step."""
    arrays = [np.ones(1, np.float32) for _ in range(_TENSORS)]
    names = [f"agreement.{i}" for i in range(_TENSORS)]
    engine, waiting, submitting = [], [], []
    messages = 0
    for step in range(steps + 3):
        if step == 3:  # the first ones learn the names and the plan
            messages = _messages()
        gate.wait()
        background = _cpu_of_engine_threads()
        begin = time.thread_time_ns()
        handles = [
            hvd.allreduce_async_(array, name=name, op=hvd.Sum) for array, name in zip(arrays, names, strict=True)
        ]
        submitted = time.thread_time_ns()
        hvd.synchronize(handles[-1])
        waited = time.thread_time_ns()
        for handle in handles[:-1]:
            hvd.synchronize(handle)
        if step >= 3:
            submitting.append(submitted - begin)
            waiting.append(waited - submitted)
            engine.append(_cpu_of_engine_threads() - background)
    return {
        "engine": engine,
        "waiting": waiting,
        "submitting": submitting,
        "messages": (_messages() - messages) / steps,
    }


def _messages() -> int:
    counters = _core.counters()
    return counters["request_messages"] + counters["control_records"]
