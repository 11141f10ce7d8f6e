"""Costs that are no time of an operation: waiting, agreement, memory, import and init."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from results import Figure
from subject import GLOO, HOROVOD, PEERS
from teams import RankTeam, Stadium, horovodrun

WAITING, AGREEMENT, SUBMITTING, MESSAGES = (
    "CPU of a rank that waits, share of the time",
    "CPU of agreement on a step of 400 tensors, s",
    "CPU of submitting 400 tensors from Python, s",
    "messages of agreement, a step",
)
MEMORY_INIT, MEMORY_FEW, MEMORY_MANY = (
    "memory of a rank after init, bytes",
    "memory of a rank after 16 tensors, bytes",
    "memory of a rank after 1600 tensors, bytes",
)
IMPORT, INIT = "import horovod.torch beyond torch, s", "init, s"

_HERE = Path(__file__).resolve().parent


def measure_waiting(stadium: Stadium, seconds: float) -> list[Figure]:
    """Lets the last rank come late by so many seconds, for each peer."""
    figures = []
    for team in stadium.teams:
        if not isinstance(team, RankTeam):
            continue
        for way in (HOROVOD, *PEERS):
            if way in team.ways:
                late = stadium.ranks - 1
                answers = team.ask({"do": "wait", "way": way, "late": late, "seconds": seconds})
                most = max(answer["cpu"] for answer in answers[:late])
                figures.append(Figure(WAITING, stadium.ranks, way, most / seconds))
    return figures


def measure_agreement(stadium: Stadium, steps: int) -> list[Figure]:
    """Processor time of the rank that needs most, median of the steps."""
    answers = stadium.torch_team.ask({"do": "agree", "steps": steps})
    both = [np.median(np.add(answer["engine"], answer["waiting"])) * 1e-9 for answer in answers]
    submitting = [np.median(answer["submitting"]) * 1e-9 for answer in answers]
    messages = max(answer["messages"] for answer in answers)
    return [
        Figure(AGREEMENT, stadium.ranks, HOROVOD, float(max(both))),
        Figure(SUBMITTING, stadium.ranks, HOROVOD, float(max(submitting))),
        Figure(MESSAGES, stadium.ranks, HOROVOD, float(messages)),
    ]


def measure_start_up(times: int) -> list[Figure]:
    """Import, init and memory in new processes, the median of several; two ranks."""
    found: dict[str, list[float]] = {}
    for _ in range(times):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with tempfile.TemporaryDirectory(prefix="bench-") as meeting:
            command = [*horovodrun(2), sys.executable, str(_HERE / "start_up.py"), meeting]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if ended.returncode != 0:
            raise RuntimeError(f"start_up.py failed with exit status {ended.returncode}: {ended.stderr[-2000:]}")
        lines = [line.partition(":")[2] for line in ended.stdout.splitlines() if '{"' in line]
        ranks = [json.loads(line) for line in lines]
        for what in ranks[0]:
            found.setdefault(what, []).append(max(rank[what] for rank in ranks))
    names = {
        "import": (IMPORT, HOROVOD),
        "init": (INIT, HOROVOD),
        "gloo_init": (INIT, GLOO),
        "memory_init": (MEMORY_INIT, HOROVOD),
        "memory_few": (MEMORY_FEW, HOROVOD),
        "memory_many": (MEMORY_MANY, HOROVOD),
    }
    return [Figure(what, 2, way, statistics.median(found[name])) for name, (what, way) in names.items()]
