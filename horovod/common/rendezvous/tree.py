"""How the table of all ranks reaches all hosts: the server gives it to a few, and these pass it on along a tree.

The table grows with the ranks. If the server sent it to every host, what it sends would grow with hosts times ranks; so
it sends the table to the first FANOUT hosts, and to every other one the address of a host that will have it:

    server                 -> hosts 0 to 7      TABLE
                           -> all others        SOURCE: ask the leader of that host, there
    leader of host 8 to 15 -> leader of host 0  a connection as those between ranks (mesh.py), for TABLE; HELLO
                          <-                    TABLE
    ... 16 to 23           -> host 1            and so on: host h asks host h // 8 - 1

Hosts are in the order of their lowest ranks. A leader listens as soon as it has the table, at the address where it
listens for other ranks anyway; who asks before that is refused, and tries again (caller.py).

What keeps it safe
  - Both sides prove the key, for this generation and these two ranks, and the connection is encrypted as that to the
    server is.
  - Nobody closes too early: a leader listens until the higher ranks of other hosts are connected to it, among them
    those that ask it, and they can connect to it only when they have the table.
  - Who does not get the table in time says from whom. It gives up before those who wait for its connections do, and
    the nearer to the server, the earlier: the first one in a chain knows the reason.
"""

import time
from collections.abc import Callable, Sequence

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.addresses import REACH_EACH_OTHER
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.encryption import Encryption
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.messages import Kind, Place, Source, encode_frame, socket_address
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.table import Table

FANOUT = 8
# How long a host waits for the table: the first of a chain, and each one further down longer.
_FIRST_SECONDS, _MORE_SECONDS = 10.0, 3.0


def source_of(host: int) -> int | None:
    """The host from which one gets the table; None: from the server."""
    return host // FANOUT - 1 if host >= FANOUT else None


def asked_by(host: int, hosts: int) -> range:
    """The hosts that get the table from one."""
    return range(min(hosts, FANOUT * (host + 1)), min(hosts, FANOUT * (host + 2)))


def seconds_for(host: int) -> float:
    """How long a host waits for the one that it asks."""
    source = source_of(host)
    return _FIRST_SECONDS if source is None else _MORE_SECONDS + seconds_for(source)


def messages_for_hosts(table: Table) -> Sequence[tuple[Kind, bytes]]:
    """What the server says to the leader of each host."""
    whole, leaders = table.encode(), table.leaders()
    messages = []
    for host in range(len(table.hosts)):
        source = source_of(host)
        if source is None:
            messages.append((Kind.TABLE, whole))
            continue
        rank = leaders[source]
        where = Source(table.generation, rank, table.hosts[source], table.endpoints[rank], seconds_for(host))
        messages.append((Kind.SOURCE, where.encode()))
    return messages


def ask(
    loop: Loop, source: Source, rank: int, key: Key, *, encryption: Encryption, on_table: Callable[[bytes], object]
) -> Caller:
    """Begins to ask another leader for the table, and calls back with it.

    Args:
        loop: Where everything is watched.
        source: Whom.
        rank: Who asks.
        key: What is proved.
        encryption: Whether the connection is to be encrypted.
        on_table: Called once.
    """

    def on_answer(connection: Connection, kind: Kind, body: bytes) -> None:
        connection.close()
        if kind is not Kind.TABLE:
            raise HorovodInternalError(f"init: {_name(source)} said {kind.name} when it was asked for the table.")
        on_table(body)

    return Caller(
        loop,
        [socket_address(source.endpoint)],
        key,
        claim=Claim(Purpose.TABLE, source.generation, rank, source.rank),
        first_frame=encode_frame(Kind.HELLO),
        on_answer=on_answer,
        encryption=encryption,
    )


def fetch(loop: Loop, source: Source, place: Place, key: Key, encryption: Encryption) -> bytes:
    """Gets the table from another leader, while everything else in the loop is heard.

    Raises:
        HorovodInternalError: It did not come in time.
    """
    tables: list[bytes] = []
    caller = ask(loop, source, place.rank, key, encryption=encryption, on_table=tables.append)
    try:
        if not loop.run_until(lambda: bool(tables), time.monotonic() + source.seconds):
            raise HorovodInternalError(
                f"init: {place} did not get the table of all ranks from {_name(source)} within {source.seconds:g} s "
                f"({caller.trouble}). {REACH_EACH_OTHER}"
            )
    finally:
        caller.close()
    return tables[0]


def pass_on(connection: Connection, kind: Kind, body: bytes, table: bytes, seconds: float) -> None:
    """Answers a leader that has connected for the table.

    Raises:
        ProtocolError: It says something else.
    """
    if kind is not Kind.HELLO or body:
        raise ProtocolError(f"expected an empty HELLO, got {kind.name} of {len(body)} bytes")
    connection.end_after(Kind.TABLE, table, seconds)


def _name(source: Source) -> str:
    return f"rank {source.rank} of host {source.host} at {source.endpoint}"
