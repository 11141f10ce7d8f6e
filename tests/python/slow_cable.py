"""A cable with a delay, between the switch and a machine of machines.py: netem is not in every kernel.

    python slow_cable.py <pid of the switch> <pid of the machine> <name of the machine> <seconds>

makes a network interface of that name in the network of the switch, one named eth0 in that of the machine, and carries
every frame from one to the other, so many seconds late. It says "ready" when both exist, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import signal
import struct
import sys
import time
from collections import deque

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536


def open_end(pid: int, name: str) -> int:
    """Makes an interface in the network of a process."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def carry(ends: tuple[int, int], seconds: float) -> None:
    """Carries frames, for ever."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    selector = selectors.DefaultSelector()
    for end, other in (ends, ends[::-1]):
        selector.register(end, selectors.EVENT_READ, other)
    while True:
        timeout = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in selector.select(timeout):
            under_way.append((time.monotonic() + seconds, key.data, os.read(key.fd, _FRAME_BYTES)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # This end is down, or its queue is full: cables lose frames.
                os.write(end, frame)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    switch_pid, machine_pid, machine_name, delay = sys.argv[1:]
    both = open_end(int(switch_pid), machine_name), open_end(int(machine_pid), "eth0")
    print("ready", flush=True)
    carry(both, float(delay))
