"""--check-build and --version: what this installation can do.

The sections and names are those of Horovod, so that scripts which look for "[X] PyTorch" find it where it always was.
New lines: NumPy, a framework of its own here, and Native, the engine that is built in. MPI and Gloo are marked only if
a job can really use them: a script that wants to know whether horovodrun works without MPI should look for Native.
"""

from __future__ import annotations

import importlib
import importlib.util

FRAMEWORKS = (  # Shown as, our binding, the package it binds.
    ("TensorFlow", "horovod.tensorflow", "tensorflow"),
    ("PyTorch", "horovod.torch", "torch"),
    ("MXNet", "horovod.mxnet", "mxnet"),
    ("NumPy", "horovod.numpy", "numpy"),
)


def version() -> str:
    """The version of the installed package, or of the source tree if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        import horovod

        return str(horovod.__version__)


def _engine_loads() -> bool:
    try:
        importlib.import_module("horovod._core")
    except ImportError:
        return False
    return True


def _exists(module: str) -> bool:
    """Whether a module can be found, without importing it: frameworks take seconds."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def build_report() -> str:
    """The text of --check-build."""
    native = _engine_loads()
    sections = {
        "Available Frameworks": {
            name: native and _exists(binding) and _exists(package) for name, binding, package in FRAMEWORKS
        },
        "Available Controllers": {"MPI": False, "Gloo": False, "Native": native},
        "Available Tensor Operations": {
            "NCCL": False,
            "DDL": False,
            "CCL": False,
            "MPI": False,
            "Gloo": False,
            "Native": native,
        },
    }
    lines = [f"Horovod v{version()}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if present else ' '}] {name}" for name, present in entries.items()]
    return "\n".join(lines)
