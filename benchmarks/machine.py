"""What the figures depend on: processor, kernel, versions. Nothing that names this machine."""

import os
import platform
from importlib import metadata
from pathlib import Path


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _caches() -> str:
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def load() -> str:
    """The load averages of the last minute, 5 and 15 minutes: other programs on the cores spoil the figures."""
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


def describe_machine() -> dict[str, str]:
    """Returns what to print above the figures."""
    return {
        "processor": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches of a core": _caches(),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "Python": platform.python_version(),
        **{package: metadata.version(package) for package in ("horovod", "torch", "numpy")},
    }
