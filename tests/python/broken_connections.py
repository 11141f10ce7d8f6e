"""Called by a rank: what can happen to its connections with other hosts while all processes live."""

import ctypes
import os
import socket
from collections.abc import Callable


def connections() -> list[socket.socket]:
    """Every TCP connection of this process, through descriptors of its own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it has been closed meanwhile: /proc/self/fd itself, for one
            continue
        inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if inet and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.append(sock)
        else:
            sock.close()
    return found


def reset(sock: socket.socket) -> None:
    """Sends RST, as a host does that knows the connection no more: connect() to no family dissolves a connection."""
    nowhere = ctypes.create_string_buffer(16)  # AF_UNSPEC is 0
    if ctypes.CDLL(None, use_errno=True).connect(sock.fileno(), nowhere, 16) != 0:
        raise OSError(ctypes.get_errno(), "can't dissolve a connection")


def half_close(sock: socket.socket) -> None:
    """Sends FIN; the other direction stays open."""
    sock.shutdown(socket.SHUT_WR)


def break_all(how: Callable[[socket.socket], None]) -> int:
    """Breaks every connection, and returns how many there were."""
    found = connections()
    for sock in found:
        how(sock)
        sock.close()
    return len(found)
