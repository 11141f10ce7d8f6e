"""The table of tunables: settings that the launcher only hands on.

A tunable is an option, an environment variable of the workers and a key of the configuration file. The command line
wins over the file. A tunable is exported only if it was given. Adding one is one entry in TUNABLES.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from horovod.runner.errors import UsageError

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def cores(text: str | int) -> str:
    """A core, or a comma-separated list with one core for each local rank."""
    numbers = [int(item) for item in str(text).split(",")]
    if any(number < 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"cores must be >= 0, not {text}")
    return ",".join(map(str, numbers))


def log_level(text: str) -> str:
    """One of LOG_LEVELS, in either case."""
    if text.upper() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(LOG_LEVELS)}, not '{text}'")
    return text.upper()


def share(text: str | float) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in [0, 1], not {text}")
    return value


@dataclass(frozen=True)
class Tunable:
    """One setting that is handed on to the workers."""

    section: str  # Of the configuration file.
    option: str  # Without the leading dashes.
    type: Callable[[Any], Any]  # bool: a pair of options, --x and --no-x.
    variable: str
    key: str  # Within its section.
    help: str
    export: Callable[[Any], str] = str
    later: str = ""  # The feature it belongs to, if this version does not have it.

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments."""
        return self.option.replace("-", "_")


def _flag(value: bool) -> str:
    return str(int(value))


def _inverted_flag(value: bool) -> str:
    return str(int(not value))


def _mebibytes(value: int) -> str:
    return str(value << 20)


SECTIONS = {  # Of the configuration file, and the title of their options in --help.
    "params": "tuneable parameters",
    "autotune": "autotune",
    "timeline": "timeline",
    "stall_check": "stall check",
    "library_options": "library",
    "logging": "logging",
}

_AUTOTUNE = "autotuning"
_TIMELINE = "the timeline"

# What it is, then what it is for.
# fmt: off
TUNABLES = (
    Tunable("params", "fusion-threshold-mb", int, "HOROVOD_FUSION_THRESHOLD", "fusion_threshold_mb",
            "Largest batch of fused tensors in MiB; 0: no fusion (default: 128).", _mebibytes),
    Tunable("params", "cycle-time-ms", float, "HOROVOD_CYCLE_TIME", "cycle_time_ms",
            "Time between rounds of agreement; handed on, the engine has no fixed cycle (default: 1)."),
    Tunable("params", "cache-capacity", int, "HOROVOD_CACHE_CAPACITY", "cache_capacity",
            "Tensor names that are agreed on by one bit; 0: none (default: 1024)."),
    Tunable("params", "hierarchical-allreduce", bool, "HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical_allreduce",
            "Reduce within hosts first; no effect on one host.", _flag),
    Tunable("params", "hierarchical-allgather", bool, "HOROVOD_HIERARCHICAL_ALLGATHER", "hierarchical_allgather",
            "Gather within hosts first; no effect on one host.", _flag),
    Tunable("params", "torus-allreduce", bool, "HOROVOD_TORUS_ALLREDUCE", "torus_allreduce",
            "Reduce within and across hosts; no effect on one host.", _flag),
    Tunable("autotune", "autotune", bool, "HOROVOD_AUTOTUNE", "enabled",
            "Tune parameters during training.", _flag, _AUTOTUNE),
    Tunable("autotune", "autotune-log-file", str, "HOROVOD_AUTOTUNE_LOG", "log_file",
            "CSV file with what was tried.", str, _AUTOTUNE),
    Tunable("autotune", "autotune-warmup-samples", int, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "warmup_samples",
            "Samples to throw away (default: 3).", str, _AUTOTUNE),
    Tunable("autotune", "autotune-steps-per-sample", int, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "steps_per_sample",
            "Steps for one score (default: 10).", str, _AUTOTUNE),
    Tunable("autotune", "autotune-bayes-opt-max-samples", int,
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "bayes_opt_max_samples",
            "Samples of the search (default: 20).", str, _AUTOTUNE),
    Tunable("autotune", "autotune-gaussian-process-noise", share,
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "gaussian_process_noise",
            "Noise of the model, 0 to 1 (default: 0.8).", str, _AUTOTUNE),
    Tunable("timeline", "timeline-filename", str, "HOROVOD_TIMELINE", "filename",
            "File for a trace of all operations.", str, _TIMELINE),
    Tunable("timeline", "timeline-mark-cycles", bool, "HOROVOD_TIMELINE_MARK_CYCLES", "mark_cycles",
            "Mark cycles in the trace.", _flag, _TIMELINE),
    Tunable("stall_check", "stall-check", bool, "HOROVOD_STALL_CHECK_DISABLE", "enabled",
            "Warn when some ranks do not submit a tensor that others wait for (default: on).", _inverted_flag),
    Tunable("stall_check", "stall-check-warning-time-seconds", int,
            "HOROVOD_STALL_CHECK_TIME_SECONDS", "warning_time_seconds",
            "Warn after this time (default: 60)."),
    Tunable("stall_check", "stall-check-shutdown-time-seconds", int,
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "shutdown_time_seconds",
            "Give up after this time; 0: never (default: 0)."),
    Tunable("library_options", "mpi-threads-disable", bool, "HOROVOD_MPI_THREADS_DISABLE", "mpi_threads_disable",
            "Use MPI from one thread; handed on.", _flag),
    Tunable("library_options", "num-nccl-streams", int, "HOROVOD_NUM_NCCL_STREAMS", "num_nccl_streams",
            "Number of NCCL streams; handed on (default: 1)."),
    Tunable("library_options", "thread-affinity", cores, "HOROVOD_THREAD_AFFINITY", "thread_affinity",
            "Core of the background thread, or a comma-separated list with one for each local rank."),
    Tunable("library_options", "gloo-timeout-seconds", int, "HOROVOD_GLOO_TIMEOUT_SECONDS", "gloo_timeout_seconds",
            "Time limit for connecting; handed on (default: 30)."),
    Tunable("logging", "log-level", log_level, "HOROVOD_LOG_LEVEL", "level",
            f"Least severe messages to log: {', '.join(LOG_LEVELS)} (default: WARNING)."),
    Tunable("logging", "log-with-timestamp", bool, "HOROVOD_LOG_HIDE_TIME", "with_timestamp",
            "Put the time in front of log messages (default: on).", _inverted_flag),
)
# fmt: on


def tunable_variables(args: argparse.Namespace) -> dict[str, str]:
    """The variables of the tunables that were given."""
    return {t.variable: t.export(v) for t in TUNABLES if (v := getattr(args, t.name)) is not None and not t.later}


def check_tunables(args: argparse.Namespace) -> None:
    """Refuse values out of range and settings of features that this version does not have.

    Raises:
        UsageError: One was found.
    """
    for tunable in TUNABLES:
        value = getattr(args, tunable.name)
        if type(value) in (int, float) and not value >= 0:
            raise UsageError(f"{tunable.name}={value} must be >= 0")
        if tunable.later and value is not None and value is not False:
            raise UsageError(f"--{tunable.option}: {tunable.later} is not available in this version")


def apply_settings(args: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Fill in settings of a configuration file, by attribute, where the command line has none."""
    tunes = settings.get("autotune") if args.autotune is None else args.autotune
    for name, value in settings.items():
        if tunes is False and name.startswith("autotune_"):  # Switched off: how it would be done does not matter.
            continue
        if getattr(args, name) is None:
            setattr(args, name, value)
