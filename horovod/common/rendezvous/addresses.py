"""Where this machine listens, and where the others are."""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.caller import Address
from horovod.common.rendezvous.messages import Endpoint

BACKLOG = 4096  # the kernel has its own limit as well
LOCAL_BACKLOG = 1024
# For the one whose connection to a rank's own port does not come about.
REACH_EACH_OTHER = (
    "Can these hosts reach each other, or is there a firewall? It must let TCP through to the ports that the system "
    "chooses (net.ipv4.ip_local_port_range)."
)

# For documentation only (RFC 5737): nobody has it, so the way there is the way to everywhere.
_ELSEWHERE = ("192.0.2.1", 1)


def resolve(host: str, port: int) -> list[Address]:
    """All addresses of a name, or the one that it is.

    Raises:
        OSError: The name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # between two dots there is nothing, or too much
        raise socket.gaierror(socket.EAI_NONAME, "it can't be the name of a host") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def own_addresses(interfaces: Sequence[str]) -> list[tuple[str, str]]:
    """The addresses of this machine by which others may reach it: interface and address, the likeliest first.

    Args:
        interfaces: Those to be used, in the order of preference; all that are up if none is given. Addresses that
            lead nowhere else (loopback, link-local) are left out, unless their interface is asked for by name.
    """
    import psutil

    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if interfaces and name not in interfaces:
            continue
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or name not in up:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if address.is_link_local or (address.is_loopback and not interfaces):
                continue
            found.append((name, str(address)))
    # The address by which ssh came is known to be one that others can reach, the one that leads out is likely to be.
    ssh = os.environ.get("SSH_CONNECTION", "").split()
    came_by = ssh[2] if len(ssh) == 4 else ""
    leads_out = ""
    with contextlib.suppress(OSError):
        leads_out = str(_address_towards(socket.AF_INET, _ELSEWHERE)[0])

    def rank(entry: tuple[str, str]) -> tuple[int, bool, bool, bool]:
        name, address = entry
        return (interfaces.index(name) if interfaces else 0, address != came_by, ":" in address, address != leads_out)

    return sorted(found, key=rank)


def for_others(host: str, found: list[Address], interface: str | None) -> list[Address]:
    """The addresses of rank 0's host at which other hosts can reach it.

    A host's own name often leads to a loopback address there (127.0.1.1 in Debian's /etc/hosts), and elsewhere to the
    one that is meant. Whoever says localhost or an address means just that.

    Args:
        host: The name, or an address.
        found: What `resolve` gives for it here.
        interface: The network interface to use, if one was named.
    """
    if not all(_is_loopback(address) for _, address in found):
        return found
    if host == "localhost" or host.endswith(".localhost") or any(host == address[0] for _, address in found):
        return found
    own = own_addresses([interface] if interface else [])
    return resolve(own[0][1], found[0][1][1]) if own else found


def own_address_for_others(interface: str | None) -> str:
    """The address by which others most likely reach this machine: that of its name, or of an interface.

    Args:
        interface: The network interface to use, if one was named.

    Raises:
        OSError: There is none.
    """
    if interface is None:
        with contextlib.suppress(OSError):
            for _, address in resolve(socket.gethostname(), 0):
                if not _is_loopback(address) and is_of_this_machine(address):
                    return str(address[0])
    own = own_addresses([interface] if interface else [])
    if not own:
        at = f"the interface HOROVOD_GLOO_IFACE={interface!r}" if interface else "this host"
        raise OSError(errno.EADDRNOTAVAIL, f"{at} has no address for others")
    return own[0][1]


def _is_loopback(address: tuple[object, ...]) -> bool:
    return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


def is_of_this_machine(address: Any) -> bool:
    """Whether it is a loopback address, or an interface here holds it.

    A host's name may lead to a gateway before it, or to what it had once. That a socket can be bound to an address says
    less (net.ipv4.ip_nonlocal_bind).
    """
    import psutil

    # With the scope of a link-local one.
    text, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    wanted = ipaddress.ip_address(text)
    return wanted.is_loopback or any(
        entry.family in (socket.AF_INET, socket.AF_INET6) and ipaddress.ip_address(entry.address) == wanted
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    )


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens at a name or address of this machine; port 0: any port.

    Raises:
        OSError: The name is unknown or not of this machine, or the port is in use.
    """
    return listen_at_one_of(resolve(host, port))


