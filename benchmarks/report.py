"""The tables of a run, in Markdown."""

from collections.abc import Iterable, Sequence

from goals import Row, communication, cpu_of_communication, goal_rows
from host_teams import HOST_WAYS
from hosts import ALL_LINKS, BYTES_PER_SECOND
from results import Results
from subject import (
    ALLREDUCE,
    ALONE,
    COLLECTIVES,
    DDP,
    ENCRYPTION_WAYS,
    HOROVOD,
    HOROVOD_SHARED,
    HOROVOD_TORCH,
    IN_CLEAR,
    LIMIT,
    LIMIT_OWN_PAGES,
    MEMCPY,
    PEERS,
    STEP_WAYS,
    TOGETHER,
    TOGETHER_WAYS,
    TRAINING,
    Subject,
)
from units import bytes_text, time_text


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _verdict(row: Row) -> str:
    return {True: "yes", False: "**no**", None: "not measured" if not row.measured else "?"}[row.met]


def goals_table(results: Results) -> list[str]:
    """What was aimed at, and what came."""
    rows = [(row.what, row.goal, row.measured or "-", _verdict(row)) for row in goal_rows(results)]
    return _table(("2 ranks unless said", "goal", "measured (the worst case)", "met"), rows)


def _times(results: Results, subject: Subject, ways: Sequence[str]) -> list[str]:
    cells = []
    for way in ways:
        record = results.find(subject, way)
        cells.append("-" if record is None else f"{time_text(record.median)} ({time_text(record.p99)})")
    return cells


def _ratio(results: Results, subject: Subject, ours: str, theirs: Sequence[str]) -> str:
    """Times of the best of theirs over ours, and the lowest and highest ratio of a round."""
    mine = results.find(subject, ours)
    others = [record for way in theirs if (record := results.find(subject, way)) is not None]
    if mine is None or not others:
        return "-"
    best = min(others, key=lambda record: record.median)
    rounds = [b / a for a, b in zip(mine.by_round, best.by_round, strict=False)]
    return f"{best.median / mine.median:.2f} ({min(rounds):.2f} - {max(rounds):.2f})"


def _collective_table(results: Results, subjects: list[Subject], ways: Sequence[str]) -> list[str]:
    present = [way for way in ways if any(results.find(subject, way) for subject in subjects)]
    types = any(subject.dtype != "float32" for subject in subjects)
    header = ["ranks", "bytes", *(["type"] if types else []), *present, "best peer / horovod (by round)"]
    rows = []
    for subject in subjects:
        first = [str(subject.ranks), bytes_text(subject.bytes), *([subject.dtype] if types else [])]
        rows.append([*first, *_times(results, subject, present), _ratio(results, subject, HOROVOD, PEERS)])
    return _table(header, rows)


def _collectives(results: Results) -> list[str]:
    text: list[str] = []
    ways = (HOROVOD, HOROVOD_TORCH, HOROVOD_SHARED, *PEERS, LIMIT, LIMIT_OWN_PAGES, MEMCPY)
    for kind in COLLECTIVES:
        subjects = [subject for subject in results.subjects(kind) if subject.dtype == "float32"]
        if subjects:
            text += [f"## {kind.capitalize()} of float32", "", *_collective_table(results, subjects, ways)]
    others = [subject for subject in results.subjects(ALLREDUCE) if subject.dtype != "float32"]
    if others:
        text += ["## Allreduce of other types", "", *_collective_table(results, others, ways)]
    return text


def _between_hosts(results: Results) -> list[str]:
    """Each host sends the payload once and receives it once; so much of it a second is the bandwidth."""
    text: list[str] = []
    for link in ALL_LINKS:
        rows = []
        for subject in results.subjects(ALLREDUCE, link=link):
            if not any(results.find(subject, way) for way in HOST_WAYS):
                continue
            ours = results.find(subject, HOROVOD)
            bandwidth = "-" if ours is None else f"{subject.bytes * 8e-9 / ours.median:.3g} Gbit/s"
            if ours is not None and link in BYTES_PER_SECOND:
                bandwidth += f" ({subject.bytes / ours.median / BYTES_PER_SECOND[link]:.0%})"
            rows.append(
                [
                    f"{subject.ranks // 2} a host",
                    bytes_text(subject.bytes),
                    *_times(results, subject, HOST_WAYS),
                    *(_ratio(results, subject, HOROVOD, (way,)) for way in HOST_WAYS[1:]),
                    bandwidth,
                ]
            )
        if rows:
            ratios = [f"{way} / horovod" for way in HOST_WAYS[1:]]
            header = ["ranks", "bytes", *HOST_WAYS, *ratios, "bandwidth"]
            text += [f"## Allreduce of float32 between two hosts, {link}", "", *_table(header, rows)]
    return text


