"""Limits on those who wait at a listening socket, by where they come from, and what is told of them."""

import contextlib
import resource
import socket
import time

import pytest

from horovod.common.rendezvous import gate
from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.gate import BURST_FACTOR, MAX_ORIGINS, RATE, Crowd, Gate, origin_of
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.refusals import MAX_ADDRESSES, TOLD_EACH, Refusals

MOST = 100
BURST = BURST_FACTOR * MOST


class Clock:
    """A time that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def come(crowd: Crowd[int], count: int, peer: str) -> int:
    """How many of those who come at once may."""
    return sum(crowd.may_come(peer) for _ in range(count))


def test_one_address_may_make_so_many_connections_at_once_and_so_many_in_a_second() -> None:
    clock = Clock()
    crowd: Crowd[int] = Crowd(MOST, clock)
    assert come(crowd, 10 * BURST, "10.0.0.66") == BURST
    clock.now += 0.1
    assert come(crowd, 10 * BURST, "10.0.0.66") == RATE / 10
    assert come(crowd, BURST, "10.0.0.1") == BURST, "another address is another's"
    clock.now += 3600
    assert come(crowd, 10 * BURST, "10.0.0.66") == BURST, "no more is saved up"


def test_those_who_prove_the_key_may_all_come_from_one_address() -> None:
    """A job of thousands behind NAT, or on one machine."""
    crowd: Crowd[int] = Crowd(MOST, Clock())
    for rank in range(10 * BURST):
        assert crowd.may_come("10.0.0.1")
        assert crowd.add(rank, "10.0.0.1") is None
        crowd.remove(rank, proved=True)
    assert len(crowd) == 0


def test_where_too_many_wait_one_of_the_largest_origin_goes() -> None:
    crowd: Crowd[int] = Crowd(MOST, Clock())
    honest = range(40)
    for rank in honest:
        assert crowd.add(rank, f"10.0.0.{rank % 4}") is None
    gone = [crowd.add(number, "10.0.0.66") for number in range(1000, 6000)]
    assert gone[:60] == [None] * 60
    victims = gone[60:]
    assert all(victim is not None and victim >= 1000 for victim in victims)
    assert len(crowd) == MOST
    # By chance: the last ones in are not safe, and the first ones not lost.
    ages = [number - victim for number, victim in zip(range(1060, 6000), victims, strict=True) if victim is not None]
    assert min(ages) > 0 and max(ages) > 120


def test_the_largest_origin_may_be_the_only_one() -> None:
    crowd: Crowd[int] = Crowd(1, Clock())
    assert [crowd.add(number, "10.0.0.1") for number in range(3)] == [None, 0, 1]


def test_origins_are_forgotten_when_they_are_too_many() -> None:
    crowd: Crowd[int] = Crowd(MOST, Clock())
    for number in range(10 * MAX_ORIGINS):
        assert crowd.may_come(f"10.{number // 65536}.{number // 256 % 256}.{number % 256}")
    assert len(crowd._tokens) == MAX_ORIGINS


def test_what_counts_as_one_origin() -> None:
    assert origin_of("10.0.0.1") == "10.0.0.1" != origin_of("10.0.0.2")
    assert origin_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert origin_of("fd00::1") == origin_of("fd00::ffff:2") != origin_of("fd00:0:0:1::1")
    assert origin_of("fe80::1%eth0") == origin_of("fe80::2")
    assert origin_of("") == ""


def test_a_gate_without_descriptors_pauses_and_goes_on() -> None:
    loop, listener = Loop(), listen_at("127.0.0.1", 0)
    address = listener.getsockname()
    accepted: list[socket.socket] = []
    crowd: Crowd[socket.socket] = Crowd()
    door = Gate(loop, listener, crowd, lambda sock, _peer: accepted.append(sock))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as sockets:
        sockets.callback(door.close)
        sockets.enter_context(socket.create_connection(address))
        taken = sockets.enter_context(socket.socket())  # the lowest number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken.fileno(), limits[1]))
        steps = 0
        try:
            deadline = time.monotonic() + 0.35
            while time.monotonic() < deadline:
                loop.step(deadline)
                steps += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not accepted and "Too many open files" in door.trouble
        assert steps < 20, "it spins"
        assert loop.run_until(lambda: len(accepted) == 1, time.monotonic() + 10)
        accepted[0].close()
    loop.close()


def test_a_gate_turns_away_at_once_who_comes_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "RATE", 0.0)
    loop, listener = Loop(), listen_at("127.0.0.1", 0)
    address = listener.getsockname()
    accepted: list[socket.socket] = []
    refused: list[tuple[str, str]] = []
    crowd: Crowd[socket.socket] = Crowd(2)
    door = Gate(loop, listener, crowd, lambda sock, _peer: accepted.append(sock), lambda *who: refused.append(who))
    with contextlib.ExitStack() as sockets:
        sockets.callback(door.close)
        for _ in range(2 * BURST_FACTOR + 3):
            sockets.enter_context(socket.create_connection(address))
        other = sockets.enter_context(socket.create_connection(address, source_address=("127.0.0.9", 0)))
        assert loop.run_until(lambda: len(accepted) == 2 * BURST_FACTOR + 1, time.monotonic() + 10)
        assert refused == [("127.0.0.1", "too many connections from there")] * 3
        assert accepted[-1].getpeername() == other.getsockname()
        for sock in accepted:
            sock.close()
    loop.close()


def test_some_of_those_turned_away_are_told_of_each_address() -> None:
    told: list[str] = []
    refusals = Refusals("rendezvous", told.append, quiet_about=("it has gone",))
    for _ in range(12_345):
        refusals.add("10.0.0.66", "noise")
        refusals.add("10.0.0.66", "it has gone")
    refusals.add("10.0.0.67", "no key")
    first = "rendezvous: turned a connection from 10.0.0.66 away: noise"
    assert told[: TOLD_EACH - 1] == [first] * (TOLD_EACH - 1)
    assert told[TOLD_EACH - 1 :] == [
        f"{first} (further ones from there are counted, and few of them told)",
        *(f"{first} (number {count} from there)" for count in ("100", "1,000", "10,000")),
        "rendezvous: turned a connection from 10.0.0.67 away: no key",
    ]


def test_many_addresses_do_not_fill_the_log() -> None:
    told: list[str] = []
    refusals = Refusals("rendezvous", told.append)
    for number in range(10_000):
        refusals.add(f"10.0.{number // 256}.{number % 256}", "noise")
    assert len(told) < MAX_ADDRESSES + TOLD_EACH + 5
    assert told[MAX_ADDRESSES].endswith("turned a connection from 10.0.0.64, one of many addresses, away: noise")
