"""The environment of a worker: every HOROVOD_* variable that init reads, with its default and what it may be.

A value that can't be understood is a ValueError that names the variable: a misspelt number must not silently become
the default. An empty value counts as not set. The launcher sets the identity (HOROVOD_RANK ... HOROVOD_JOB_ID), the
user the rest.
"""

import logging
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from horovod.common import schedulers

_log = logging.getLogger("horovod")

ALLREDUCES = ("hierarchical", "ring")
RENDEZVOUS_SERVERS = ("rank0", "launcher")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Kind(NamedTuple):
    """How a value is read, and what is expected in words."""

    parse: Callable[[str], Any]
    expected: str


def _int_from(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    word = text.lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    return int(text) > 0


def _text(text: str) -> str:
    text.encode()  # a UnicodeEncodeError if it was not UTF-8 in the environment
    return text


def _one_of(words: tuple[str, ...]) -> "Kind":
    """One of some words, in any case, as its number."""
    return Kind(lambda text: words.index(text.lower()), "one of " + ", ".join(words))


INT32_MAX = 2**31 - 1
COUNT = Kind(_int_from(0, INT32_MAX), "an integer from 0")
POSITIVE = Kind(_int_from(1, INT32_MAX), "an integer from 1")
BYTES = Kind(_int_from(0, 2**62), "a number of bytes, an integer from 0")
SECONDS = Kind(_seconds, "a number of seconds from 0")
POSITIVE_SECONDS = Kind(_positive_seconds, "a number of seconds greater than 0")
NUMBER = Kind(_seconds, "a number from 0")
SWITCH = Kind(_switch, "0 or 1")
LOG_LEVEL = _one_of(LOG_LEVELS)
PORT = Kind(_int_from(1, 65535), "a port, an integer from 1 to 65535")
TEXT = Kind(_text, "text in UTF-8")
ANYTHING = Kind(str, "any bytes")

# name: (kind, default). The one table of what init reads.
VARIABLES: dict[str, tuple[Kind, Any]] = {
    # Who this process is.
    "HOROVOD_RANK": (COUNT, None),
    "HOROVOD_SIZE": (POSITIVE, None),
    "HOROVOD_LOCAL_RANK": (COUNT, None),
    "HOROVOD_LOCAL_SIZE": (POSITIVE, None),
    "HOROVOD_CROSS_RANK": (COUNT, None),
    "HOROVOD_CROSS_SIZE": (POSITIVE, None),
    "HOROVOD_HOSTNAME": (TEXT, None),
    "HOROVOD_JOB_ID": (TEXT, None),
    "HOROVOD_SECRET_KEY": (ANYTHING, None),
    "HOROVOD_SECRET_KEY_FILE": (ANYTHING, None),
    # Where several hosts meet.
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": (TEXT, None),
    "HOROVOD_GLOO_RENDEZVOUS_PORT": (PORT, None),
    "HOROVOD_GLOO_IFACE": (TEXT, None),
    "HOROVOD_HOST_ADDRESS": (TEXT, None),
    "HOROVOD_RENDEZVOUS_SERVER": (_one_of(RENDEZVOUS_SERVERS), RENDEZVOUS_SERVERS.index("rank0")),
    "HOROVOD_INSECURE": (SWITCH, False),
    "HOROVOD_ENCRYPT": (SWITCH, False),
    "HOROVOD_TLS_LIBRARY": (TEXT, "libssl.so.3"),
    # What can be tuned.
    "HOROVOD_ALLREDUCE": (_one_of(ALLREDUCES), ALLREDUCES.index("hierarchical")),
    "HOROVOD_FUSION_THRESHOLD": (BYTES, 128 * 1024 * 1024),
    "HOROVOD_CACHE_CAPACITY": (COUNT, 1024),
    "HOROVOD_STALL_CHECK_DISABLE": (SWITCH, False),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": (SECONDS, 60.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": (SECONDS, 0.0),
    "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": (POSITIVE_SECONDS, 30.0),
    "HOROVOD_START_TIMEOUT": (POSITIVE_SECONDS, None),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": (POSITIVE_SECONDS, None),
    "HOROVOD_LOG_LEVEL": (LOG_LEVEL, LOG_LEVELS.index("warning")),
    "HOROVOD_LOG_HIDE_TIME": (SWITCH, False),
    # Understood and checked, so that existing scripts run; they have nothing to act on in this engine.
    "HOROVOD_CYCLE_TIME": (NUMBER, None),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": (SWITCH, None),
    "HOROVOD_HIERARCHICAL_ALLGATHER": (SWITCH, None),
    "HOROVOD_TORUS_ALLREDUCE": (SWITCH, None),
    "HOROVOD_DISABLE_GROUP_FUSION": (SWITCH, None),
    "HOROVOD_DYNAMIC_PROCESS_SETS": (SWITCH, None),
    "HOROVOD_BATCH_D2D_MEMCOPIES": (SWITCH, None),
    "HOROVOD_NUM_NCCL_STREAMS": (POSITIVE, None),
    # Asked-for features that are not there: warned about when set.
    "HOROVOD_TIMELINE": (ANYTHING, None),
    "HOROVOD_AUTOTUNE": (SWITCH, None),
    "HOROVOD_ELASTIC": (SWITCH, None),
}
_MISSING_FEATURES = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_ELASTIC")


# The cross rank and size of one whom nobody has told; its local rank then need not ascend with the rank.
UNTOLD = (0, 0)


@dataclass(frozen=True)
class Identity:
    """Who this process is in the job; a cross size of 0 if nobody has told, and the meeting has to find out."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    job_id: str
    secret_key: bytes = field(repr=False)  # not for tracebacks


@dataclass(frozen=True)
class Network:
    """Where the hosts of a job meet, if there are several."""

    address: str  # empty: not set
    port: int  # 0: not set
    interface: str | None  # to use for the connections between ranks
    own_address: str | None  # to use for them, if it is known
    launcher_serves: bool  # the server runs there already; otherwise rank 0 runs it
    insecure: bool  # to go without a key
    encrypt: bool = False  # tensors too
    names_come_late: bool = False  # the name of the address may not be known yet
    advice: str = ""  # what may help if nobody can be reached there


@dataclass(frozen=True)
class Tunables:
    """What the user can set."""

    fusion_threshold: int
    cache_capacity: int
    heartbeat_timeout: float
    stall_warning: float  # 0: no stall check
    stall_shutdown: float  # 0: never
    log_level: int
    log_hide_time: bool
    start_timeout: float
    allreduce_ring: bool


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Returns the value of a variable of the table, or its default.

    Raises:
        ValueError: The text is not what the variable may be.
    """
    kind, default = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name, "").strip()
    if not text:
        return default
    try:
        return kind.parse(text)
    except ValueError:
        # A secret must not appear in a message; the key may be anything, so it never does.
        raise ValueError(f"{name}={text!r} can't be understood: expected {kind.expected}.") from None


