"""Runs a training script on one process and on two and tells what the second one gained; `make demo` is this.

    python examples/speedup.py examples/pytorch_digits.py [ARGUMENT...]

The script must write its results to the JSON file given by --report, as pytorch_digits.py does.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HOROVODRUN = Path(sysconfig.get_path("scripts")) / "horovodrun"


def run(processes: int, command: list[str]) -> dict[str, Any]:
    """Run the script on some processes, with its output as it comes, and return its results."""
    environment = dict(os.environ)
    if "CI" in environment or not sys.stderr.isatty():
        environment["TQDM_DISABLE"] = "1"  # a live display is of no use in a file
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launch = [str(HOROVODRUN), "-np", str(processes), sys.executable, *command, "--report", str(report)]
        print(f"\n$ horovodrun -np {processes} python {' '.join(command)}", flush=True)
        ended = subprocess.run(launch, env=environment, check=False)
        if ended.returncode != 0:
            sys.exit(ended.returncode)
        results: dict[str, Any] = json.loads(report.read_text())
        return results


def main() -> None:
    """Run, compare, report."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    one, two = (run(processes, sys.argv[1:]) for processes in (1, 2))
    speedup = two["samples_per_s"] / one["samples_per_s"]
    cores = len(os.sched_getaffinity(0))
    print()
    print(f"{'processes':>10} {'accuracy':>10} {'samples/s':>12}")
    for results in (one, two):
        print(f"{results['processes']:>10} {results['accuracy']:>10.1%} {results['samples_per_s']:>12,.0f}")
    print(f"\nTwo processes were {speedup:.2f} times as fast as one (at best 2.00), with one core each.")
    if cores < 2:
        print("This machine has one core for both of them, so nothing could be gained.")


if __name__ == "__main__":
    main()