def listen_at_one_of(candidates: Sequence[Address]) -> socket.socket:
    """A socket that listens at the first of some addresses of this machine at which it can.

    Raises:
        OSError: There is none.
    """
    trouble: OSError | None = None
    for family, address in candidates:
        try:
            # A name may have addresses of a family that the kernel goes without.
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            trouble = trouble or error
            continue
        try:
            # For a job that begins right after another: connections that were closed still hold the port for a while.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            trouble = trouble or error
    raise trouble or OSError("no address is known")


def listen_locally(address: bytes, deadline: float, who: object) -> socket.socket:
    """A Unix socket that listens; waits for an earlier owner of the address to let go of it.

    Raises:
        HorovodInternalError: It did not before the deadline.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            try:
                listener.bind(address)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise HorovodInternalError(
                        f"init: {who} can't listen for the other ranks: {error.strerror}. Does another job run with "
                        "the same HOROVOD_JOB_ID?"
                    ) from None
            time.sleep(0.02)
        listener.listen(LOCAL_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def endpoint_of(listener: socket.socket) -> Endpoint:
    """Where a socket is bound."""
    address = listener.getsockname()
    return Endpoint(address[0], address[1])


def bind_to(address: str) -> socket.socket:
    """A socket bound to an address of this host; it does not listen yet.

    Raises:
        HorovodInternalError: It is no address of this host.
    """
    try:
        family, found = resolve(address, 0)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise HorovodInternalError(
            f"init: HOROVOD_HOST_ADDRESS={address!r} is not known here: {error.strerror}."
        ) from None
    try:
        listener.bind(found)
    except OSError as error:
        listener.close()
        raise HorovodInternalError(
            f"init: HOROVOD_HOST_ADDRESS={address!r} can't be listened at: {error.strerror}. It must be an address of "
            "this host."
        ) from None
    return listener


def bind_for_peers(server: list[Address], interface: str | None) -> socket.socket:
    """A socket bound to the address by which this host reaches the server; it does not listen yet.

    Args:
        server: The addresses of the server.
        interface: The network interface to use instead.

    Raises:
        HorovodInternalError: No address could be found.
        ValueError: There is no such interface, or it has no address of the server's family.
    """
    trouble = "it has no address"
    for family, address in server:
        own = _address_of_interface(interface, family) if interface else None
        try:
            own = own or _address_towards(family, address)
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind(own)
                return listener
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            trouble = error.strerror or str(error)
    raise HorovodInternalError(
        f"init: found no own address from which to reach the rendezvous at {server[0][1][0]}: {trouble}. "
        "HOROVOD_GLOO_IFACE may name the network interface to use."
    )


def _address_towards(family: socket.AddressFamily, address: tuple[object, ...]) -> tuple[object, ...]:
    """The address that this host has on its way to another; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own: tuple[object, ...] = probe.getsockname()
    return (own[0], 0, *own[2:])


def _address_of_interface(interface: str, family: socket.AddressFamily) -> tuple[object, ...]:
    import psutil

    addresses = psutil.net_if_addrs()
    if interface not in addresses:
        raise ValueError(f"HOROVOD_GLOO_IFACE={interface!r}: there is no such interface here ({', '.join(addresses)}).")
    for found in addresses[interface]:
        if found.family == family:
            with contextlib.suppress(OSError):
                return (*resolve(found.address, 0)[0][1],)
    raise ValueError(
        f"HOROVOD_GLOO_IFACE={interface!r}: the interface has no {family.name.removeprefix('AF_')} address, which the "
        "rendezvous has."
    )
