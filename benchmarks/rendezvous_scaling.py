"""How the rendezvous grows with the job: connections, bytes and time, as a table and a picture.

    python rendezvous_scaling.py [--ranks 16 104 1000] [--ranks-per-host 1 8] [--output DIR]

All ranks and the server are threads of this process and run the real code (job_in_one_process.py tells what is left
out); connections and bytes are counted where the server accepts and closes connections. The time is that of one core
that plays all of them: on a cluster every rank has its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from job_in_one_process import counted_server, hosts_of_ranks, meet_all, one_core, processor_time_of_server
from machine import load
from matplotlib import pyplot

_PANELS = (
    ("connections", "connections at the server"),
    ("bytes_in_all", "KiB that the server sends and receives"),
    ("server_seconds", "processor time of the server, seconds"),
    ("seconds", "seconds until all have met, on one core"),
)


@dataclass(frozen=True)
class Measurement:
    """One job that met. What was counted was counted at the server.

    Attributes:
        hosts: That have equally many ranks.
        ranks: Of all hosts.
        connections: That were accepted.
        most_open: Of these, at the same time.
        bytes_sent: In what TCP has carried: with proofs, encryption and headers, without those of packets.
        bytes_received: The same.
        server_seconds: Of processor time, the server's.
        seconds: Until all had met.
    """

    hosts: int
    ranks: int
    connections: int
    most_open: int
    bytes_sent: int
    bytes_received: int
    server_seconds: float
    seconds: float

    @property
    def bytes_in_all(self) -> int:
        """Sent and received."""
        return self.bytes_sent + self.bytes_received


def measure(hosts: int, local_size: int) -> Measurement:
    """Brings a job together.

    Raises:
        RuntimeError: A rank has failed.
    """
    ranks = hosts * local_size
    with one_core(ranks), counted_server(hosts_of_ranks(hosts, local_size)) as (server, traffic):
        outcome = meet_all(hosts, local_size, server)
        server_seconds = processor_time_of_server()
    if outcome.errors:
        rank, error = next(iter(outcome.errors.items()))
        raise RuntimeError(f"{len(outcome.errors)} of {ranks} ranks have failed, among them rank {rank}") from error
    counted = (traffic.connections, traffic.most_open, traffic.bytes_sent, traffic.bytes_received)
    return Measurement(hosts, ranks, *counted, server_seconds, outcome.seconds)


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements as Markdown."""
    lines = [
        "| hosts | ranks | connections | most at once | bytes sent | bytes received | bytes per rank "
        "| server's processor time, ms | seconds |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {m.hosts:,} | {m.ranks:,} | {m.connections:,} | {m.most_open:,} | {m.bytes_sent:,} | {m.bytes_received:,} "
        f"| {m.bytes_in_all / m.ranks:,.0f} | {1e3 * m.server_seconds:,.0f} | {m.seconds:.2f} |"
        for m in measurements
    ]
    return "\n".join(lines)


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """Draws connections, bytes and time over ranks, a line for each number of ranks on a host."""
    figure, grid = pyplot.subplots(1, len(_PANELS), figsize=(18, 4.5), layout="constrained")
    for axes, (name, label) in zip(grid, _PANELS, strict=True):
        _panel(axes, measurements, name, label)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _panel(axes: Any, measurements: Sequence[Measurement], name: str, label: str) -> None:
    unit = 1024 if name == "bytes_in_all" else 1
    for local_size in dict.fromkeys(m.ranks // m.hosts for m in measurements):
        points = [(m.ranks, getattr(m, name) / unit) for m in measurements if m.ranks // m.hosts == local_size]
        axes.plot(*zip(*sorted(points), strict=True), marker=".", label=f"{local_size} a host")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_title(label)
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 48, 104, 200, 400, 600, 800, 1000])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    jobs = [(ranks, local_size) for local_size in arguments.ranks_per_host for ranks in sorted(arguments.ranks)]
    for ranks, local_size in jobs:
        if ranks % local_size or ranks < 2 * local_size:
            parser.error(f"--ranks {ranks}: expected at least two hosts with {local_size} ranks each")
    measurements = []
    before = load()
    for ranks, local_size in jobs:
        measurements.append(measure(ranks // local_size, local_size))
        print(f"{ranks} ranks, {local_size} a host: {measurements[-1].seconds:.1f} s", file=sys.stderr)
    text = f"{table(measurements)}\n\nLoad of the machine: {before} to {load()}.\n\n![As a picture](rendezvous.png)\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    plot(measurements, arguments.output / "rendezvous.png")
    (arguments.output / "rendezvous.json").write_text(json.dumps([asdict(m) for m in measurements], indent=1) + "\n")
    (arguments.output / "rendezvous.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
