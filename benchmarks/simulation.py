"""Agreement of up to 1,024 ranks, simulated by agreement.cc, which is linked with the engine that was built."""

import json
import subprocess
import sys
from pathlib import Path

from results import Figure
from teams import build_program

MESSAGES = "simulated: messages at the coordinator, a repeated step"
CPU = "simulated: CPU of the coordinator, a repeated step, s"
FIRST_MESSAGES = "simulated: messages at the coordinator, first step"
FIRST_CPU = "simulated: CPU of the coordinator, first step, s"
LAYOUTS = {8: "8 ranks a host", 1: "1 rank a host"}
TENSORS = 400

_ROOT = Path(__file__).resolve().parents[1]
_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_HOSTS = 128  # beyond it minutes


def simulate(most_ranks: int) -> list[Figure]:
    """Runs it for powers of two up to this number of ranks. Left out, with a word why, where it can't be built."""
    build, source = _ROOT / "build", _ROOT / "benchmarks" / "agreement.cc"
    archives = [sorted(build.glob(f"cp3*/libhorovod_{name}.a"))[:1] for name in ("engine", "kernels")]
    libraries = [path for found in archives for path in found]
    if len(libraries) != 2:
        print("LEFT OUT: the simulation: build/ has no engine; `make install` builds it there", file=sys.stderr)
        return []
    options = [f"-I{_ROOT / 'src'}", f"-I{_ROOT / 'tests' / 'cpp'}", "-pthread"]
    program = build_program(source, build / "benchmarks" / "agreement", libraries, options)
    figures = []
    for of_a_host, way in LAYOUTS.items():
        for ranks in _RANKS:
            if ranks <= most_ranks and ranks // of_a_host <= _MOST_HOSTS:
                command = [str(program), str(ranks), str(of_a_host), str(TENSORS), "5"]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
                found = json.loads(ended.stdout)
                figures += [
                    Figure(MESSAGES, ranks, way, found["messages_in"] + found["messages_out"]),
                    Figure(CPU, ranks, way, found["cpu_ns"] * 1e-9),
                    Figure(FIRST_MESSAGES, ranks, way, found["first_messages"]),
                    Figure(FIRST_CPU, ranks, way, found["first_cpu_ns"] * 1e-9),
                ]
                print(f"{ranks} ranks, {way}, simulated: {json.dumps(found)}", flush=True)
    return figures