def _encryption(results: Results) -> list[str]:
    """How much longer it takes with more encrypted."""
    text: list[str] = []
    header = ["ranks", "bytes", *ENCRYPTION_WAYS, *(f"{way} / {IN_CLEAR}" for way in ENCRYPTION_WAYS[1:])]
    for link in ALL_LINKS:
        rows = [
            [
                f"{subject.ranks // 2} a host",
                bytes_text(subject.bytes),
                *_times(results, subject, ENCRYPTION_WAYS),
                *(_ratio(results, subject, IN_CLEAR, (way,)) for way in ENCRYPTION_WAYS[1:]),
            ]
            for subject in results.subjects(ALLREDUCE, link=link)
            if any(results.find(subject, way) for way in ENCRYPTION_WAYS)
        ]
        if rows:
            text += [f"## Cost of encryption: allreduce between two hosts, {link}", "", *_table(header, rows)]
    return text


def _together(results: Results) -> list[str]:
    subjects = results.subjects(TOGETHER)
    if not subjects:
        return []
    rows = [[str(subject.ranks), *_times(results, subject, TOGETHER_WAYS)] for subject in subjects]
    return ["## 400 tensors of 64 x 64 together", "", *_table(["ranks", *TOGETHER_WAYS], rows)]


def _training(results: Results) -> list[str]:
    rows = []
    for subject in results.subjects(TRAINING):
        costs = []
        for way in (HOROVOD, DDP):
            step, alone = results.find(subject, way), results.find(subject, ALONE)
            for cost in (communication(results, subject, way), cpu_of_communication(results, subject, way)):
                costs.append("-" if cost is None else f"{cost * 1e3:.2f} ms")
            costs.append("-" if step is None or alone is None else f"{alone.median / step.median:.0%}")
        rows.append([str(subject.ranks), subject.model, *_times(results, subject, STEP_WAYS), *costs])
    if not rows:
        return []
    costs = [f"{what} of {way}" for way in ("horovod", "DDP") for what in ("cost", "processor time", "efficiency")]
    note = (
        "Cost is the time of a step beyond that of ranks that do not talk (alone); processor time is what a rank needs "
        "beyond theirs, which a busy machine changes less. Ranks that are in step only wait for each other once a step."
    )
    header = ["ranks", "model", *STEP_WAYS, *costs]
    return ["## Training step", "", note, "", *_table(header, rows)]


def _figures(results: Results) -> list[str]:
    if not results.figures:
        return []
    rows = [
        (figure.what, str(figure.ranks), figure.way, f"{figure.value:.4g}")
        for figure in sorted(results.figures, key=lambda figure: (figure.what, figure.ranks, figure.way))
    ]
    return ["## Other costs", "", *_table(("what", "ranks", "by", "value"), rows)]


def _machine(results: Results) -> list[str]:
    """One list; what differs between sections is told by section."""
    sections = results.machine
    text = []
    for key in dict.fromkeys(key for described in sections.values() for key in described):
        values = {section: described.get(key, "-") for section, described in sections.items()}
        if len(set(values.values())) == 1:
            text.append(f"- {key}: {next(iter(values.values()))}")
        else:
            text.append(f"- {key}: " + "; ".join(f"{value} ({section})" for section, value in values.items()))
    return [*text, ""]


def to_markdown(results: Results, name: str, picture: str) -> str:
    """Returns the report of a run."""
    text = [f"# Benchmarks: {name}", "", *_machine(results)]
    text += ["## Goals", "", *goals_table(results), f"![All of it as a picture]({picture})", ""]
    text += ["Times are medians, with the 99th percentile in parentheses.", ""]
    sections = (_collectives, _between_hosts, _encryption, _together, _training, _figures)
    return "\n".join([*text, *(line for section in sections for line in section(results))])
