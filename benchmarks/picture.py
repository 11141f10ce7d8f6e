"""One picture of a run: times by size, gains of other collectives, training, scaling, agreement, hosts, encryption."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from host_teams import HOST_WAYS
from hosts import ALL_LINKS, GIGABIT, UNSHAPED
from matplotlib import pyplot
from results import Results
from simulation import CPU, MESSAGES, TENSORS
from subject import (
    ALL_ENCRYPTED,
    ALLREDUCE,
    ALONE,
    COLLECTIVES,
    DDP,
    GLOO,
    HOROVOD,
    HOROVOD_SHARED,
    HOROVOD_TORCH,
    IN_CLEAR,
    IN_STEP,
    LIMIT,
    LIMIT_OWN_PAGES,
    MEMCPY,
    MODELS,
    MPICH,
    OPEN_MPI,
    PEERS,
    STEP_WAYS,
    TRAINING,
    Subject,
)
from units import bytes_text

_COLORS = {
    HOROVOD: "tab:blue",
    HOROVOD_TORCH: "tab:cyan",
    HOROVOD_SHARED: "navy",
    GLOO: "tab:orange",
    DDP: "tab:orange",
    OPEN_MPI: "tab:green",
    MPICH: "tab:red",
    LIMIT: "black",
    LIMIT_OWN_PAGES: "dimgrey",
    MEMCPY: "grey",
    ALONE: "lightgrey",
    IN_STEP: "darkgrey",
}
_WAYS = (HOROVOD, HOROVOD_TORCH, HOROVOD_SHARED, *PEERS, LIMIT, LIMIT_OWN_PAGES, MEMCPY)


def _float32(results: Results, kind: str, ranks: int) -> list[Subject]:
    return [subject for subject in results.subjects(kind, ranks) if subject.dtype == "float32"]


def _size_axis(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [bytes_text(size) for size in sizes], rotation=45, fontsize=7)
    axes.minorticks_off()


def _allreduce(results: Results, axes: Any, ranks: int) -> None:
    subjects = _float32(results, ALLREDUCE, ranks)
    for way in _WAYS:
        points = [(subject.bytes, record) for subject in subjects if (record := results.find(subject, way))]
        if not points:
            continue
        style = "--" if way in (LIMIT, LIMIT_OWN_PAGES, MEMCPY) else "-"
        axes.plot(
            [size for size, _ in points],
            [record.median * 1e6 for _, record in points],
            style,
            marker="." if style == "-" else None,
            color=_COLORS[way],
            label=way,
        )
    _size_axis(axes, sorted({subject.bytes for subject in subjects}))
    axes.set_yscale("log")
    axes.set_ylabel("µs, median")
    axes.set_title(f"allreduce, {ranks} ranks")
    axes.grid(alpha=0.3)


def _between_hosts(results: Results, axes: Any, link: str, per_host: int) -> None:
    """Payload a second; each host sends and receives as much."""
    every = results.subjects(ALLREDUCE, 2 * per_host, link)
    subjects = [subject for subject in every if any(results.find(subject, way) for way in HOST_WAYS)]
    for way in HOST_WAYS:
        points = [(subject.bytes, record) for subject in subjects if (record := results.find(subject, way))]
        if points:
            rates = [size * 8e-9 / record.median for size, record in points]
            style = "--" if way == LIMIT else "-"
            axes.plot([size for size, _ in points], rates, style, marker=".", color=_COLORS[way], label=way)
    if subjects and link == GIGABIT:
        axes.axhline(1, color="grey", linewidth=0.8)
    _size_axis(axes, sorted({subject.bytes for subject in subjects}))
    axes.set_yscale("log")
    axes.set_ylabel("Gbit/s, by the median")
    axes.set_title(f"allreduce between 2 hosts with {per_host} rank{'s' * (per_host > 1)} each, {link}")
    axes.grid(alpha=0.3)


def _encryption(results: Results, axes: Any) -> None:
    """How much longer it takes if everything is encrypted."""
    sizes: set[int] = set()
    for link in ALL_LINKS:
        for ranks in (2, 4):
            points = []
            for subject in results.subjects(ALLREDUCE, ranks, link):
                clear, encrypted = (results.find(subject, way) for way in (IN_CLEAR, ALL_ENCRYPTED))
                if clear is not None and encrypted is not None:
                    points.append((subject.bytes, encrypted.median / clear.median))
            sizes |= {size for size, _ in points}
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=f"{link}, {ranks // 2} a host")
    if sizes:
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0)
    _size_axis(axes, sorted(sizes))
    axes.set_title("allreduce between 2 hosts: time encrypted / in clear")
    axes.grid(alpha=0.3)


def _gain(results: Results, axes: Any) -> None:
    """Time of the best peer over ours, of every collective."""
    sizes: set[int] = set()
    for kind in COLLECTIVES:
        points = []
        for subject in _float32(results, kind, 2):
            ours = results.find(subject, HOROVOD)
            best = [record.median for way in PEERS if (record := results.find(subject, way))]
            if ours is not None and best:
                points.append((subject.bytes, min(best) / ours.median))
        sizes |= {size for size, _ in points}
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=kind)
    if sizes:
        axes.axhline(1, color="black", linewidth=0.8)
    _size_axis(axes, sorted(sizes))
    axes.set_yscale("log")
    axes.set_title("best peer's time / horovod's, 2 ranks")
    axes.grid(alpha=0.3)


def _types(results: Results, axes: Any) -> None:
    """Elements a second by type, of the largest number of elements that was measured for all."""
    rates: dict[str, dict[str, float]] = {}
    for subject in results.subjects(ALLREDUCE, 2):
        for way in (HOROVOD, *PEERS):
            record = results.find(subject, way)
            if record is not None and any(s.dtype != "float32" for s in results.subjects(ALLREDUCE, 2)):
                rate = subject.bytes / _SIZES[subject.dtype] / record.median / 1e9
                best = rates.setdefault(subject.dtype, {})
                best[way] = max(rate, best.get(way, 0.0))
    for number, way in enumerate((HOROVOD, *PEERS)):
        values = [rates[dtype].get(way, 0.0) for dtype in rates]
        axes.bar([x + 0.2 * number for x in range(len(rates))], values, 0.2, color=_COLORS[way], label=way)
    axes.set_xticks([x + 0.3 for x in range(len(rates))], list(rates), rotation=45, fontsize=7)
    axes.set_title("best rate of allreduce by type, 10⁹ elements / s")


_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int32": 4, "int64": 8, "uint8": 1}


def _steps(results: Results, axes: Any) -> None:
    subjects = results.subjects(TRAINING, 2)
    subjects.sort(key=lambda subject: MODELS.index(subject.model))
    for number, way in enumerate(STEP_WAYS):
        values = [record.median * 1e3 if (record := results.find(s, way)) else 0.0 for s in subjects]
        axes.bar([x + 0.2 * number for x in range(len(subjects))], values, 0.2, color=_COLORS[way], label=way)
    axes.set_xticks([x + 0.3 for x in range(len(subjects))], [s.model for s in subjects], fontsize=7)
    axes.set_ylabel("ms, median")
    axes.set_title("training step, 2 ranks")


def _efficiency(results: Results, axes: Any) -> None:
    """Steps of ranks that do not talk, over steps of ranks that do."""
    for model, style in zip(MODELS, ("-", "--", ":", "-."), strict=True):
        for way in (HOROVOD, DDP):
            points = []
            for subject in results.subjects(TRAINING):
                step, alone = results.find(subject, way), results.find(subject, ALONE)
                if subject.model == model and step is not None and alone is not None:
                    points.append((subject.ranks, 100 * alone.median / step.median))
            if points:
                label = f"{way}, {model}"
                axes.plot(*zip(*sorted(points), strict=True), style, marker=".", color=_COLORS[way], label=label)
    axes.set_ylim(0, 110)
    axes.set_xlabel("ranks")
    axes.set_title("scaling efficiency of training, %")
    axes.grid(alpha=0.3)


def _agreement(results: Results, axes: Any, what: str, unit: str, per_tensor: bool) -> None:
    """What the simulated coordinator has to do; and for comparison one message for each tensor of each rank."""
    points: dict[str, list[tuple[int, float]]] = {}
    for figure in results.figures:
        if figure.what == what:
            points.setdefault(figure.way, []).append((figure.ranks, figure.value * (1 if per_tensor else 1e6)))
    for way, line in points.items():
        axes.plot(*zip(*sorted(line), strict=True), marker=".", label=way)
    if points and per_tensor:
        ranks = sorted({number for line in points.values() for number, _ in line})
        axes.plot(
            ranks, [TENSORS * number for number in ranks], "--", color="grey", label="one for each tensor and rank"
        )
    axes.set_xscale("log", base=2)
    if per_tensor:
        axes.set_yscale("symlog")
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xlabel("ranks (simulated)")
    axes.set_ylabel(unit)
    axes.set_title(f"coordinator, repeated step of 400 tensors: {unit}")
    axes.grid(alpha=0.3)


def _has_data(panel: Callable[[Any], None]) -> bool:
    """Whether a panel has something to show; what was not measured is left out."""
    figure, axes = pyplot.subplots()
    panel(axes)
    pyplot.close(figure)
    return bool(axes.has_data())


def draw(results: Results, path: Path) -> None:
    """Writes the picture."""
    panels: list[Callable[[Any], None]] = [
        lambda axes: _allreduce(results, axes, 2),
        lambda axes: _allreduce(results, axes, 4),
        lambda axes: _allreduce(results, axes, 7),
        lambda axes: _gain(results, axes),
        lambda axes: _types(results, axes),
        lambda axes: _steps(results, axes),
        lambda axes: _efficiency(results, axes),
        lambda axes: _agreement(results, axes, MESSAGES, "messages", per_tensor=True),
        lambda axes: _agreement(results, axes, CPU, "µs of CPU", per_tensor=False),
        lambda axes: _between_hosts(results, axes, UNSHAPED, 1),
        lambda axes: _between_hosts(results, axes, UNSHAPED, 2),
        lambda axes: _between_hosts(results, axes, GIGABIT, 1),
        lambda axes: _encryption(results, axes),
    ]
    shown = [panel for panel in panels if _has_data(panel)]
    columns = max(1, min(3, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    size = (16 / 3 * columns, 4.5 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.axis("off")
    for panel, axes in zip(shown, grid.flat, strict=False):
        panel(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
