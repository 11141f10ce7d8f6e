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

import numpy as np
import pytest
from skipping import skip

from horovod import __version__
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.attempt import Attempt, Leader
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.encryption import find_encryption
from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.loop import READ, Loop
from horovod.common.rendezvous.messages import (
    MAX_FRAME,
    NOWHERE,
    Configuration,
    Endpoint,
    Hello,
    HostHello,
    Kind,
    Member,
    Place,
    Report,
)
from horovod.common.rendezvous.proof import ANSWER_SIZE, CHALLENGE_SIZE, MAGIC, Claim, Key, Purpose, encode_opening
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.common.rendezvous.server_line import ServerLine

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from job_in_one_process import (
    KEY,
    CountingListener,
    Outcome,
    Traffic,
    counted_server,
    files_needed,
    hosts_of_ranks,
    meet_all,
    one_core,
)

CONFIGURATION = Configuration([], 1 << 27, 1024, False)


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


def have_met(outcome: Outcome) -> bool:
    """Whether all ranks have, with the same table; raises the first error if not."""
    for error in outcome.errors.values():
        raise error
    first = outcome.tables[0]
    assert sorted(outcome.tables) == list(range(first.size))
    return all(table == first for table in outcome.tables.values())


# ---- Size ------------------------------------------------------------------------------------------------------------


def meet_and_count(hosts: int, local_size: int) -> Traffic:
    """Has a job meet, by the code of all its ranks; returns what was counted at the server."""
    needed = files_needed(hosts, local_size)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < needed:
        skip(f"needs {needed} open files: raise the limit (ulimit -Hn)")
    with one_core(hosts * local_size), counted_server(hosts_of_ranks(hosts, local_size)) as (server, traffic):
        outcome = meet_all(hosts, local_size, server)
    assert have_met(outcome)
    table = outcome.tables[0]
    assert table.host_of == [rank // local_size for rank in range(hosts * local_size)]
    # One connection a host, and none was ever made in vain.
    assert traffic.connections == traffic.most_open == hosts
    return traffic


@pytest.mark.parametrize("local_size", [8, 1])
def test_a_thousand_ranks_meet_by_one_connection_a_host_and_bytes_that_grow_as_they_do(local_size: int) -> None:
    """The table has 24 bytes for each rank, so to send it to each of 1,000 hosts would take 24 MB."""
    sizes = np.array([104, 400, 1000])
    counted = [meet_and_count(size // local_size, local_size) for size in sizes]
    sent, received = (np.array([getattr(each, name) for each in counted]) for name in ("bytes_sent", "bytes_received"))
    for values in (sent, received):
        slope, start = np.polyfit(sizes, values, 1)
        assert np.abs(values - (slope * sizes + start)).max() < 0.03 * values[-1], "it is no straight line"
        assert values[-1] / sizes[-1] < 1.1 * values[0] / sizes[0], "more for each rank where there are more of them"
    # With proofs and handshakes of TLS, which each host has.
    assert sent[-1] + received[-1] < 1000 * 250 + 1000 / local_size * 1500


def test_what_comes_and_goes_at_a_listening_socket_is_counted() -> None:
    """To the byte, but for the end of a connection, which TCP counts as one."""
    listener = CountingListener.on(listen_at("127.0.0.1", 0))
    with listener:
        for round_, (theirs, ours) in enumerate([(b"x" * 1000, b"y" * 30), (b"x", b"y" * 100_000)], 1):
            with socket.create_connection(listener.getsockname()) as far:
                near, _ = listener.accept()
                with near:
                    far.sendall(theirs)
                    assert near.recv(len(theirs), socket.MSG_WAITALL) == theirs
                    near.sendall(ours)
                    assert far.recv(len(ours), socket.MSG_WAITALL) == ours
                    far.shutdown(socket.SHUT_WR)
                    assert near.recv(1) == b""
            assert listener.traffic.connections == round_ and listener.traffic.most_open == 1
        assert 0 <= listener.traffic.bytes_received - 1001 <= 2
        assert 0 <= listener.traffic.bytes_sent - 100_030 <= 2


def test_the_server_serves_the_next_generation() -> None:
    with running(["host0", "host1"]) as run:
        for _ in range(3):
            assert have_met(meet_all(2, 1, run.address))


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
        assert have_met(meet_all(2, 1, run.address))
        assert time.monotonic() - start < 4, "the slow ones held up the others"
        for name, sock in slow.items():
            assert is_dropped(sock, 10), name
        assert have_met(meet_all(2, 1, run.address))
    assert any("127.0.0.1" in text and "does not know this job's key" in text for text in run.told)
    assert len(run.told) <= 10


def test_a_crowd_of_silent_connections_keeps_nobody_out_and_does_not_grow() -> None:
    """Also if it comes from where the hosts come from."""
    with running(["host0", "host1"]) as run, contextlib.ExitStack() as sockets:
        crowd = [sockets.enter_context(socket.create_connection(run.address)) for _ in range(MAX_STRANGERS + 100)]
        assert have_met(meet_all(2, 1, run.address))
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


def errors_of_two(address: tuple[str, int], first: Place, second: Place, version: str = __version__) -> list[str]:
    """What the leaders of two hosts are told, of which the second comes when the first has arrived."""
    with contextlib.ExitStack() as resources:

        def arrive(place: Place, own_version: str) -> ServerLine:
            loop = resources.enter_context(contextlib.closing(Loop()))
            hello = Hello(own_version, place, CONFIGURATION, 0, NOWHERE)
            where = [(socket.AF_INET, address)]
            line = ServerLine(loop, hello, where, KEY, timeout=10.0, encryption=find_encryption())
            return resources.enter_context(contextlib.closing(line))

        early = arrive(first, __version__)
        early.say(Kind.REPORT, report_of(first).encode())  # returns when the server has accepted it
        late = arrive(second, version)
        with pytest.raises((ValueError, HorovodInternalError)) as told_late:
            late.say(Kind.REPORT, report_of(second).encode())
        with pytest.raises((ValueError, HorovodInternalError)) as told_early:
            early.expect(Kind.TABLE, 10.0)
        return [str(early.fail(told_early.value)), str(late.fail(told_late.value))]


def report_of(place: Place) -> Report:
    members = [
        Member(place.rank + local, place.cross_rank, place.cross_size, os.getpid(), Endpoint("10.0.0.1", 1000))
        for local in range(place.local_size)
    ]
    return Report(CONFIGURATION, 0, members)


def test_contradicting_hosts_are_told_both_sides() -> None:
    with running([]) as run:
        first, second = Place(0, 6, 0, 2, 0, 3, "host0"), Place(2, 6, 0, 2, 1, 3, "host0")
        texts = errors_of_two(run.address, first, second)
    assert texts[0] == texts[1]
    pid = os.getpid()
    assert f"rank 0 (pid {pid}) and rank 2 (pid {pid}) both are local rank 0 of host host0" in texts[0]


def test_another_version_is_told() -> None:
    with running([]) as run:
        first, second = Place(0, 6, 0, 2, 0, 3, "host0"), Place(2, 6, 0, 2, 1, 3, "host1")
        texts = errors_of_two(run.address, first, second, version="0.1")
    assert texts[0] == texts[1]
    assert f"rank 2 runs Horovod 0.1, rank 0 (local rank 0 of 2 on host host0) {__version__}" in texts[0]


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
