"""Connections between ranks of different hosts.

Words: a *link* joins two ranks of different hosts, for data: every such pair has one (a full mesh). A *control* joins
rank 0 with the leader (local rank 0) of each other host. The higher rank of a pair connects, the lower one listens.

Every rank has bound its listening socket before the table is made, so that its port is in it, but begins to listen only
when it has the table: until then connections are refused, and nobody can fill the queue. Leaders also pass the table
on there (tree.py). From then on

    higher rank                                   lower rank
    OPENING (purpose, generation, both ranks)  ->
                                              <-  ANSWER       (proof.py)
    PROOF                                      ->
                        [TLS handshake, if the connection is encrypted (encryption.py)]
    HELLO                                      ->
                                              <-  ACCEPTED     now both have it

The side that connects tries again until its deadline, since the other one may not listen yet; the one that listens
takes a later connection of a rank in place of an earlier one. Neither takes a connection that fails for the end of the
attempt: if a rank has died, its host says so (leader.py), with a better reason. A rank listens until all of its own
links are there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from horovod.common.rendezvous import tree
from horovod.common.rendezvous.addresses import BACKLOG
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.door import AUTHENTICATION_SECONDS, Door
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.encryption import PLAIN, Encryption
from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import Kind, encode_accepted, encode_frame, socket_address
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.table import Table

if TYPE_CHECKING:
    from horovod._core import TlsSession

_End = tuple[Purpose, int]  # what for, and with which rank


def ends_of(rank: int, table: Table) -> list[_End]:
    """The connections that a rank has."""
    host = table.host_of[rank]
    ends = [(Purpose.DATA, peer) for peer in range(table.size) if table.host_of[peer] != host]
    leaders = table.leaders()
    if rank == 0:
        ends += [(Purpose.CONTROL, leader) for leader in leaders[1:]]
    elif rank in leaders:
        ends.append((Purpose.CONTROL, 0))
    return ends


class Mesh:
    """The connections of one rank to those of the other hosts, in a loop."""

    def __init__(
        self,
        loop: Loop,
        rank: int,
        table: Table,
        listener: socket.socket,
        key: Key,
        *,
        encryption: Encryption = PLAIN,
        on_refused: Callable[[str, str], object] = lambda _peer, _reason: None,
    ) -> None:
        """Begins to listen; takes the listening socket over.

        Args:
            loop: Where everything is watched.
            rank: This one.
            table: Who the others are, and where they listen.
            listener: Where this one does.
            key: What all prove.
            encryption: Which connections are to be encrypted.
            on_refused: Called with who it was and the reason when a connection failed to prove the key.
        """
        self._loop, self._rank, self._table = loop, rank, table
        self._encryption = encryption
        self._sessions: dict[int, TlsSession] = {}  # by descriptor
        self._connected: dict[_End, socket.socket] = {}
        self._callers: dict[_End, Caller] = {}
        self._key = key
        ends = ends_of(rank, table)
        self._awaited = {end for end in ends if end[1] > rank}
        self._not_called = [end for end in ends if end[1] < rank]
        self._asking = _who_asks(rank, table)
        self._asked: list[Connection] = []
        listener.listen(BACKLOG)
        self._door = Door(
            loop,
            listener,
            key,
            admits=self._admits,
            on_guest=self._on_guest,
            on_refused=on_refused,
            max_strangers=max(MAX_STRANGERS, 2 * len(self._awaited)),
            encryption=encryption,
        )

    def connect(self) -> None:
        """Begins to connect."""
        ends, self._not_called = self._not_called, []
        for purpose, peer in ends:
            self._call(purpose, peer)

    def is_complete(self) -> bool:
        """Whether every connection is there."""
        return not self._not_called and not self._callers and self._awaited <= self._connected.keys()

    def missing(self) -> str:
        """Which connections are not there, and why, in words."""
        callers = {peer: caller for (_, peer), caller in sorted(self._callers.items())}
        texts = [
            f"{self._table.describe(peer)} at {self._table.endpoints[peer]} did not accept a connection "
            f"({caller.trouble})"
            for peer, caller in callers.items()
        ]
        absent = sorted({peer for _, peer in self._awaited - self._connected.keys()})
        own = self._table.endpoints[self._rank]
        texts += [f"{self._table.describe(peer)} did not connect to {own}" for peer in absent]
        shown = "; ".join(texts[:6]) + ("; ..." if len(texts) > 6 else "")
        return shown + (f". Here {self._door.trouble}" if self._door.trouble else "")

    def take(self) -> tuple[list[int], list[int], dict[int, TlsSession]]:
        """What was connected, the caller's from now on.

        Returns:
            The descriptors of links by rank and of controls by host, -1 where there is none; and by descriptor the
            sessions of those that are encrypted.
        """
        links, controls = [-1] * self._table.size, [-1] * len(self._table.hosts)
        for (purpose, peer), sock in self._connected.items():
            if purpose is Purpose.DATA:
                links[peer] = sock.detach()
            else:
                controls[self._table.host_of[peer]] = sock.detach()
        self._connected.clear()
        self.close()
        return links, controls, self._sessions

    def close(self) -> None:
        """Stops listening and connecting, and closes the connections that were not taken."""
        self._door.close()
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        _close_all(self._connected.values())
        self._connected.clear()
        for connection in self._asked:
            connection.close()
        self._asked.clear()

    def _call(self, purpose: Purpose, peer: int) -> None:
        def on_answer(connection: Connection, kind: Kind, _body: bytes) -> None:
            if kind is Kind.ACCEPTED and self._is_as_agreed(purpose, connection):
                del self._callers[purpose, peer]
                self._keep((purpose, peer), connection)
            else:
                connection.close()
                self._call(purpose, peer)

        claim = Claim(purpose, self._table.generation, self._rank, peer)
        address = socket_address(self._table.endpoints[peer])
        self._callers[purpose, peer] = Caller(
            self._loop,
            [address],
            self._key,
            claim=claim,
            first_frame=encode_frame(Kind.HELLO),
            on_answer=on_answer,
            encryption=self._encryption,
        )

    def _admits(self, claim: Claim) -> bool:
        if claim.generation != self._table.generation or claim.receiver != self._rank:
            return False
        if claim.purpose is Purpose.TABLE:
            return claim.sender in self._asking
        return (claim.purpose, claim.sender) in self._awaited

    def _on_guest(self, connection: Connection, claim: Claim, kind: Kind, body: bytes) -> None:
        if not self._is_as_agreed(claim.purpose, connection):
            raise ProtocolError("it is encrypted on one side only")
        if claim.purpose is Purpose.TABLE:
            tree.pass_on(connection, kind, body, self._table.encode(), AUTHENTICATION_SECONDS)
            self._asked.append(connection)
            return
        if kind is not Kind.HELLO or body:
            raise ProtocolError(f"expected an empty HELLO, got {kind.name} of {len(body)} bytes")
        connection.say(Kind.ACCEPTED, encode_accepted(0.0))
        if not connection.has_sent_all():  # a few bytes on a new connection: there is room, or it is of no use
            raise ProtocolError("it does not read")
        self._keep((claim.purpose, claim.sender), connection)

    def _is_as_agreed(self, purpose: Purpose, connection: Connection) -> bool:
        """All ranks want the same, or they would not have got the table; but this is the last look."""
        return self._encryption.covers(purpose) == (connection.session is not None)

    def _keep(self, end: _End, connection: Connection) -> None:
        sock = connection.detach()
        assert sock is not None
        if former := self._connected.get(end):
            self._sessions.pop(former.fileno(), None)
            former.close()
        self._connected[end] = sock
        if connection.session is not None:
            self._sessions[sock.fileno()] = connection.session


def _who_asks(rank: int, table: Table) -> set[int]:
    """The leaders that get the table from a rank (tree.py)."""
    leaders, host = table.leaders(), table.host_of[rank]
    return {leaders[other] for other in tree.asked_by(host, len(leaders))} if leaders[host] == rank else set()


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
