"""Descriptors over a Unix socket. They follow a frame, in chunks, each with one byte."""

import array
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

from horovod.common.rendezvous.encoding import ProtocolError

_PER_CHUNK = 200  # the kernel takes at most 253 in one message


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where that can't be had."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1  # pid 0: the peer is in a pid namespace that we can't see
    except OSError:
        return -1


def send_descriptors(sock: socket.socket, fds: Sequence[int], deadline: float) -> None:
    """Sends descriptors, in order.

    Raises:
        ProtocolError: The other side has gone, or does not take them before the deadline.
    """
    for start in range(0, len(fds), _PER_CHUNK):
        chunk = list(fds[start : start + _PER_CHUNK])
        while True:
            try:
                socket.send_fds(sock, [b"d"], chunk)
                break
            except BlockingIOError:
                _wait(sock, select.POLLOUT, deadline)
            except ConnectionError:  # in the same words as from whoever reads its end
                raise ProtocolError("the connection was closed") from None
            except OSError as error:
                # Too many descriptors under way for this user: the receiver takes them out one by one.
                if error.errno != errno.ETOOMANYREFS:
                    raise ProtocolError(f"the connection failed: {error.strerror}") from None
                if time.monotonic() > deadline:
                    raise ProtocolError("no answer in time") from None
                time.sleep(0.005)


def receive_descriptors(sock: socket.socket, count: int, deadline: float) -> list[int]:
    """Receives descriptors, close-on-exec; the caller's to close.

    Raises:
        ProtocolError: Not all of them came.
    """
    fds: list[int] = []
    try:
        while len(fds) < count:
            try:
                data, ancillary, flags, _ = sock.recvmsg(
                    1, socket.CMSG_SPACE(_PER_CHUNK * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                _wait(sock, select.POLLIN, deadline)
                continue
            except ConnectionError:
                raise ProtocolError("the connection was closed") from None
            except OSError as error:
                raise ProtocolError(f"the connection failed: {error.strerror}") from None
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                    fds.extend(received)
            if not data:
                raise ProtocolError("the connection was closed")
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(
                    f"only {len(fds)} of {count} descriptors could be received: raise the limit of open files "
                    "(ulimit -n)"
                )
        if len(fds) != count:
            raise ProtocolError(f"expected {count} descriptors, got {len(fds)}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def receive_some(sock: socket.socket, exists: Sequence[bool], deadline: float) -> list[int]:
    """Receives a descriptor for each that exists; -1 for the others."""
    fds = iter(receive_descriptors(sock, sum(exists), deadline))
    return [next(fds) if there else -1 for there in exists]


def _wait(sock: socket.socket, events: int, deadline: float) -> None:
    left = deadline - time.monotonic()
    poll = select.poll()
    poll.register(sock, events)
    if left <= 0 or not poll.poll(1000 * left):
        raise ProtocolError("no answer in time")
