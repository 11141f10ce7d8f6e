"""The goals, and whether a run meets them. One row for each; of several sizes and ways the worst one counts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from costs import AGREEMENT, IMPORT, INIT, MEMORY_FEW, MEMORY_MANY, WAITING
from hosts import ALL_LINKS, BYTES_PER_SECOND, GIGABIT, UNSHAPED
from results import Record, Results
from simulation import LAYOUTS
from simulation import MESSAGES as SIMULATED_MESSAGES
from subject import (
    ALLREDUCE,
    ALONE,
    ASYNC,
    COLLECTIVES,
    DDP,
    GLOO,
    GROUPED,
    HOROVOD,
    HOROVOD_SHARED,
    HOROVOD_TORCH,
    IN_STEP,
    LIMIT,
    MPICH,
    ONE,
    OPEN_MPI,
    PEERS,
    TOGETHER,
    TORCH_ASYNC,
    TORCH_GROUPED,
    TRAINING,
    Subject,
)
from units import bytes_text

_KI, _MI = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """A goal. measured is "" and met None where nothing was measured."""

    what: str
    goal: str
    measured: str = ""
    met: bool | None = None


@dataclasses.dataclass(frozen=True)
class _Case:
    value: float
    where: str


def _worst(what: str, goal: str, cases: Iterable[_Case], least: float | None = None, most: float | None = None) -> Row:
    """The row of a goal that all cases have to meet: at least, or at most, so much."""
    found = list(cases)
    if not found:
        return Row(what, goal)
    if least is not None:
        worst = min(found, key=lambda case: case.value)
        met = worst.value >= least
    else:
        assert most is not None
        worst = max(found, key=lambda case: case.value)
        met = worst.value <= most
    missed = sum(case.value < least if least is not None else case.value > (most or 0) for case in found)
    text = f"{worst.value:.3g} ({worst.where}"
    text += f"; missed in {missed} of {len(found)})" if missed and len(found) > 1 else ")"
    return Row(what, goal, text, met)


def _ratios(
    results: Results,
    subjects: Iterable[Subject],
    ours: Sequence[str],
    theirs: Sequence[str],
    pick: Callable[[Record], float] = lambda record: record.median,
) -> Iterable[_Case]:
    """Their time over ours."""
    for subject in subjects:
        for way in ours:
            for peer in theirs:
                mine, other = results.find(subject, way), results.find(subject, peer)
                if mine is not None and other is not None:
                    yield _Case(pick(other) / pick(mine), _where(subject, way, peer))


def _where(subject: Subject, way: str, peer: str) -> str:
    size = f"{bytes_text(subject.bytes)}, " if subject.bytes else f"{subject.model}, "
    kind = f"{subject.kind}, " if subject.kind not in (ALLREDUCE, TRAINING) else ""
    hosts = f", {subject.link}, {subject.ranks} ranks" if subject.link else ""
    return f"{kind}{size}{peer} / {way}{hosts}" if peer else f"{kind}{size}{way}{hosts}"


def _allreduce(results: Results) -> list[Row]:
    def sizes(low: int, high: int) -> list[Subject]:
        two = results.subjects(ALLREDUCE, 2)
        return [subject for subject in two if subject.dtype == "float32" and low <= subject.bytes <= high]

    both, mpis = (HOROVOD, HOROVOD_TORCH), (OPEN_MPI, MPICH)
    small, medium, large, huge = (
        sizes(4, 4 * _KI),
        sizes(64 * _KI, 64 * _KI),
        sizes(_MI, 4 * _MI),
        sizes(16 * _MI, 256 * _MI),
    )
    slowdown = [
        _Case(1 / case.value, case.where.replace(f"{OPEN_MPI} / ", "") + f" / {OPEN_MPI}")
        for case in _ratios(results, small, both, (OPEN_MPI,))
    ]

    def p99(record: Record) -> float:
        return record.p99

    shared = [subject for subject in sizes(4 * _MI, 256 * _MI)]
    return [
        _worst("allreduce, 4 B to 4 KiB, median", "gloo / ours ≥ 20", _ratios(results, small, both, (GLOO,)), 20),
        _worst("allreduce, 4 B to 4 KiB, p99", "gloo / ours ≥ 20", _ratios(results, small, both, (GLOO,), p99), 20),
        _worst("allreduce, 4 B to 4 KiB, median", "ours / Open MPI ≤ 8", slowdown, most=8),
        _worst("allreduce, 64 KiB", "gloo / ours ≥ 15", _ratios(results, medium, both, (GLOO,)), 15),
        _worst("allreduce, 64 KiB", "MPI / ours > 1", _ratios(results, medium, both, mpis), 1),
        _worst("allreduce, 1 to 4 MiB", "gloo / ours ≥ 8", _ratios(results, large, both, (GLOO,)), 8),
        _worst("allreduce, 1 to 4 MiB", "MPI / ours > 1", _ratios(results, large, both, mpis), 1),
        _worst("allreduce, 16 to 256 MiB", "gloo / ours ≥ 4.5", _ratios(results, huge, both, (GLOO,)), 4.5),
        _worst("allreduce, 16 to 256 MiB", "MPI / ours ≥ 2.5", _ratios(results, huge, both, mpis), 2.5),
        _worst(
            "allreduce of hvd_alloc arrays, 4 to 256 MiB",
            "limit / ours ≥ 0.7",
            _ratios(results, shared, (HOROVOD_SHARED,), (LIMIT,)),
            0.7,
        ),
    ]


def _more_ranks(results: Results) -> list[Row]:
    rows = []
    for ranks in (4, 7):
        subjects = [subject for subject in results.subjects(ALLREDUCE, ranks) if subject.dtype == "float32"]
        cases = _ratios(results, subjects, (HOROVOD,), PEERS)
        rows.append(_worst(f"allreduce on {ranks} ranks, every size", "peer / ours > 1", cases, 1))
    return rows


def _between_hosts(results: Results) -> list[Row]:
    def large(link: str) -> list[Subject]:
        return [subject for subject in results.subjects(ALLREDUCE, link=link) if subject.bytes >= 4 * _MI]

    shares = []
    for subject in large(GIGABIT):
        if (ours := results.find(subject, HOROVOD)) is not None:
            share = subject.bytes / ours.median / BYTES_PER_SECOND[GIGABIT]
            shares.append(_Case(share, f"{bytes_text(subject.bytes)}, {subject.ranks} ranks"))
    what = "allreduce between 2 hosts"
    to_limit = _ratios(results, large(UNSHAPED), (HOROVOD,), (LIMIT,))
    rows = [
        _worst(f"{what}, {GIGABIT}, from 4 MiB", "bandwidth / the link's ≥ 0.9", shares, 0.9),
        _worst(f"{what}, {UNSHAPED}, from 4 MiB", "limit / ours ≥ 0.9", to_limit, 0.9),
    ]
    for peer in (GLOO, OPEN_MPI):
        cases = [
            case
            for link in ALL_LINKS
            for case in _ratios(results, results.subjects(ALLREDUCE, link=link), (HOROVOD,), (peer,))
        ]
        rows.append(_worst(f"{what}, every size", f"{peer} / ours > 1", cases, 1))
    return rows


def _others(results: Results) -> list[Row]:
    rows = []
    for kind in COLLECTIVES[1:]:
        cases = _ratios(results, results.subjects(kind, 2), (HOROVOD,), PEERS)
        rows.append(_worst(f"{kind}, 1 KiB to 64 MiB", "peer / ours > 1", cases, 1))
    return rows


def _dtypes(results: Results) -> list[Row]:
    rows = []
    for dtype in ("float16", "bfloat16"):
        cases = []
        for subject in results.subjects(ALLREDUCE, 2):
            if subject.dtype == dtype:
                same = dataclasses.replace(subject, dtype="float32", bytes=2 * subject.bytes)  # as many elements
                ours, single = results.find(subject, HOROVOD), results.find(same, HOROVOD)
                if ours is not None and single is not None:
                    cases.append(_Case(single.median / ours.median, f"{subject.bytes // 2} elements"))
        rows.append(_worst(f"{dtype} sum", "element rate / float32's ≥ 1", cases, 1))
    return rows


def _together(results: Results) -> list[Row]:
    cases = []
    for subject in results.subjects(TOGETHER, 2):
        one = results.find(subject, ONE)
        for way in (ASYNC, GROUPED, TORCH_ASYNC, TORCH_GROUPED):
            many = results.find(subject, way)
            if one is not None and many is not None:
                cases.append(_Case(many.median / one.median, way))
    return [_worst("400 tensors of 64 x 64 together", "time / one allreduce's ≤ 3", cases, most=3)]


def communication(results: Results, subject: Subject, way: str) -> float | None:
    """Seconds by which a training step is longer than that of ranks that do not talk."""
    step, alone = results.find(subject, way), results.find(subject, ALONE)
    return None if step is None or alone is None else step.median - alone.median


def cpu_of_communication(results: Results, subject: Subject, way: str) -> float | None:
    """Seconds of processor time by which a step costs a rank more than one that does not talk."""
    step, alone = results.find(subject, way), results.find(subject, ALONE)
    if step is None or alone is None or step.cpu is None or alone.cpu is None:
        return None
    return step.cpu - alone.cpu


def _training(results: Results) -> list[Row]:
    rows = []
    for subject in results.subjects(TRAINING, 2):
        ours, theirs = communication(results, subject, HOROVOD), communication(results, subject, DDP)
        what, goal = f"communication of a training step, {subject.model}", "ours / DDP's ≤ 1/3"
        if ours is None or theirs is None:
            rows.append(Row(what, goal))
        elif theirs <= 0:
            rows.append(Row(what, goal, f"{ours * 1e3:.2f} ms / {theirs * 1e3:.2f} ms: noise", None))
        else:
            share = ours / theirs
            waiting = communication(results, subject, IN_STEP)
            of_it = "" if waiting is None else f"; {waiting * 1e3:.2f} ms to wait for each other"
            text = f"{share:.2f} ({ours * 1e3:.2f} / {theirs * 1e3:.2f} ms{of_it})"
            rows.append(Row(what, goal, text, share <= 1 / 3))
    return rows


def _costs(results: Results) -> list[Row]:
    def at_most(what: str, goal: str, value: float | None, *, most: float, unit: float, name: str) -> Row:
        if value is None:
            return Row(what, goal)
        return Row(what, goal, f"{value * unit:.3g} {name}", value <= most)

    few, many = results.figure(MEMORY_FEW, 2, HOROVOD), results.figure(MEMORY_MANY, 2, HOROVOD)
    growth = None if few is None or many is None else many - few
    return [
        at_most(
            "agreement on a repeated step of 400 tensors",
            "≤ 100 µs CPU a rank",
            results.figure(AGREEMENT, 2, HOROVOD),
            most=100e-6,
            unit=1e6,
            name="µs",
        ),
        at_most(
            "a rank that waits 10 s",
            "≤ 0.1 s CPU",
            results.figure(WAITING, 2, HOROVOD),
            most=0.01,
            unit=10,
            name="s, of 10 s",
        ),
        at_most("memory of a rank", "≤ 64 MiB", many, most=64 * _MI, unit=1 / _MI, name="MiB"),
        at_most(
            "memory with 1600 tensors instead of 16",
            "not more (2 MiB for their names)",
            growth,
            most=2 * _MI,
            unit=1 / _MI,
            name="MiB more",
        ),
        at_most(
            "import horovod.torch beyond torch",
            "≤ 0.2 s",
            results.figure(IMPORT, 2, HOROVOD),
            most=0.2,
            unit=1,
            name="s",
        ),
        at_most("init on 2 ranks", "≤ 0.2 s", results.figure(INIT, 2, HOROVOD), most=0.2, unit=1, name="s"),
    ]


def _simulated(results: Results) -> list[Row]:
    what, goal = "agreement on many ranks, simulated", "messages grow with hosts, not ranks x tensors"
    way = LAYOUTS[8]
    per_host = {
        figure.ranks: figure.value / (figure.ranks // 8 - 1)
        for figure in results.figures
        if figure.what == SIMULATED_MESSAGES and figure.way == way and figure.ranks >= 64
    }
    if not per_host:
        return [Row(what, goal)]
    few, many = min(per_host), max(per_host)
    text = f"{per_host[few]:.1f} a host and step on {few} ranks, {per_host[many]:.1f} on {many}"
    return [Row(what, goal, text, per_host[many] <= 1.5 * per_host[few])]


def goal_rows(results: Results) -> list[Row]:
    """All goals."""
    return [
        *_allreduce(results),
        *_more_ranks(results),
        *_between_hosts(results),
        *_others(results),
        *_dtypes(results),
        *_together(results),
        *_training(results),
        *_costs(results),
        *_simulated(results),
    ]
