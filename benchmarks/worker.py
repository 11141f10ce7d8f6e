"""One rank of a team: does what the director asks for, until it hangs up.

    worker.py <torch|numpy|mpi> <name of the team> <director's socket> <scratch directory>

It is started by horovodrun, start_ranks.py or an mpiexec. Ranks of MPI have NumPy and mpi4py only, so modules are
imported as needed.
"""

import gc
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from conversation import call_director
from hosts import pause
from measure import Gate, time_action
from peers import Peer, Unsupported
from subject import COLLECTIVES, GLOO, HOROVOD, HOROVOD_SHARED, HOROVOD_TORCH, TOGETHER, TRAINING, Subject

from collectives import Collective

Message = dict[str, Any]


class Actions(Protocol):
    """Something that is timed in several ways."""

    gated: bool

    def action(self, way: str) -> Callable[[int], None]:
        """What is timed."""

    def after(self, way: str) -> Callable[[int], None]:
        """What comes after each iteration, untimed."""


class Rank:
    """A rank and what it has prepared."""

    def __init__(self, rank: int, peers: dict[str, Peer], gate: Gate) -> None:
        """Has prepared nothing yet."""
        self.number = rank
        self._peers = peers
        self._gate = gate
        self._actions: Actions | None = None
        self._iteration = 0
        self._pause = 0.0

    def answer(self, question: Message) -> Message:
        """Does what was asked."""
        match question["do"]:
            case "prepare":
                subject = Subject.from_message(question["subject"])
                return self._prepare(subject, question["ways"], question["footprint"])
            case "run":
                return self._run(question["way"], question["iterations"])
            case "drop":
                self._actions = None
                return {}
            case "wait":
                return self._wait(question["way"], question["late"], question["seconds"])
            case "agree":
                from agreement_cost import measure_agreement

                return measure_agreement(self._gate, question["steps"])
        raise RuntimeError(f"unknown question {question!r}")

    def leave(self) -> None:
        """Leaves all jobs, the last one joined first. (MPI does so by itself.)"""
        self._actions = None
        for peer in reversed(self._peers.values()):
            peer.close()

    def _prepare(self, subject: Subject, ways: list[str], footprint: int) -> Message:
        self._iteration = 0
        self._pause = pause(subject.link, subject.bytes)
        if subject.kind in COLLECTIVES:
            try:
                self._actions = Collective(subject, self.number, {way: self._peers[way] for way in ways}, footprint)
            except Unsupported as reason:
                return {"unsupported": str(reason)}
        elif subject.kind == TOGETHER:
            from together import Together

            self._actions = Together(subject)
        elif subject.kind == TRAINING:
            from training import Training

            self._actions = Training(subject, self.number, ways)
        return {}

    def _run(self, way: str, iterations: int) -> Message:
        assert self._actions is not None
        numbers = range(self._iteration, self._iteration + iterations)
        self._iteration += iterations
        actions = self._actions
        action, after = actions.action(way), actions.after(way)
        starts, ends, cpu = time_action(action, after, self._gate, numbers, gated=actions.gated, pause=self._pause)
        return {"starts": starts, "ends": ends, "gated": actions.gated, "cpu": cpu}

    def _wait(self, way: str, late: int, seconds: float) -> Message:
        from slow_rank import cpu_of_waiting

        return {"cpu": cpu_of_waiting(self._peers[way], self._gate, self.number == late, seconds)}


def _join(kind: str, team: str, scratch: Path) -> Rank:
    """Joins the team with all peers that it has."""
    if kind == "mpi":
        from peers_mpi import Mpi

        mpi = Mpi()
        rank, size = mpi.ranks.Get_rank(), mpi.ranks.Get_size()
        return Rank(rank, {team: mpi}, Gate(rank, size, scratch / f"gate-{team}", mpi.ranks.Iprobe))
    from peers_horovod import Horovod, HorovodShared

    import horovod.numpy as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    gate = Gate(rank, size, scratch / f"gate-{team}")
    if kind == "numpy":
        return Rank(rank, {team: Horovod()}, gate)
    import torch
    from peers_torch import Gloo, HorovodTorch

    torch.set_num_threads(1)  # the ranks already use the cores there are
    peers: dict[str, Peer] = {
        HOROVOD: Horovod(),
        HOROVOD_SHARED: HorovodShared(),
        HOROVOD_TORCH: HorovodTorch(),
        GLOO: Gloo(rank, size, scratch),
    }
    return Rank(rank, peers, gate)


def main() -> None:
    """Answers questions."""
    kind, team, director, scratch = sys.argv[1:]
    rank = _join(kind, team, Path(scratch))
    gc.freeze()  # what frameworks have made stays: to look through it before each round takes longer than the round
    line = call_director(director, team, rank.number)
    while (question := line.hear()) is not None:
        try:
            answer = rank.answer(question)
        except Exception:
            answer = {"error": traceback.format_exc()}
        line.say(answer)
    rank.leave()


if __name__ == "__main__":
    main()
