"""Which addresses of a host can be reached from the others.

Every host listens at all of its addresses for a moment, and every host tries to connect to all of the others'. Who
connects sends a challenge; who listens answers with a proof that it is that host of this job: two hosts may well have
the same address, say that of a bridge for containers, and would reach themselves.

    connecting -> listening    32 random bytes
    listening -> connecting    HMAC(probe key, these bytes, name of the host)

The probe key is derived from the job's, and good for nothing else. Who connects proves nothing: whoever says 32 bytes
gets their proof, and nothing else is read from it. How many may come is limited (gate.py), and a probe that was turned
away because of that is made again.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.rendezvous.addresses import listen_at, resolve
from horovod.common.rendezvous.connection import CLOSED, Connection
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.gate import Crowd, Gate
from horovod.common.rendezvous.loop import WRITE, Loop, Timer
from horovod.common.rendezvous.refusals import Refusals

# A lost packet of a handshake is sent again after 1 and after 3 s.
PROBE_SECONDS = 5.0
_SIZE = 32
_MAX_STRANGERS = 1024
# A connection that ends before the proof has come is made again, so often and after so long.
_RETRIES = 10
_RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class Endpoint:
    """An address of a host at which it listens."""

    interface: str
    address: str
    port: int

    def __str__(self) -> str:
        """The address and where it is."""
        return f"{self.address} ({self.interface})"


def interface_names() -> list[str]:
    """All interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def probe_key(secret_key: str, job_id: str) -> bytes:
    """What hosts prove to each other."""
    return hmac.new(secret_key.encode(), b"reachability\0" + job_id.encode(), hashlib.sha256).digest()


def _proof(key: bytes, challenge: bytes, host: str) -> bytes:
    return hmac.new(key, challenge + host.encode(), hashlib.sha256).digest()


