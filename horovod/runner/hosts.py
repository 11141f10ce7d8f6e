"""Which hosts, how many slots, who gets which rank."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod.runner.errors import UsageError

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[\w.-]+))(?::(?P<slots>[0-9]{1,9}))?")
_HOSTFILE_LINE = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[\w.-]+))(?:\s+slots\s*=\s*(?P<slots>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Host:
    """A host and how many workers it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The place of one worker."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def _host(match: re.Match[str], source: str) -> Host:
    name = match["name"]
    if name is None:
        name = match["address"]
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise UsageError(f"{source}: [{name}] is not an IPv6 address") from None
    slots = int(match["slots"] or 1)
    if slots < 1:
        raise UsageError(f"{source}: {name} has no slots; at least 1 is needed")
    return Host(name, slots)


def _merge(hosts: Sequence[Host]) -> list[Host]:
    """Add up the slots of a host that is named more than once."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def parse_hosts(text: str) -> list[Host]:
    """Read the text of -H, such as "h1:2,h2,[::1]:4". Without a number a host has one slot.

    Raises:
        UsageError: The text is something else.
    """
    hosts = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if match is None:
            hint = "; an IPv6 address is written [address]:slots" if item.count(":") > 1 else ""
            raise UsageError(f"-H: expected host:slots, such as localhost:4, got '{item.strip()}'{hint}")
        hosts.append(_host(match, "-H"))
    return _merge(hosts)


def parse_hostfile(path: str) -> list[Host]:
    """Read a file with lines "<host> slots=<n>"; without a number a host has one slot, # begins a comment.

    Raises:
        UsageError: The file can't be read or has other lines.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # Some editors begin a file with a mark.
    except OSError as error:
        raise UsageError(f"--hostfile: can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--hostfile: {path} is not a text file") from None
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOSTFILE_LINE.fullmatch(content)
        if match is None:
            raise UsageError(f"--hostfile: {path}, line {number}: expected '<host> slots=<n>', got '{content}'")
        hosts.append(_host(match, f"--hostfile: {path}, line {number}"))
    if not hosts:
        raise UsageError(f"--hostfile: {path} names no host")
    return _merge(hosts)


def is_local(name: str) -> bool:
    """Whether a host name or address is this machine. A name that is not known here may be one that ssh knows."""
    if name.lower() in ("localhost", "127.0.0.1", "::1", socket.gethostname().lower()):
        return True
    from horovod.common.rendezvous.addresses import is_of_this_machine, resolve

    try:
        found = resolve(name, 0)
    except OSError:
        return False
    return any(is_of_this_machine(address) for _, address in found)


def assign_slots(hosts: Sequence[Host], size: int) -> list[Slot]:
    """Give out the ranks: hosts in their order, the slots of a host one after the other, `size` workers in all.

    The cross rank of a worker counts the hosts before its own that have its local rank; the cross size counts all
    such hosts.

    Raises:
        UsageError: There are too few slots.
    """
    available = sum(host.slots for host in hosts)
    if available < size:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(f"-np {size} needs {size} slots, but there are {available} ({named})")
    used: list[tuple[str, int]] = []
    left = size
    for host in hosts:
        count = min(host.slots, left)
        if count:
            used.append((host.name, count))
            left -= count
    slots: list[Slot] = []
    for index, (name, count) in enumerate(used):
        for local_rank in range(count):
            slots.append(
                Slot(
                    hostname=name,
                    rank=len(slots),
                    local_rank=local_rank,
                    cross_rank=sum(other > local_rank for _, other in used[:index]),
                    size=size,
                    local_size=count,
                    cross_size=sum(other > local_rank for _, other in used),
                )
            )
    return slots


def host_names(slots: Sequence[Slot]) -> list[str]:
    """The hosts that a job uses, in the order of their ranks."""
    return list(dict.fromkeys(slot.hostname for slot in slots))
