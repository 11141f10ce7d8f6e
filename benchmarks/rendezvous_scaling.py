"""How the rendezvous grows with the job: connections, bytes and time at the server, as a table and a plot.

    python rendezvous_scaling.py [--hosts 2 10 100 1000] [--ranks-per-host 1 8] [--output DIR]

The real server and, for every host, the real connecting side of its leader, all in this process and over real
sockets; only the ranks behind the leaders are not there. The time is that of one core which plays all of them: on a
cluster every leader has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from horovod import __version__
from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.encryption import find_encryption
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import (
    Configuration,
    Endpoint,
    HostHello,
    Kind,
    Member,
    Place,
    Report,
    encode_frame,
)
from horovod.common.rendezvous.proof import Claim, Purpose
from horovod.common.rendezvous.server import RendezvousServer, host_key

KEY = host_key(b"a key for measurements", "measurement")
ENCRYPTION = find_encryption()  # as that of real hosts
CONFIGURATION = Configuration([], 1 << 27, 1024, False)
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Measurement:
    """One job that met."""

    hosts: int
    ranks: int
    connections: int
    bytes_sent: int
    seconds: float


class Leader:
    """The leader of a host."""

    def __init__(self, loop: Loop, address: tuple[str, int], index: int, local_size: int, hosts: int) -> None:
        """Begins to connect."""
        first = index * local_size
        place = Place(first, hosts * local_size, 0, local_size, index, hosts, f"host{index}")
        members = [
            Member(first + local, index, hosts, os.getpid(), Endpoint("10.0.0.1", 1000 + local))
            for local in range(local_size)
        ]
        self.is_done = False
        self._report = Report(CONFIGURATION, 0, members)
        self._connection: Connection | None = None
        hello = HostHello(__version__, place, os.getpid(), LIMIT_SECONDS)
        self._caller = Caller(
            loop,
            [(socket.AF_INET, address)],
            KEY,
            claim=Claim(Purpose.HOST, 0, first, 0),
            first_frame=encode_frame(Kind.HELLO, hello.encode()),
            on_answer=self._on_answer,
            encryption=ENCRYPTION,
        )

    def _on_answer(self, connection: Connection, kind: Kind, body: bytes) -> None:
        self._connection = connection
        connection.on_frame = self._on_frame
        self._on_frame(kind, body)

    def _on_frame(self, kind: Kind, _body: bytes) -> None:
        assert self._connection is not None
        answers = {Kind.ACCEPTED: (Kind.REPORT, self._report.encode()), Kind.TABLE: (Kind.LINKED, b"")}
        answers[Kind.GO] = (Kind.STARTED, b"")
        if kind in answers:
            self._connection.say(*answers[kind])
        else:
            assert kind is Kind.DONE, f"the server said {kind.name}"
            self.is_done = True
            self._connection.close()


def measure(hosts: int, local_size: int) -> Measurement:
    """Brings a job together."""
    listener = listen_at("127.0.0.1", 0)
    address: tuple[str, int] = listener.getsockname()
    server = RendezvousServer(listener, KEY, [f"host{rank // local_size}" for rank in range(hosts * local_size)])
    with serving(server):
        loop = Loop()
        start = time.monotonic()
        leaders = [Leader(loop, address, index, local_size, hosts) for index in range(hosts)]
        if not loop.run_until(lambda: all(leader.is_done for leader in leaders), start + LIMIT_SECONDS):
            raise TimeoutError(f"{hosts} hosts did not meet within {LIMIT_SECONDS:g} s")
        seconds = time.monotonic() - start
        loop.close()
    return Measurement(hosts, hosts * local_size, hosts, server.bytes_sent, seconds)


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements as Markdown."""
    lines = ["| hosts | ranks | connections | bytes sent | bytes per host | seconds |", "|--:|--:|--:|--:|--:|--:|"]
    lines += [
        f"| {m.hosts:,} | {m.ranks:,} | {m.connections:,} | {m.bytes_sent:,} | {m.bytes_sent // m.hosts:,} "
        f"| {m.seconds:.2f} |"
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
    needed = 2 * max(arguments.hosts) + 100  # Both ends of every connection are here.
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
