"""What goes over a network interface of a machine or host that is made of namespaces: every byte, as on the cable."""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_BUFFER = 256 << 20  # what comes while the reader has no core
_LARGEST_PACKET = 1 << 17  # the kernel hands a veth pair several segments at once


class WireTap:
    """Records what an interface sends and receives."""

    def __init__(self, pid: int, interface: str) -> None:
        """Begins.

        Args:
            pid: A process in that network.
            interface: The name that the interface has there.
        """
        self._record = bytearray()
        self._sock = _packet_socket(pid, interface)
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> bytes:
        """Returns all that went over it; fails if something was missed."""
        self._stop.set()
        self._reader.join()
        statistics = self._sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self.close()
        dropped = int.from_bytes(statistics[4:], "little")
        assert dropped == 0, f"{dropped} packets were missed"
        return bytes(self._record)

    def close(self) -> None:
        """Ends it."""
        self._stop.set()
        self._reader.join()
        self._sock.close()

    def _read(self) -> None:
        while True:
            try:
                self._record += self._sock.recv(_LARGEST_PACKET)
            except TimeoutError:
                if self._stop.is_set():  # and nothing is left of what came before
                    return


def _packet_socket(pid: int, interface: str) -> socket.socket:
    """Made by a thread that enters the network: the socket stays there, and the thread ends."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/proc/{pid}/ns/net") as network:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(network.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        sock.setsockopt(socket.SOL_SOCKET, 33, _BUFFER)  # SO_RCVBUFFORCE
        sock.bind((interface, 0))
        sock.settimeout(0.2)
        made.append(sock)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


@contextlib.contextmanager
def tapping(pid: int, interface: str = "eth0") -> Iterator[WireTap]:
    """A tap for the time of a block."""
    tap = WireTap(pid, interface)
    try:
        yield tap
    finally:
        tap.close()
