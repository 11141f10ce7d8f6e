"""Hosts of a job in one process, for the rendezvous server: real connections and messages, no ranks behind them.

Each is what the leader of a host is for the others: it reports its ranks to the server, gets the table from there or
from another host, and passes it on.
"""

from __future__ import annotations

import os
import socket
import time

from horovod import __version__
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous import tree
from horovod.common.rendezvous.addresses import BACKLOG, endpoint_of
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.door import Door
from horovod.common.rendezvous.encryption import Encryption, find_encryption
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import (
    Configuration,
    Endpoint,
    HostHello,
    Kind,
    Member,
    Place,
    Report,
    Source,
    decode_error,
    encode_frame,
)
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.server import host_key

KEY = host_key(b"the key", "the job")
CONFIGURATION = Configuration([], 1 << 27, 1024, False)
LIMIT_SECONDS = 120.0
_PASSING_SECONDS = 60.0


class Host:
    """The leader of a host.

    Attributes:
        heard: What the server has said.
        table: The table of all ranks, once it is there.
        error: What the server has said went wrong.
        bytes_received: From the server.
        bytes_passed_on: To other hosts.
    """

    def __init__(
        self,
        loop: Loop,
        server: tuple[str, int],
        place: Place,
        *,
        key: Key = KEY,
        encryption: Encryption | None = None,
        version: str = __version__,
        pid: int = 0,
    ) -> None:
        """Begins to connect to the server."""
        self.place = place
        self.heard: list[Kind] = []
        self.table = b""
        self.error: Exception | None = None
        self.bytes_received = self.bytes_passed_on = 0
        self._loop, self._key = loop, key
        self._encryption = find_encryption() if encryption is None else encryption
        self._connection: Connection | None = None
        self._door: Door | None = None
        self._asking: Caller | None = None
        self._asked: list[Connection] = []
        self._to_ask_us = len(tree.asked_by(place.cross_rank, place.cross_size))
        self._listener: socket.socket | None = None
        if self._to_ask_us:
            self._listener = socket.socket()
            self._listener.bind(("127.0.0.1", 0))
        hello = HostHello(version, place, pid or os.getpid(), LIMIT_SECONDS)
        self.caller = Caller(
            loop,
            [(socket.AF_INET, server)],
            key,
            claim=Claim(Purpose.HOST, 0, place.rank, 0),
            first_frame=encode_frame(Kind.HELLO, hello.encode()),
            on_answer=self._on_answer,
            encryption=self._encryption,
        )

    def is_over(self) -> bool:
        """Whether the attempt has ended."""
        return self.heard[-1:] in ([Kind.DONE], [Kind.FAILED])

    def close(self) -> None:
        """Closes all connections."""
        self.caller.close()
        if self._asking is not None:
            self._asking.close()
        if self._door is not None:
            self._door.close()
        if self._listener is not None:
            self._listener.close()
        for connection in (self._connection, *self._asked):
            if connection is not None:
                connection.close()

    def _report(self) -> Report:
        place = self.place
        own = endpoint_of(self._listener) if self._listener else Endpoint("10.0.0.1", 1000)
        members = [
            Member(place.rank + local, place.cross_rank, place.cross_size, 1 + place.rank + local, own)
            for local in range(place.local_size)
        ]
        return Report(CONFIGURATION, 0, members)

    def _on_answer(self, connection: Connection, kind: Kind, body: bytes) -> None:
        self._connection = connection
        connection.on_frame = self._on_frame
        self._on_frame(kind, body)

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        assert self._connection is not None
        self.heard.append(kind)
        self.bytes_received += len(body)
        if kind is Kind.ACCEPTED:
            self._connection.say(Kind.REPORT, self._report().encode())
        elif kind is Kind.TABLE:
            self._on_table(body)
        elif kind is Kind.SOURCE:
            self._asking = tree.ask(
                self._loop,
                Source.decode(body),
                self.place.rank,
                self._key,
                encryption=self._encryption,
                on_table=self._on_table,
            )
        elif kind is Kind.GO:
            self._connection.say(Kind.STARTED)
        else:
            self.error = decode_error(body) if kind is Kind.FAILED else None
            self.close()

    def _on_table(self, body: bytes) -> None:
        self.table = body
        if self._listener is None:
            self._link()
            return
        self._listener.listen(BACKLOG)
        self._door = Door(
            self._loop,
            self._listener,
            self._key,
            admits=lambda claim: claim.purpose is Purpose.TABLE and claim.receiver == self.place.rank,
            on_guest=self._pass_on,
            encryption=self._encryption,
        )

    def _pass_on(self, connection: Connection, _claim: Claim, kind: Kind, body: bytes) -> None:
        tree.pass_on(connection, kind, body, self.table, _PASSING_SECONDS)
        self.bytes_passed_on += len(self.table)
        self._asked.append(connection)
        if len(self._asked) == self._to_ask_us:
            self._link()

    def _link(self) -> None:
        """Says that it is connected to all others: real ones are when those who ask them have the table."""
        assert self._connection is not None
        self._connection.say(Kind.LINKED)


def place_of(index: int, local_size: int, hosts: int) -> Place:
    """The place of a host's leader, where all hosts have equally many ranks."""
    return Place(index * local_size, hosts * local_size, 0, local_size, index, hosts, f"host{index}")


def meet(server: tuple[str, int], hosts: int, local_size: int) -> list[Host]:
    """Brings hosts together, all in this thread.

    Raises:
        HorovodInternalError: They did not meet in time.
    """
    loop = Loop()
    made = [Host(loop, server, place_of(index, local_size, hosts)) for index in range(hosts)]
    try:
        if not loop.run_until(lambda: all(host.is_over() for host in made), time.monotonic() + LIMIT_SECONDS):
            raise HorovodInternalError(f"{hosts} hosts did not meet within {LIMIT_SECONDS:g} s")
    finally:
        for host in made:
            host.close()
        loop.close()
    return made