def read_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """Reads who this process is; without any of the launcher's variables, a job of one rank.

    Raises:
        ValueError: Only some of the variables are set, or they contradict each other.
    """
    required = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    values = {name: read(name, environ) for name in required}
    missing = [name for name in required if values[name] is None]
    if len(missing) == len(required):
        values.update(zip(required, (0, 1, 0, 1), strict=True))
    elif missing:
        given = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        raise ValueError(
            f"{', '.join(missing)} must be set too: found only {given}. Start the script with horovodrun, or set all "
            f"of {', '.join(required)}, or none of them to run as one process."
        )
    rank, size, local_rank, local_size = (values[name] for name in required)
    cross_rank, cross_size = _read_cross(local_size == size, environ)
    for kind, index, count in (
        ("", rank, size),
        ("LOCAL_", local_rank, local_size),
        ("CROSS_", cross_rank, cross_size),
    ):
        if index >= count and (index, count) != UNTOLD:
            raise ValueError(
                f"HOROVOD_{kind}RANK={index} must be smaller than HOROVOD_{kind}SIZE={count}: ranks count from 0."
            )
    if local_size > size:
        raise ValueError(f"HOROVOD_LOCAL_SIZE={local_size} can't be greater than HOROVOD_SIZE={size}.")
    host = read("HOROVOD_HOSTNAME", environ) or socket.gethostname()
    job_id = read("HOROVOD_JOB_ID", environ) or ""
    return Identity(rank, size, local_rank, local_size, cross_rank, cross_size, host, job_id, read_secret_key(environ))


