"""Compares horovod with its peers on this machine: python benchmarks/run.py [--ranks 2 4 7] [--sizes 4 64K 64M].

Needs horovod and torch (CPU) installed. Writes <output>/<name>.md and .json and prints the tables.
See docs/performance.md for what is measured and how.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe_machine, load
from plan import BENCHMARKS, Plan
from report import to_markdown
from summary import Comparison, Waiting

_HERE = Path(__file__).resolve().parent
_DEFAULT_SIZES = ("4", "256", "4K", "64K", "256K", "1M", "4M", "16M", "64M")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _size(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    if not number.isdigit() or int(number) * unit % 4 != 0 or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected a multiple of 4 bytes, like 4, 64K or 256M")
    return int(number) * unit


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares horovod with gloo, in the same processes.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="one run for each of these numbers")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--sizes", type=_size, nargs="+", default=[_size(text) for text in _DEFAULT_SIZES])
    parser.add_argument("--rounds", type=int, default=8, help="alternating rounds of each peer")
    parser.add_argument("--large", type=_size, default=_size("16M"), help="bytes of the stream's large gradients")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds by which the slow rank is late")
    parser.add_argument("--name", default=datetime.date.today().isoformat(), help="of the result files")
    parser.add_argument("--output", type=Path, default=_HERE / "results")
    return parser.parse_args()


def _run_ranks(ranks: int, plan: Plan) -> tuple[list[Comparison], list[Waiting]]:
    """Runs the plan on so many ranks.

    Raises:
        SystemExit: A rank failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # -P: the installed horovod, not what lies in the current directory.
        launch = [sys.executable, "-P", "-m", "horovod.runner.launch", "-np", str(ranks)]
        worker = [sys.executable, str(_HERE / "worker.py"), scratch, plan.to_json()]
        single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ended = subprocess.run([*launch, *worker], env=os.environ | single_thread, check=False)
        if ended.returncode != 0:
            raise SystemExit(f"The benchmark on {ranks} ranks failed with exit status {ended.returncode}; see above.")
        results = json.loads((Path(scratch) / "results.json").read_text())
    return [Comparison.from_dict(line) for line in results["comparisons"]], [
        Waiting(**line) for line in results["waits"]
    ]


def main() -> None:
    """The command."""
    args = _parse_args()
    plan = Plan(
        benchmarks=tuple(args.benchmarks),
        sizes=tuple(args.sizes),
        rounds=args.rounds,
        large_elements=args.large // 4,
        wait_seconds=args.wait,
    )
    machine = {"date": datetime.date.today().isoformat(), **describe_machine(), "load before": load()}
    comparisons: list[Comparison] = []
    waits: list[Waiting] = []
    for ranks in args.ranks:
        of_sizes, of_waits = _run_ranks(ranks, plan)
        comparisons += of_sizes
        waits += of_waits
    machine["load after"] = load()
    text = to_markdown(machine, comparisons, waits)
    results = {
        "machine": machine,
        "comparisons": [dataclasses.asdict(line) for line in comparisons],
        "waits": [dataclasses.asdict(line) for line in waits],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.md").write_text(f"# Benchmarks: {args.name}\n\n{text}")
    (args.output / f"{args.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
