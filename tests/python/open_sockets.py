"""Which sockets processes have open, as the kernel lists them, and connections to those that listen.

Sockets of a network are seen from within it: `Machine.network` (machines.py) leads there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _UNCONNECTED, _LISTENING = "01", "07", "0A"
_ACCEPTS = 1 << 16  # a flag of Unix sockets
_PROTOCOLS = {
    "tcp": (socket.AF_INET, socket.SOCK_STREAM),
    "tcp6": (socket.AF_INET6, socket.SOCK_STREAM),
    "udp": (socket.AF_INET, socket.SOCK_DGRAM),
    "udp6": (socket.AF_INET6, socket.SOCK_DGRAM),
    "raw": (socket.AF_INET, socket.SOCK_RAW),
    "raw6": (socket.AF_INET6, socket.SOCK_RAW),
}


@dataclass(frozen=True)
class Listener:
    """A socket that listens, and whose it is. One of UDP does if it takes what anyone sends to it."""

    pid: int
    family: socket.AddressFamily
    address: tuple[str, int] | bytes
    kind: socket.SocketKind = socket.SOCK_STREAM

    def connect(self, source: str = "") -> socket.socket:
        """Connects, from an address of this machine."""
        sock = socket.socket(self.family, self.kind)
        sock.settimeout(10)
        if source and self.family == socket.AF_INET:
            sock.bind((source, 0))
        sock.connect(self.address)
        return sock

    def connect_as(self, source: str) -> tuple[socket.socket, str]:
        """Connects from an address, or to a Unix socket by another process; with who it is for the other side."""
        if self.family == socket.AF_UNIX:
            return self.connect_by_another_process(os.getuid())
        sock = self.connect(source)
        return sock, str(sock.getsockname()[0])

    def connect_by_another_process(self, uid: int) -> tuple[socket.socket, str]:
        """Connects by a process that a user has, and takes the connection over; with who that was."""
        ours, its = socket.socketpair()
        with ours:
            pid = os.fork()
            if pid == 0:
                try:
                    os.setuid(uid)
                    with self.connect() as connected:
                        socket.send_fds(its, [b"x"], [connected.fileno()])
                finally:
                    os._exit(0)
            its.close()
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            os.waitpid(pid, 0)
        assert fds, f"uid {uid} could not connect"
        sock = socket.socket(fileno=fds[0])
        sock.settimeout(10)
        return sock, f"pid {pid}, uid {uid}"


@dataclass(frozen=True)
class NetworkSocket:
    """A socket of the network, in whatever state, and whose it is."""

    pid: int
    family: socket.AddressFamily
    kind: socket.SocketKind
    state: str
    local: tuple[str, int]
    remote: tuple[str, int]


def network_sockets(pids: Iterable[int]) -> list[NetworkSocket]:
    """All of them that processes have."""
    owners = _owners(pids)
    found = []
    for name, (family, kind) in _PROTOCOLS.items():
        for fields in _table(name):
            owner = owners.get(f"socket:[{fields[9]}]")
            if owner is not None:
                ends = [_address(family, text) for text in fields[1:3]]
                found.append(NetworkSocket(owner, family, kind, fields[3], ends[0], ends[1]))
    return found


def is_connected(pid: int, to: Listener) -> bool:
    """Whether a process has a connection to a socket."""
    return any(one.state == _ESTABLISHED and one.remote == to.address for one in network_sockets([pid]))


def listeners(pids: Iterable[int]) -> set[Listener]:
    """All sockets at which processes listen."""
    pids = list(pids)
    found = {
        Listener(one.pid, one.family, one.local, one.kind)
        for one in network_sockets(pids)
        if one.state == (_LISTENING if one.kind == socket.SOCK_STREAM else _UNCONNECTED)
    }
    owners = _owners(pids)
    for fields in _table("unix"):
        owner = owners.get(f"socket:[{fields[6]}]")
        if owner is not None and int(fields[3], 16) & _ACCEPTS:
            name = fields[7] if len(fields) > 7 else ""
            address = ("\0" + name[1:] if name.startswith("@") else name).encode()
            found.add(Listener(owner, socket.AF_UNIX, address, socket.SocketKind(int(fields[4], 16))))
    return found


def _owners(pids: Iterable[int]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(fd)] = pid
    return owners


def _table(name: str) -> list[list[str]]:
    path = Path("/proc/thread-self/net") / name  # this thread may be in another network than others
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(family: socket.AddressFamily, text: str) -> tuple[str, int]:
    number, port = text.split(":")
    words = struct.unpack(f">{len(number) // 8}I", bytes.fromhex(number))
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)