def _read_cross(on_one_host: bool, environ: Mapping[str, str] | None) -> tuple[int, int]:
    """The cross rank and size; whoever gives one of them means it."""
    rank, size = read("HOROVOD_CROSS_RANK", environ), read("HOROVOD_CROSS_SIZE", environ)
    if rank is None and size is None and not on_one_host:
        return UNTOLD
    return rank or 0, size or 1


def read_network(environ: Mapping[str, str] | None = None) -> Network:
    """Reads where the hosts of the job meet.

    Raises:
        ValueError: A value can't be understood.
    """
    return Network(
        address=read("HOROVOD_GLOO_RENDEZVOUS_ADDR", environ) or "",
        port=read("HOROVOD_GLOO_RENDEZVOUS_PORT", environ) or 0,
        interface=read("HOROVOD_GLOO_IFACE", environ),
        own_address=read("HOROVOD_HOST_ADDRESS", environ),
        launcher_serves=read("HOROVOD_RENDEZVOUS_SERVER", environ) == RENDEZVOUS_SERVERS.index("launcher"),
        insecure=read("HOROVOD_INSECURE", environ),
        encrypt=read("HOROVOD_ENCRYPT", environ),
        names_come_late=schedulers.names_come_late(os.environ if environ is None else environ),
        advice=schedulers.advice(os.environ if environ is None else environ),
    )


def read_secret_key(environ: Mapping[str, str] | None) -> bytes:
    """The job's key; empty if there is none.

    Raises:
        ValueError: The file that should hold it can't be read.
    """
    path = read("HOROVOD_SECRET_KEY_FILE", environ)
    if path is None:
        key: str = read("HOROVOD_SECRET_KEY", environ) or ""
        return os.fsencode(key)  # the bytes that are in the environment, whatever the locale
    try:
        with open(path, "rb") as file:
            content = file.read(4096).strip()
    except OSError as error:
        raise ValueError(f"HOROVOD_SECRET_KEY_FILE={path!r} can't be read: {error.strerror}.") from None
    if not content:
        raise ValueError(f"HOROVOD_SECRET_KEY_FILE={path!r} is empty: expected the job's key.")
    return content


def read_tunables(environ: Mapping[str, str] | None = None) -> Tunables:
    """Reads and checks everything that the user can set.

    Raises:
        ValueError: A value can't be understood.
    """
    values = {name: read(name, environ) for name in VARIABLES}
    for name in _MISSING_FEATURES:
        if values[name]:
            _log.warning("%s is set, but this version of Horovod does not have that feature.", name)
    warning, shutdown = values["HOROVOD_STALL_CHECK_TIME_SECONDS"], values["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    if values["HOROVOD_STALL_CHECK_DISABLE"] or warning == 0:
        warning = shutdown = 0.0
    elif 0 < shutdown < warning:
        _log.warning(
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is ignored: smaller than HOROVOD_STALL_CHECK_TIME_SECONDS=%g.",
            shutdown,
            warning,
        )
        shutdown = 0.0
    # Both say how long a rank may take to come; who asked for more patience gets it.
    timeouts = [values[name] for name in ("HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")]
    return Tunables(
        fusion_threshold=values["HOROVOD_FUSION_THRESHOLD"],
        cache_capacity=values["HOROVOD_CACHE_CAPACITY"],
        heartbeat_timeout=values["HOROVOD_HEARTBEAT_TIMEOUT_SECONDS"],
        stall_warning=warning,
        stall_shutdown=shutdown,
        log_level=values["HOROVOD_LOG_LEVEL"],
        log_hide_time=values["HOROVOD_LOG_HIDE_TIME"],
        start_timeout=max((seconds for seconds in timeouts if seconds is not None), default=30.0),
        allreduce_ring=values["HOROVOD_ALLREDUCE"] == ALLREDUCES.index("ring"),
    )
