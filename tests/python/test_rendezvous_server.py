"""The rendezvous server by itself: who is let in, what it costs, and how it scales."""

import contextlib
import os
import resource
import select
import socket
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod import __version__
from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.attempt import Attempt, Leader
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.loop import READ, Loop
from horovod.common.rendezvous.messages import MAX_FRAME, HostHello, Kind, Place
from horovod.common.rendezvous.proof import ANSWER_SIZE, CHALLENGE_SIZE, MAGIC, Claim, Key, Purpose, encode_opening
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.common.rendezvous.table import Table
from horovod.common.rendezvous.tree import FANOUT

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from simulated_hosts import KEY, Host, meet, place_of


class Running:
    """A server that runs in a thread, and what it has told."""

    def __init__(self, host_of_rank: list[str]) -> None:
        listener = listen_at("127.0.0.1", 0)
        self.address: tuple[str, int] = listener.getsockname()
        self.told: list[str] = []
        self.server = RendezvousServer(listener, KEY, host_of_rank, self.told.append)


@contextlib.contextmanager
def running(host_of_rank: list[str]) -> Iterator[Running]:
    run = Running(host_of_rank)
    with serving(run.server):
        yield run


@pytest.mark.parametrize(("count", "local_size"), [(125, 8), (1000, 1)])
def test_a_thousand_ranks_meet_with_one_connection_a_host(count: int, local_size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip("needs 8192 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8192), hard))
    size = count * local_size
    with running([f"host{rank // local_size}" for rank in range(size)]) as run:
        start = time.monotonic()
        hosts = meet(run.address, count, local_size)
        seconds = time.monotonic() - start
        # Every leader was let in at its first attempt, and hears four things.
        assert all(host.caller._attempts == 1 for host in hosts)
        told = [[Kind.ACCEPTED, kind, Kind.GO, Kind.DONE] for kind in (Kind.TABLE, Kind.SOURCE)]
        assert [host.heard for host in hosts] == [told[index >= FANOUT] for index in range(count)]
        received = sum(host.bytes_received for host in hosts)
        assert received == run.server.bytes_sent
        # The table, some 20 bytes a rank and 14 a host, goes to a few; all others get the address of one who has it.
        table_bytes = 24 * size + 16 * count + 100
        assert received <= FANOUT * table_bytes + 80 * count
        assert max(host.bytes_passed_on for host in hosts) <= FANOUT * table_bytes
        print(f"{size} ranks on {count} hosts: {count} connections, {received} bytes sent, {seconds:.1f} s")
    table = Table.decode(hosts[0].table)
    assert table.size == size and len(table.hosts) == count
    assert all(host.table == hosts[0].table for host in hosts)


def test_the_server_serves_the_next_generation() -> None:
    with running(["host0", "host1"]) as run:
        for _ in range(3):
            assert all(host.heard[-1] is Kind.DONE for host in meet(run.address, 2, 1))


# ---- Strangers -------------------------------------------------------------------------------------------------------


def prove(sock: socket.socket, key: Key = KEY, rank: int = 0) -> None:
    claim = Claim(Purpose.HOST, 0, rank, 0)
    challenge = bytes(CHALLENGE_SIZE)
    sock.sendall(encode_opening(claim, challenge))
    answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
    sock.sendall(key.check_answer(claim, answer, challenge))


def is_dropped(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(seconds)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def header(kind: int, length: int) -> bytes:
    return bytes([kind]) + length.to_bytes(4, "big")


def wrong_key(sock: socket.socket) -> None:
    sock.sendall(encode_opening(Claim(Purpose.HOST, 0, 0, 0), bytes(CHALLENGE_SIZE)))
    sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
    sock.sendall(b"\0" * 32)


def parrot(sock: socket.socket) -> None:
    """Sends the server's own proof back to it."""
    sock.sendall(encode_opening(Claim(Purpose.HOST, 0, 0, 0), bytes(CHALLENGE_SIZE)))
    sock.sendall(sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)[CHALLENGE_SIZE:])


def other_purpose(sock: socket.socket) -> None:
    sock.sendall(encode_opening(Claim(Purpose.DATA, 1, 1, 0), bytes(CHALLENGE_SIZE)))


def says(first: bytes) -> object:
    def attack(sock: socket.socket) -> None:
        prove(sock)
        sock.sendall(first)

    return attack


AT_ONCE = {
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100),
    "wrong key": wrong_key,
    "reflection": parrot,
    "other purpose": other_purpose,
    "huge length": says(header(Kind.HELLO, 0xFFFFFFFF)),
    "too long": says(header(Kind.HELLO, MAX_FRAME + 1)),
    "unknown kind": says(header(99, 0)),
    "not HELLO": says(header(Kind.REPORT, 0)),
    "empty HELLO": says(header(Kind.HELLO, 0)),
    "HELLO of noise": says(header(Kind.HELLO, 64) + b"\xf0" * 64),
}
IN_TIME = {
    "silence": lambda _sock: None,
    "half an opening": lambda sock: sock.sendall(MAGIC + b"1234"),
    "half a header": says(b"\x01\x00"),
    "half a body": says(header(Kind.HELLO, 1000) + b"x" * 10),
}


def test_strangers_are_turned_away_at_once_or_after_some_seconds_and_disturb_nobody() -> None:
    with running(["host0", "host1"]) as run, contextlib.ExitStack() as sockets:
        slow = {}
        for name, attack in IN_TIME.items():
            slow[name] = sockets.enter_context(socket.create_connection(run.address))
            attack(slow[name])  # type: ignore[operator]
        for name, attack in AT_ONCE.items():
            with socket.create_connection(run.address) as sock:
                attack(sock)  # type: ignore[operator]
                assert is_dropped(sock, 4), name
        start = time.monotonic()
        assert all(host.heard[-1] is Kind.DONE for host in meet(run.address, 2, 1))
        assert time.monotonic() - start < 4, "the slow ones held up the others"
        for name, sock in slow.items():
            assert is_dropped(sock, 10), name
        assert all(host.heard[-1] is Kind.DONE for host in meet(run.address, 2, 1))
    assert any("127.0.0.1" in text and "does not know this job's key" in text for text in run.told)
    assert len(run.told) <= 10


def test_a_crowd_of_silent_connections_keeps_nobody_out_and_does_not_grow() -> None:
    """Also if it comes from where the hosts come from."""
    with running(["host0", "host1"]) as run, contextlib.ExitStack() as sockets:
        crowd = [sockets.enter_context(socket.create_connection(run.address)) for _ in range(MAX_STRANGERS + 100)]
        assert all(host.heard[-1] is Kind.DONE for host in meet(run.address, 2, 1))
        dropped = select.select(crowd, [], [], 1)[0]  # nothing was said to them: what can be read is their end
        assert 100 <= len(dropped) <= 110, "a few more, where hosts came to the full house"


def test_proofs_are_bound_to_job_purpose_and_ranks() -> None:
    """A recorded proof is of no use for another connection."""
    claim, asked, own = Claim(Purpose.DATA, 3, 2, 1), b"a" * 32, b"b" * 32
    proof = KEY.check_answer(claim, KEY.answer(claim, asked, own), asked)
    KEY.check_proof(claim, proof, asked, own)
    others = [
        (KEY, Claim(Purpose.CONTROL, 3, 2, 1), asked, own),
        (KEY, Claim(Purpose.DATA, 4, 2, 1), asked, own),
        (KEY, Claim(Purpose.DATA, 3, 5, 1), asked, own),
        (KEY, Claim(Purpose.DATA, 3, 2, 0), asked, own),
        (KEY, claim, b"c" * 32, own),
        (KEY, claim, asked, b"c" * 32),
        (host_key(b"the key", "another job"), claim, asked, own),
        (host_key(b"another key", "the job"), claim, asked, own),
    ]
    for key, other, challenge, answered in others:
        with pytest.raises(Exception, match="does not know this job's key"):
            key.check_proof(other, proof, challenge, answered)


def test_contradicting_hosts_are_told_both_sides() -> None:
    with running([]) as run:
        loop = Loop()
        first = Host(loop, run.address, place_of(0, 2, 3))
        assert loop.run_until(lambda: bool(first.heard), time.monotonic() + 10)
        second = Host(loop, run.address, Place(2, 6, 0, 2, 1, 3, "host0"), pid=77)
        assert loop.run_until(lambda: first.is_over() and second.is_over(), time.monotonic() + 10)
        loop.close()
        assert str(first.error) == str(second.error)
        assert f"rank 0 (pid {os.getpid()}) and rank 2 (pid 77) both are local rank 0 of host host0" in str(first.error)


def test_another_version_is_told() -> None:
    with running([]) as run:
        loop = Loop()
        first = Host(loop, run.address, place_of(0, 2, 3))
        assert loop.run_until(lambda: bool(first.heard), time.monotonic() + 10)
        second = Host(loop, run.address, place_of(1, 2, 3), version="0.1")
        assert loop.run_until(lambda: first.is_over() and second.is_over(), time.monotonic() + 10)
        loop.close()
        assert str(first.error) == str(second.error)
        assert f"rank 2 runs Horovod 0.1, rank 0 (local rank 0 of 2 on host host0) {__version__}" in str(first.error)


def test_a_job_that_says_it_is_huge_costs_no_memory() -> None:
    attempt = Attempt(timeout=1.0)
    place = Place(2, 10_000_000, 0, 1, 1, 2, "a")
    connection = Connection(socket.socket(), Loop(), lambda _reason: None)
    leader = Leader(HostHello(__version__, place, 1, 1.0), connection)
    attempt.add(leader)
    attempt.holders[2] = leader
    tracemalloc.start()
    text = attempt.who_is_late([], "there")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    connection.close()
    assert "rank 0-1, 3-9999999 did not arrive" in text
    assert peak < 1 << 20


def test_a_deadline_may_be_farther_away_than_the_kernel_can_wait() -> None:
    loop = Loop()
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(loop):
        theirs.send(b"x")
        heard: list[int] = []
        loop.watch(ours.fileno(), READ, heard.append)
        loop.at(time.monotonic() + 1e12, lambda: None)
        loop.step(time.monotonic() + 1e300)
        assert heard == [READ]
