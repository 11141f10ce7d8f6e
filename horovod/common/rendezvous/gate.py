"""Who may wait at a listening socket: limits on connections that have proved nothing yet.

Anyone can connect, so what waits is bounded in number (memory, descriptors) and in rate (processor time), and one who
makes many connections must not keep others out. Limits go by *origin*: the address that a connection comes from. Honest
ranks may share theirs with each other, and with an attacker (one machine, a network behind NAT), so

  - the rate is generous: a whole job may come at once, who has proved the key is not counted, and who is sent away
    because of the rate comes again a moment later (caller.py);
  - where too many wait, one of the origin that has most of them goes. Which of them is left to chance: whoever needs
    milliseconds to prove the key hardly ever is the one among hundreds, however fast others press on.
"""

import errno
import ipaddress
import random
import socket
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from horovod.common.rendezvous.loop import READ, Loop, Timer

# How many connections wait at once, at least.
MAX_STRANGERS = 256
# What an origin may make of them in a second for long, and how many at once as a multiple of those that may wait.
RATE = 500.0
BURST_FACTOR = 4
# The origins that are kept count of; beyond that the one seen first is forgotten.
MAX_ORIGINS = 1024
# Few, so that those who wait get their turn in between.
_ACCEPTS_AT_ONCE = 16
# How long to leave the gate shut when the system has no descriptor for another connection.
_PAUSE_SECONDS = 0.1

_T = TypeVar("_T")


def origin_of(peer: str) -> str:
    """What an address is counted as: itself, or its network where one machine has a whole one (64 bits of IPv6)."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:  # not of a network
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class Crowd(Generic[_T]):
    """Those who wait, by origin."""

    def __init__(self, most: int = MAX_STRANGERS, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with nobody.

        Args:
            most: How many may wait at once; twice as many as are awaited, or more.
            clock: In seconds.
        """
        self._most, self._burst, self._clock = most, float(BURST_FACTOR * most), clock
        self._members: dict[_T, str] = {}
        self._by_origin: dict[str, dict[_T, None]] = {}
        self._tokens: dict[str, tuple[float, float]] = {}  # by origin: how many it had, and when

    def __len__(self) -> int:
        """How many wait."""
        return len(self._members)

    def may_come(self, peer: str) -> bool:
        """Whether one more from an address is not too many in too short a time; it counts."""
        origin, now = origin_of(peer), self._clock()
        tokens, then = self._tokens.pop(origin, (self._burst, now))
        tokens = min(self._burst, tokens + RATE * (now - then))
        while len(self._tokens) >= MAX_ORIGINS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[origin] = max(0.0, tokens - 1), now
        return tokens >= 1

    def add(self, member: _T, peer: str) -> _T | None:
        """Takes one in.

        Returns:
            The one who has to go for it, if there are too many now; not a member any more.
        """
        origin = origin_of(peer)
        self._members[member] = origin
        self._by_origin.setdefault(origin, {})[member] = None
        if len(self._members) <= self._most:
            return None
        largest = max(self._by_origin.values(), key=len)
        # Not the newcomer: it has not had any time at all.
        victim = random.choice([one for one in largest if one is not member] or [member])
        self.remove(victim)
        return victim

    def remove(self, member: _T, *, proved: bool = False) -> None:
        """Takes one out, if it is there; one that has proved the key does not count for its origin's rate."""
        origin = self._members.pop(member, None)
        if origin is None:
            return
        del self._by_origin[origin][member]
        if not self._by_origin[origin]:
            del self._by_origin[origin]
        if proved and origin in self._tokens:
            tokens, then = self._tokens[origin]
            self._tokens[origin] = min(self._burst, tokens + 1), then


class Gate:
    """A listening socket in a loop, which accepts whoever may come.

    Attributes:
        trouble: Why connections could not be accepted.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        crowd: Crowd[_T],
        on_connection: Callable[[socket.socket, str], object],
        on_refused: Callable[[str, str], object] = lambda _peer, _reason: None,
    ) -> None:
        """Takes over a socket that listens.

        Args:
            loop: Where it is watched.
            listener: The socket.
            crowd: Who waits already; the one who takes connections adds them to it.
            on_connection: Called with every connection, which is its own from then on, and the address it comes from:
                empty for a Unix socket.
            on_refused: Called with the address and the reason where one was too many.
        """
        self.trouble = ""
        listener.setblocking(False)
        self._loop, self._listener = loop, listener
        self._may_come, self._on_connection, self._on_refused = crowd.may_come, on_connection, on_refused
        self._pause: Timer | None = None
        self._listen()

    def close(self) -> None:
        """Stops listening."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._listener.fileno() < 0:  # the one before has had us closed
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EPROTO):
                    continue
                self.trouble = f"connections could not be accepted: {error.strerror}"
                self._loop.forget(self._listener.fileno())
                self._pause = self._loop.at(time.monotonic() + _PAUSE_SECONDS, self._listen)
                return
            peer = str(address[0]) if isinstance(address, tuple) else ""
            if peer and not self._may_come(peer):
                sock.close()
                self._on_refused(peer, "too many connections from there")
                continue
            try:
                self._on_connection(sock, peer)
            except OSError:  # it has gone already
                sock.close()