class ProbeListener:
    """Listens at addresses of this machine and answers every challenge."""

    def __init__(
        self,
        loop: Loop,
        key: bytes,
        host: str,
        addresses: Sequence[tuple[str, str]],
        tell: Callable[[str], object] = lambda _text: None,
    ) -> None:
        """Begins; an address that can't be listened at is left out of `endpoints`.

        Args:
            loop: Where everything is watched.
            key: See `probe_key`.
            host: The name of this host in the job.
            addresses: Interfaces and addresses.
            tell: Called with what an administrator should know.
        """
        self.endpoints: list[Endpoint] = []
        self._loop, self._key, self._host = loop, key, host
        self._refusals = Refusals(f"probe of host {host}", tell, quiet_about=(CLOSED,))
        self._gates: list[Gate] = []
        self._timers: dict[Connection, Timer] = {}
        self._crowd: Crowd[Connection] = Crowd(_MAX_STRANGERS)
        for interface, address in addresses:
            try:
                listener = listen_at(address, 0)
            except OSError:
                continue
            self.endpoints.append(Endpoint(interface, address, listener.getsockname()[1]))
            self._gates.append(Gate(loop, listener, self._crowd, self._meet, self._refusals.add))

    def close(self) -> None:
        """Listens no more."""
        for connection in list(self._timers):
            self._drop(connection)
        for gate in self._gates:
            gate.close()
        self._gates.clear()

    def _meet(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(sock, self._loop, lambda reason: self._refuse(connection, peer, reason))
        self._timers[connection] = self._loop.at(
            time.monotonic() + PROBE_SECONDS,
            lambda: self._refuse(connection, peer, f"it has not gone after {PROBE_SECONDS:g} s"),
        )
        crowded_out = self._crowd.add(connection, peer)
        if crowded_out is not None:
            self._drop(crowded_out)
        connection.expect(_SIZE, lambda challenge: self._answer(connection, challenge))

    def _answer(self, connection: Connection, challenge: bytes) -> None:
        connection.send(_proof(self._key, challenge, self._host))
        connection.expect(1, _expect_nothing)  # Until the other side closes it.

    def _refuse(self, connection: Connection, peer: str, reason: str) -> None:
        self._drop(connection)
        self._refusals.add(peer, reason)

    def _drop(self, connection: Connection) -> None:
        self._timers.pop(connection).cancel()
        self._crowd.remove(connection)
        connection.close()


def _expect_nothing(_byte: bytes) -> None:
    raise ProtocolError("it does not speak this protocol")


class Prober:
    """Tries to reach other hosts at all of their addresses, at the same time."""

    def __init__(
        self,
        loop: Loop,
        key: bytes,
        targets: Mapping[str, Sequence[Endpoint]],
        on_result: Callable[[str, str, str], object],
    ) -> None:
        """Begins.

        Args:
            loop: Where everything is watched.
            key: See `probe_key`.
            targets: Where the other hosts listen.
            on_result: Called once for every address, with the host, the address, and why it was not reached: nothing
                if it was.
        """
        self._loop, self._key, self._on_result = loop, key, on_result
        self._timer = loop.at(time.monotonic() + PROBE_SECONDS, self._give_up)
        self._connecting: dict[tuple[str, str], socket.socket] = {}
        self._connections: dict[tuple[str, str], Connection] = {}
        self._retries: dict[tuple[str, str], int] = {}
        self._pending = {(host, endpoint.address) for host, endpoints in targets.items() for endpoint in endpoints}
        for host, endpoints in targets.items():
            for endpoint in endpoints:
                self._connect((host, endpoint.address), endpoint.port)

    def close(self) -> None:
        """Tries no more."""
        self._timer.cancel()
        self._pending.clear()
        for sock in self._connecting.values():
            self._loop.forget(sock.fileno())
            sock.close()
        for connection in self._connections.values():
            connection.close()

    def _connect(self, target: tuple[str, str], port: int) -> None:
        try:
            family, address = resolve(target[1], port)[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._end(target, error.strerror or str(error))
            return
        sock.setblocking(False)
        self._connecting[target] = sock
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._fail_to_connect(target, code)
            return
        self._loop.watch(sock.fileno(), WRITE, lambda _events: self._connected(target, port))

    def _connected(self, target: tuple[str, str], port: int) -> None:
        sock = self._connecting[target]
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._loop.forget(sock.fileno())
        if code != 0:
            self._fail_to_connect(target, code)
            return
        del self._connecting[target]
        challenge = secrets.token_bytes(_SIZE)
        connection = Connection(sock, self._loop, lambda reason: self._on_closed(target, port, reason))
        self._connections[target] = connection
        connection.send(challenge)
        connection.expect(_SIZE, lambda proof: self._check(target, challenge, proof))

    def _check(self, target: tuple[str, str], challenge: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(proof, _proof(self._key, challenge, target[0])):
            raise ProtocolError("somebody else has this address")
        self._end(target, "")

    def _on_closed(self, target: tuple[str, str], port: int, reason: str) -> None:
        retries = self._retries.get(target, 0)
        if reason != CLOSED or retries == _RETRIES:
            self._end(target, reason)
            return
        self._retries[target] = retries + 1
        self._connections.pop(target).close()
        self._loop.at(time.monotonic() + _RETRY_SECONDS, lambda: self._retry(target, port))

    def _retry(self, target: tuple[str, str], port: int) -> None:
        if target in self._pending:
            self._connect(target, port)

    def _fail_to_connect(self, target: tuple[str, str], code: int) -> None:
        self._connecting.pop(target).close()
        self._end(target, os.strerror(code))

    def _end(self, target: tuple[str, str], trouble: str) -> None:
        connection = self._connections.pop(target, None)
        if connection is not None:
            connection.close()
        if target in self._pending:
            self._pending.remove(target)
            self._on_result(*target, trouble)

    def _give_up(self) -> None:
        late = list(self._pending)
        for target in late:
            self._end(target, f"no answer within {PROBE_SECONDS:g} s")
        self.close()
