"""Tables of what was measured, in Markdown."""

from collections.abc import Iterable, Sequence

from summary import Comparison, Waiting


def _bytes(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _allreduce_table(lines: list[Comparison]) -> list[str]:
    header = (
        "ranks",
        "size",
        "horovod median",
        "p99",
        "gloo median",
        "p99",
        "horovod GB/s",
        "gloo / horovod",
        "by round",
    )
    return _table(
        header,
        [
            (
                str(line.subject.ranks),
                _bytes(line.subject.bytes),
                _time(line.median),
                _time(line.p99),
                _time(line.other_median),
                _time(line.other_p99),
                f"{line.subject.bytes / line.median / 1e9:.3g}",
                f"**{line.ratio:.2f}**",
                f"{line.ratio_low:.2f} - {line.ratio_high:.2f}",
            )
            for line in lines
        ],
    )


def _stream_table(lines: list[Comparison]) -> list[str]:
    header = ("ranks", "benchmark", "horovod median", "compared with", "its median", "its / horovod", "by round")
    return _table(
        header,
        [
            (
                str(line.subject.ranks),
                f"{line.subject.benchmark}, {_bytes(line.subject.bytes)}",
                _time(line.median),
                line.other,
                _time(line.other_median),
                f"**{line.ratio:.2f}**",
                f"{line.ratio_low:.2f} - {line.ratio_high:.2f}",
            )
            for line in lines
        ],
    )


def _waiting_table(lines: list[Waiting]) -> list[str]:
    header = ("ranks", "peer", "waited", "processor time of a waiting rank")
    rows = [(str(line.ranks), line.peer, f"{line.waited:g} s", f"{line.cpu_seconds:.4f} s") for line in lines]
    return _table(header, rows)


def to_markdown(machine: dict[str, str], comparisons: list[Comparison], waits: list[Waiting]) -> str:
    """Returns the report of a run."""
    sizes = [line for line in comparisons if line.subject.benchmark == "allreduce"]
    streams = [line for line in comparisons if line.subject.benchmark != "allreduce"]
    text = [*(f"- {key}: {value}" for key, value in machine.items()), ""]
    if sizes:
        text += ["## Blocking allreduce of float32, in place", "", *_allreduce_table(sizes)]
    if streams:
        text += ["## Gradient stream", "", *_stream_table(streams)]
    if waits:
        text += ["## Waiting for a late rank", "", *_waiting_table(waits)]
    return "\n".join(text)
