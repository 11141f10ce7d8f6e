"""Fair comparison of ways that live in different teams: their rounds alternate.

A round is some iterations of one way, a few hundred milliseconds at most. One round of every way follows another (A B
C, C B A, A B C, ...), so that the machine's noise hits all of them alike.
"""

import dataclasses
import math
from collections.abc import Sequence

from results import Record
from subject import TRAINING, Subject
from teams import Seconds, Stadium, Team

_MOST_ITERATIONS = 200
_LEAST_ITERATIONS = 2
_LONG = 0.5  # seconds


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure, and on how much memory."""

    rounds: int  # of each way
    seconds: float  # that a round should take
    footprint: int  # bytes that a way's buffers take together, so that caches do not flatter


def compare(stadium: Stadium, subject: Subject, ways: Sequence[str], effort: Effort) -> list[Record]:
    """Times a subject in all of these ways that the teams have."""
    players: list[tuple[Team, str]] = []
    for team in stadium.teams:
        own = [way for way in ways if way in team.ways]
        if own and team.prepare(subject, own, effort.footprint):
            players += [(team, way) for way in own]
    players.sort(key=lambda player: ways.index(player[1]))
    iterations = {}
    for team, way in players:
        first, second = (float(team.run(way, 1)[0]) for _ in range(2))  # the first learns names and touches memory
        wanted = int(effort.seconds / max(min(first, second), 1e-7))
        iterations[way] = min(_MOST_ITERATIONS, max(1 if second > _LONG else _LEAST_ITERATIONS, wanted))
    rounds: dict[str, list[Seconds]] = {way: [] for _, way in players}
    cpu: dict[str, float] = {way: math.inf for _, way in players}
    for turn in range(effort.rounds):
        for team, way in players if turn % 2 == 0 else reversed(players):
            rounds[way].append(team.run(way, iterations[way]))
            cpu[way] = min(cpu[way], team.cpu)
    for team in {id(team): team for team, _ in players}.values():
        team.drop()
    gated = subject.kind != TRAINING
    return [Record.of(subject, way, rounds[way], None if gated else cpu[way]) for _, way in players]
