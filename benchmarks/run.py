"""Measures horovod, its peers and the machine's limit side by side: python benchmarks/run.py [--quick].

Needs horovod, torch (CPU) and the packages of the extra `bench` installed, and a C++ compiler. Writes <output>/<name>
with .md, .json and .png and prints the tables. See docs/performance.md for what is measured and how.
"""

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from compare import Effort, compare
from costs import measure_agreement, measure_start_up, measure_waiting
from host_teams import HOST_WAYS, EncryptionStadium, HostStadium
from hosts import GIGABIT, UNSHAPED, TwoHosts, why_not
from machine import describe_machine, load
from mpi_environments import Mpi, find_mpis
from picture import draw
from report import goals_table, to_markdown
from results import Results
from simulation import simulate
from subject import (
    ALLREDUCE,
    COLLECTIVES,
    ENCRYPTION_WAYS,
    HOROVOD,
    HOROVOD_SHARED,
    HOROVOD_TORCH,
    LIMIT,
    LIMIT_OWN_PAGES,
    MEMCPY,
    MODELS,
    PEERS,
    STEP_WAYS,
    TOGETHER,
    TOGETHER_WAYS,
    TRAINING,
    Subject,
)
from teams import Stadium, build_program
from units import bytes_text, time_text

from horovod.common.rendezvous.encryption import find_encryption

_HERE = Path(__file__).resolve().parent
_KI, _MI = 1 << 10, 1 << 20
_TOGETHER_BYTES = 400 * 64 * 64 * 4
_UNITS = {"K": _KI, "M": _MI, "G": 1 << 30}
_TYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int32": 4, "int64": 8, "uint8": 1}

# Sizes of a run by section, for two ranks and for more of them.
Sizes = tuple[int, ...]
_ALLREDUCE: Sizes = (4, 256, 4 * _KI, 64 * _KI, 256 * _KI, _MI, 4 * _MI, 16 * _MI, 64 * _MI, 256 * _MI)
_ALLREDUCE_OF_MORE: Sizes = (4, 4 * _KI, 64 * _KI, _MI, 4 * _MI, 16 * _MI, 64 * _MI)
_OTHERS: Sizes = (_KI, 16 * _KI, 64 * _KI, _MI, 4 * _MI, 16 * _MI, 64 * _MI)
_OTHERS_OF_MORE: Sizes = (_KI, 64 * _KI, _MI, 16 * _MI)
_BETWEEN_HOSTS: Sizes = (4, 256, 4 * _KI, 64 * _KI, 256 * _KI, _MI, 4 * _MI, 16 * _MI, 64 * _MI, 256 * _MI)
_ENCRYPTED: Sizes = (4, 4 * _KI, 64 * _KI, _MI, 16 * _MI, 64 * _MI)
_ELEMENTS: Sizes = (64 * _KI, _MI, 4 * _MI)
_QUICK_ALLREDUCE: Sizes = (4, 4 * _KI, 64 * _KI, _MI, 4 * _MI, 16 * _MI)
_QUICK_ALLREDUCE_OF_MORE: Sizes = (4, 64 * _KI, 4 * _MI)
_QUICK_OTHERS: Sizes = (_KI, 64 * _KI, _MI)
_QUICK_OTHERS_OF_MORE: Sizes = (64 * _KI,)
_QUICK_BETWEEN_HOSTS: Sizes = (4, 64 * _KI, 4 * _MI)
_QUICK_ELEMENTS: Sizes = (256 * _KI,)


