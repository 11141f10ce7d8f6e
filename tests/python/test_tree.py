"""How the table reaches all hosts: who asks whom, and what is said if it does not come."""

import contextlib
import threading
import time

import attacks
import pytest
from test_mesh import KEY, Ranks, ranks

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous import tree
from horovod.common.rendezvous.caller import Caller
from horovod.common.rendezvous.encryption import PLAIN
from horovod.common.rendezvous.messages import Kind, Place, Source, encode_frame
from horovod.common.rendezvous.proof import Claim, Key, Purpose
from horovod.common.rendezvous.server import host_key
from horovod.common.rendezvous.times import GRACE_SECONDS, STEP_SECONDS
from horovod.common.rendezvous.tree import FANOUT, ask, asked_by, fetch, messages_for_hosts, seconds_for, source_of


@pytest.mark.parametrize("hosts", [1, 2, FANOUT, FANOUT + 1, 100, 1000])
def test_every_host_gets_the_table_once(hosts: int) -> None:
    has_it = {host for host in range(hosts) if source_of(host) is None}
    assert has_it == set(range(min(hosts, FANOUT)))
    for host in range(hosts):
        assert host in has_it, "its source comes before it"
        asking = asked_by(host, hosts)
        assert len(asking) <= FANOUT and all(source_of(other) == host for other in asking)
        assert not has_it & set(asking)
        has_it |= set(asking)
    assert len(has_it) == hosts


def test_who_is_nearer_to_the_server_gives_up_earlier_and_all_before_the_others_do() -> None:
    for host in range(FANOUT, 10_000):
        source = source_of(host)
        assert source is not None and seconds_for(source) + GRACE_SECONDS < seconds_for(host)
        assert seconds_for(host) + GRACE_SECONDS < STEP_SECONDS


def test_the_server_sends_the_table_to_a_few_hosts_and_to_the_others_who_has_it() -> None:
    host_of = [host for host in range(FANOUT + 2) for _ in range(2)]
    with ranks(host_of) as group:
        said = messages_for_hosts(group.table)
        assert said[:FANOUT] == [(Kind.TABLE, group.table.encode())] * FANOUT
        for kind, body in said[FANOUT:]:
            assert kind is Kind.SOURCE
            assert Source.decode(body) == Source(5, 0, "host0", group.table.endpoints[0], seconds_for(FANOUT))


def source(group: Ranks, rank: int, seconds: float = 5.0) -> Source:
    table = group.table
    return Source(table.generation, rank, table.hosts[table.host_of[rank]], table.endpoints[rank], seconds)


def place_of(group: Ranks, rank: int) -> Place:
    return Place(rank, group.table.size, 0, 1, rank, len(group.table.hosts), f"host{rank}")


def test_a_leader_passes_the_table_on_as_soon_as_it_has_it_to_those_who_ask_it() -> None:
    with ranks(list(range(FANOUT + 2))) as group:
        tables: dict[int, bytes] = {}

        def begin_to_ask(rank: int, of: int) -> Caller:
            return ask(
                group.loop,
                source(group, of),
                rank,
                KEY,
                encryption=PLAIN,
                on_table=lambda table: tables.update({rank: table}),
            )

        early = begin_to_ask(FANOUT, 0)
        assert not group.loop.run_until(lambda: bool(tables), time.monotonic() + 0.1)
        group.begin(0)
        group.begin(1)
        others = [begin_to_ask(FANOUT + 1, 0), begin_to_ask(3, 0), begin_to_ask(FANOUT, 1)]
        assert group.loop.run_until(lambda: len(tables) == 2, time.monotonic() + 10)
        assert not group.loop.run_until(lambda: len(tables) > 2, time.monotonic() + 0.2), "they are not to ask there"
        assert tables == {FANOUT: group.table.encode(), FANOUT + 1: group.table.encode()}
        assert not group.meshes[0].is_complete()
        for caller in (early, *others):
            caller.close()


def test_a_table_that_does_not_come_is_missed_with_words() -> None:
    with ranks([0, 1]) as group, pytest.raises(HorovodInternalError) as caught:
        fetch(group.loop, source(group, 0, 0.2), place_of(group, 1), KEY, PLAIN)
    assert str(caught.value) == (
        "init: rank 1 (local rank 0 of 1 on host host1) did not get the table of all ranks from rank 0 of host host0 "
        f"at {group.table.endpoints[0]} within 0.2 s (nobody listens). Can these hosts reach each other, or is there a "
        "firewall? It must let TCP through to the ports that the system chooses (net.ipv4.ip_local_port_range)."
    )


def test_something_else_than_the_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "pass_on", lambda connection, *_: connection.say(Kind.GO))
    with ranks(list(range(FANOUT + 1))) as group:
        group.begin(0)
        with pytest.raises(HorovodInternalError, match=r"rank 0 of host host0 at .* said GO when it was asked for the"):
            fetch(group.loop, source(group, 0), place_of(group, FANOUT), KEY, PLAIN)


def test_the_table_is_taken_from_nobody_who_does_not_know_the_key() -> None:
    with ranks(list(range(FANOUT + 1))) as group:
        group.begin(0)
        other = source(group, 0, 0.5)
        with pytest.raises(HorovodInternalError, match="the listening process does not know this job's key"):
            fetch(group.loop, other, place_of(group, FANOUT), Key(b"another", KEY.context), PLAIN)


def ask_regardless(group: Ranks, key: Key) -> bytes:
    """What one hears who asks rank 0 for the table, and cares for nothing that it answers."""
    claim = Claim(Purpose.TABLE, group.table.generation, FANOUT, 0)
    heard: list[bytes] = []

    def go_on() -> None:
        with group.connect(0) as sock:
            sock.settimeout(10)
            attacks.prove(key, claim)(sock)
            with contextlib.suppress(ConnectionError):
                sock.sendall(encode_frame(Kind.HELLO))
            heard.append(attacks.what_was_heard(sock, 10))

    stranger = threading.Thread(target=go_on)
    stranger.start()
    while stranger.is_alive():
        group.loop.step(time.monotonic() + 0.01)
    return heard[0]


def test_a_stranger_who_goes_on_regardless_gets_no_byte_of_the_table() -> None:
    with ranks(list(range(FANOUT + 1))) as group:
        group.begin(0)
        strangers = [Key(b"", KEY.context), Key(b"another", KEY.context), host_key(KEY.secret, "another job")]
        assert [ask_regardless(group, key) for key in strangers] == [b""] * 3
        # In the same way who knows the key gets it.
        assert ask_regardless(group, KEY) == encode_frame(Kind.TABLE, group.table.encode())
