"""How the rendezvous grows with the job: connections, bytes and time at the server, as a table and a plot.

    python rendezvous_scaling.py [--hosts 2 10 100 1000] [--ranks-per-host 1 8] [--output DIR]

The real server and, for every host, the real connections of its leader, encrypted as they are between machines; all in
this process and over real sockets, only the ranks behind the leaders are not there. The time is that of one core which
plays all of them: on a cluster every leader has its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from simulated_hosts import KEY, meet

from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.server import RendezvousServer


@dataclass(frozen=True)
class Measurement:
    """One job that met."""

    hosts: int
    ranks: int
    connections: int
    bytes_sent: int  # by the server
    bytes_passed_on: int  # by the host that passes on most
    seconds: float


def measure(hosts: int, local_size: int) -> Measurement:
    """Brings a job together."""
    listener = listen_at("127.0.0.1", 0)
    address: tuple[str, int] = listener.getsockname()
    server = RendezvousServer(listener, KEY, [f"host{rank // local_size}" for rank in range(hosts * local_size)])
    with serving(server):
        start = time.monotonic()
        made = meet(address, hosts, local_size)
        seconds = time.monotonic() - start
    passed_on = max(host.bytes_passed_on for host in made)
    return Measurement(hosts, hosts * local_size, hosts, server.bytes_sent, passed_on, seconds)


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements as Markdown."""
    lines = [
        "| hosts | ranks | connections | bytes sent | bytes per rank | most bytes passed on by a host | seconds |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {m.hosts:,} | {m.ranks:,} | {m.connections:,} | {m.bytes_sent:,} | {m.bytes_sent // m.ranks:,} "
        f"| {m.bytes_passed_on:,} | {m.seconds:.2f} |"
        for m in measurements
    ]
    return "\n".join(lines)


def plot(measurements: Sequence[Measurement]) -> str:
    """Connections, bytes and time over ranks, each relative to its largest, as an SVG."""
    width, height, margin = 640, 400, 50
    largest = max(m.ranks for m in measurements)
    curves: tuple[tuple[str, str, list[float]], ...] = (
        ("connections", "#1f77b4", [m.connections for m in measurements]),
        ("bytes sent", "#d62728", [m.bytes_sent for m in measurements]),
        ("seconds", "#2ca02c", [m.seconds for m in measurements]),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{margin},{margin} V{height - margin} H{width - margin}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">ranks (up to {largest:,})</text>',
    ]
    for number, (name, colour, values) in enumerate(curves):
        top = max(values) or 1
        points = " ".join(
            f"{margin + m.ranks / largest * (width - 2 * margin):.1f},"
            f"{height - margin - value / top * (height - 2 * margin):.1f}"
            for m, value in zip(measurements, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{name}: up to {top:,.2f}" if name == "seconds" else f"{name}: up to {top:,.0f}"
        parts.append(f'<text x="{margin + 10}" y="{margin + 16 * (number + 1)}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 5, 10, 20, 50, 100, 200, 500, 1000])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 5 * max(arguments.hosts) + 100  # Both ends of every connection are here, and of those between hosts.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(files, needed), most), most))
    arguments.output.mkdir(parents=True, exist_ok=True)
    everything = []
    for local_size in arguments.ranks_per_host:
        measurements = [measure(hosts, local_size) for hosts in sorted(arguments.hosts)]
        everything += measurements
        name = f"rendezvous-{local_size}-per-host"
        (arguments.output / f"{name}.svg").write_text(plot(measurements))
        print(f"{local_size} rank(s) a host\n\n{table(measurements)}\n")
    (arguments.output / "rendezvous.json").write_text(json.dumps([asdict(m) for m in everything], indent=1) + "\n")
    (arguments.output / "rendezvous.md").write_text(table(everything) + "\n")


if __name__ == "__main__":
    main()