class Run:
    """One run: what to measure and how long, and what came so far."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        """Takes the arguments of the command."""
        self._quick: bool = args.quick
        rounds, seconds = (3, 0.04) if args.quick else (8, 0.15)
        self.effort = Effort(args.rounds or rounds, args.seconds or seconds, args.footprint)
        self._wait_seconds: float = args.wait or (1.0 if args.quick else 10.0)
        self._sizes: list[int] | None = args.sizes
        self.results = results

    def measure(self, stadium: Stadium, subject: Subject, ways: tuple[str, ...]) -> None:
        """Measures one subject and tells of it."""
        records = compare(stadium, subject, ways, self.effort)
        self.results.add(records)
        about = subject.model or f"{bytes_text(subject.bytes)} {subject.dtype}"
        where = f" on 2 hosts, {subject.link}" if subject.link else ""
        print(
            f"{subject.ranks} ranks{where}, {subject.kind}, {about}: "
            + ", ".join(f"{record.way} {time_text(record.median)}" for record in records),
            flush=True,
        )

    def allreduce(self, stadium: Stadium) -> None:
        """Blocking allreduce of float32 by size."""
        sizes, of_more = (
            (_QUICK_ALLREDUCE, _QUICK_ALLREDUCE_OF_MORE) if self._quick else (_ALLREDUCE, _ALLREDUCE_OF_MORE)
        )
        ways = (HOROVOD, HOROVOD_TORCH, HOROVOD_SHARED, *PEERS, LIMIT, LIMIT_OWN_PAGES, MEMCPY)
        for size in self._sizes or (sizes if stadium.ranks == 2 else of_more):
            self.measure(stadium, Subject(ALLREDUCE, stadium.ranks, size), ways)

    def between_hosts(self, stadium: HostStadium, links: Sequence[str]) -> None:
        """Blocking allreduce of float32 by size, over links between two hosts."""
        self._over(stadium, links, _QUICK_BETWEEN_HOSTS if self._quick else _BETWEEN_HOSTS, HOST_WAYS)

    def encryption(self, stadium: EncryptionStadium, links: Sequence[str]) -> None:
        """The same by what is encrypted."""
        self._over(stadium, links, _QUICK_BETWEEN_HOSTS if self._quick else _ENCRYPTED, ENCRYPTION_WAYS)

    def _over(
        self, stadium: HostStadium | EncryptionStadium, links: Sequence[str], sizes: Sizes, ways: tuple[str, ...]
    ) -> None:
        for link in links:
            stadium.hosts.shape(link)
            for size in self._sizes or sizes:
                self.measure(stadium, Subject(ALLREDUCE, stadium.ranks, size, link=link), ways)

    def collectives(self, stadium: Stadium) -> None:
        """The other collectives."""
        sizes, of_more = (_QUICK_OTHERS, _QUICK_OTHERS_OF_MORE) if self._quick else (_OTHERS, _OTHERS_OF_MORE)
        for kind in COLLECTIVES[1:]:
            for size in self._sizes or (sizes if stadium.ranks == 2 else of_more):
                self.measure(stadium, Subject(kind, stadium.ranks, size), (HOROVOD, HOROVOD_TORCH, *PEERS))

    def types(self, stadium: Stadium) -> None:
        """Other types of elements than float32, and float32 at as many."""
        if stadium.ranks > 2:
            return
        for count in _QUICK_ELEMENTS if self._quick else _ELEMENTS:
            for dtype, size in _TYPES.items():
                self.measure(stadium, Subject(ALLREDUCE, 2, count * size, dtype), (HOROVOD, HOROVOD_TORCH, *PEERS))

    def together(self, stadium: Stadium) -> None:
        """400 tensors at once."""
        if self._quick and stadium.ranks > 2:
            return
        ways = TOGETHER_WAYS if stadium.ranks == 2 else TOGETHER_WAYS[:-1]  # gloo needs seconds for one
        self.measure(stadium, Subject(TOGETHER, stadium.ranks, _TOGETHER_BYTES), ways)

    def training(self, stadium: Stadium) -> None:
        """Steps of training."""
        models = MODELS if stadium.ranks == 2 or not self._quick else MODELS[:1]
        for model in models:
            self.measure(stadium, Subject(TRAINING, stadium.ranks, model=model), STEP_WAYS)

    def costs(self, stadium: Stadium) -> None:
        """Waiting, agreement; and once import, init and memory."""
        self.results.add(figures=measure_agreement(stadium, 20 if self._quick else 200))
        self.results.add(figures=measure_waiting(stadium, self._wait_seconds))
        if stadium.ranks == 2:
            self.results.add(figures=measure_start_up(1 if self._quick else 5))

    def simulation(self, stadium: Stadium) -> None:
        """Agreement of many ranks; once, whatever the number of real ones."""
        if stadium.ranks == 2:
            self.results.add(figures=simulate(64 if self._quick else 1024))


SECTIONS: dict[str, Callable[[Run, Stadium], None]] = {
    "allreduce": Run.allreduce,
    "collectives": Run.collectives,
    "types": Run.types,
    "together": Run.together,
    "training": Run.training,
    "costs": Run.costs,
    "simulation": Run.simulation,
}
HOSTS, ENCRYPTION = "hosts", "encryption"
_ALL_SECTIONS = [*SECTIONS, HOSTS, ENCRYPTION]
LINKS = {"unshaped": UNSHAPED, "1gbit": GIGABIT}


def _size(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not number.isdigit() or int(number) * unit % 4 != 0 or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected a multiple of 4 bytes, like 4, 64K or 256M")
    return int(number) * unit


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures horovod, its peers and the machine's limit side by side.")
    parser.add_argument("--quick", action="store_true", help="a first picture, in less than three minutes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 7], help="one after the other")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_ALL_SECTIONS,
        default=_ALL_SECTIONS,
        metavar="SECTION",
        help=f"some of {', '.join(_ALL_SECTIONS)}; the rest of the result files stays as it is",
    )
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2], help="between two hosts")
    parser.add_argument("--links", choices=LINKS, nargs="+", default=list(LINKS), help="between two hosts")
    parser.add_argument("--sizes", type=_size, nargs="+", help="of collectives, like 4 64K 256M")
    parser.add_argument("--rounds", type=int, help="alternating rounds of each way")
    parser.add_argument("--seconds", type=float, help="how long a round should take")
    parser.add_argument(
        "--footprint",
        type=_size,
        default="64M",
        help="all buffers of a way together; should be twice the last cache (%(default)s)",
    )
    parser.add_argument("--wait", type=float, help="seconds by which the slow rank is late")
    parser.add_argument("--name", help="of the result files")
    parser.add_argument("--output", type=Path, default=_HERE / "results")
    return parser.parse_args()


def _describe_section(run: Run, section: str, before: str) -> None:
    described = {"date": datetime.date.today().isoformat(), **describe_machine()}
    run.results.machine[section] = described | {"load": f"{before} to {load()}"}


def _measure_on_one_host(run: Run, args: argparse.Namespace, mpis: Sequence[Mpi], name: str) -> None:
    sections = [section for section in args.only if section in SECTIONS]
    if not sections:
        return
    limit = build_program(
        *(_HERE / "limit.cc", _HERE.parent / "build" / "benchmarks" / "limit"),
        more=["-fno-tree-loop-distribute-patterns"],
    )
    for ranks in args.ranks:
        with Stadium(ranks, mpis, limit) as stadium:
            for section in sections:
                before = load()
                SECTIONS[section](run, stadium)
                _describe_section(run, f"{section}, {ranks} ranks", before)
                _report(run.results, args.output, name)


def _measure_between_hosts(run: Run, args: argparse.Namespace, mpis: Sequence[Mpi], name: str) -> None:
    if HOSTS not in args.only:
        return
    if reason := why_not():
        print(f"LEFT OUT: {HOSTS}: {reason}", file=sys.stderr)
        return
    limit = build_program(_HERE / "wire_limit.cc", _HERE.parent / "build" / "benchmarks" / "wire_limit")
    for per_host in args.ranks_per_host:
        with TwoHosts() as hosts, HostStadium(per_host, mpis, limit, hosts) as stadium:
            before = load()
            run.between_hosts(stadium, [LINKS[link] for link in args.links])
            _describe_section(run, f"{HOSTS}, {per_host} ranks each", before)
            _report(run.results, args.output, name)


def _measure_encryption(run: Run, args: argparse.Namespace, name: str) -> None:
    if ENCRYPTION not in args.only:
        return
    if reason := why_not() or find_encryption().trouble:
        print(f"LEFT OUT: {ENCRYPTION}: {reason}", file=sys.stderr)
        return
    for per_host in args.ranks_per_host[:1] if args.quick else args.ranks_per_host:
        with TwoHosts() as hosts, EncryptionStadium(per_host, hosts) as stadium:
            before = load()
            run.encryption(stadium, [LINKS[link] for link in args.links])
            _describe_section(run, f"{ENCRYPTION}, {per_host} ranks each", before)
            _report(run.results, args.output, name)


def _report(results: Results, output: Path, name: str) -> None:
    """Writes the tables; after each section, so that a run that is stopped has not been for nothing."""
    output.mkdir(parents=True, exist_ok=True)
    results.save(output / f"{name}.json")
    (output / f"{name}.md").write_text(to_markdown(results, name, f"{name}.png"))


def main() -> None:
    """The command."""
    args = _parse_args()
    name = args.name or ("quick" if args.quick else "latest")
    stored = args.output / f"{name}.json"
    partial = set(args.only) != set(_ALL_SECTIONS) and stored.exists()
    run = Run(args, Results.load(stored) if partial else Results())
    mpis = find_mpis() if set(args.only) != {ENCRYPTION} else []
    _measure_on_one_host(run, args, mpis, name)
    _measure_between_hosts(run, args, mpis, name)
    _measure_encryption(run, args, name)
    draw(run.results, args.output / f"{name}.png")
    print("\n".join(["", *goals_table(run.results)]))
    print(f"All tables are in {args.output / name}.md, with a picture in {name}.png.")


if __name__ == "__main__":
    main()
