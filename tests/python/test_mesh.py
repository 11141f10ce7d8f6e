"""Connections between ranks of different hosts: all in one process and one loop, over real sockets."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from horovod.common.rendezvous.addresses import bind_for_peers, endpoint_of, resolve
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.mesh import Mesh, ends_of
from horovod.common.rendezvous.messages import Kind, encode_frame
from horovod.common.rendezvous.proof import ANSWER_SIZE, MAGIC, Claim, Key, Purpose, encode_opening
from horovod.common.rendezvous.server import host_key
from horovod.common.rendezvous.table import Table

KEY = host_key(b"the key", "the job")
CHALLENGE = b"c" * 32


class Ranks:
    """Ranks that have their table and have not begun to connect."""

    def __init__(self, host_of: list[int], address: str = "127.0.0.1") -> None:
        self.loop = Loop()
        self.listeners = [bind_for_peers(resolve(address, 1), None) for _ in host_of]
        names = [f"host{host}" for host in range(max(host_of) + 1)]
        endpoints = [endpoint_of(listener) for listener in self.listeners]
        self.table = Table(5, names, host_of, list(range(100, 100 + len(host_of))), endpoints)
        self.meshes: dict[int, Mesh] = {}

    def begin(self, rank: int, key: Key = KEY, generation: int = 5) -> None:
        table = Table(generation, self.table.hosts, self.table.host_of, self.table.pids, self.table.endpoints)
        self.meshes[rank] = Mesh(self.loop, rank, table, self.listeners[rank], key)
        self.meshes[rank].connect()

    def complete(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return self.loop.run_until(lambda: all(mesh.is_complete() for mesh in self.meshes.values()), deadline)

    def connect(self, rank: int) -> socket.socket:
        return socket.create_connection(self.listeners[rank].getsockname()[:2])

    def close(self) -> None:
        for mesh in self.meshes.values():
            mesh.close()
        for listener in self.listeners:
            listener.close()
        self.loop.close()


@contextlib.contextmanager
def ranks(host_of: list[int], address: str = "127.0.0.1") -> Iterator[Ranks]:
    group = Ranks(host_of, address)
    with contextlib.closing(group):
        yield group


def close_all(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def test_which_connections_a_rank_has() -> None:
    def peers(purpose: Purpose) -> list[list[int]]:
        return [[peer for its, peer in ends_of(rank, group.table) if its is purpose] for rank in range(5)]

    with ranks([0, 1, 0, 2, 1]) as group:  # ranks may be dealt out in turn
        assert peers(Purpose.DATA) == [[1, 3, 4], [0, 2, 3], [1, 3, 4], [0, 1, 2, 4], [0, 2, 3]]
        assert peers(Purpose.CONTROL) == [[1, 3], [0], [], [0], []]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_that_begin_in_any_order_are_connected(address: str) -> None:
    with ranks([0, 1, 0, 2, 1], address) as group:
        for rank in (4, 2, 0, 3, 1):
            group.begin(rank)
            group.complete(0.05)  # those who listen are connected to already, the others refuse
        assert group.complete(20)
        for rank, mesh in group.meshes.items():
            links, controls, sessions = mesh.take()
            assert not sessions
            host_of = group.table.host_of
            assert [fd >= 0 for fd in links] == [host_of[peer] != host_of[rank] for peer in range(5)]
            assert sum(fd >= 0 for fd in controls) == {0: 2, 1: 1, 3: 1}.get(rank, 0)
            close_all(links + controls)


def test_nobody_listens_before_there_is_a_table() -> None:
    with ranks([0, 1]) as group, pytest.raises(ConnectionRefusedError):
        group.connect(0)


def test_strangers_do_not_delay_the_others() -> None:
    with ranks([0, 1]) as group, contextlib.ExitStack() as sockets:
        group.begin(0)
        strangers = [sockets.enter_context(group.connect(0)) for _ in range(400)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
        strangers[1].sendall(MAGIC + b"12")
        strangers[2].sendall(encode_opening(Claim(Purpose.DATA, 4, 1, 0), CHALLENGE))  # another generation
        strangers[3].sendall(encode_opening(Claim(Purpose.DATA, 5, 2, 0), CHALLENGE))  # no such rank
        strangers[4].sendall(encode_opening(Claim(Purpose.DATA, 5, 1, 0), CHALLENGE) + b"\0" * 32)  # a wrong proof
        start = time.monotonic()
        group.begin(1)
        assert group.complete(20)
        assert time.monotonic() - start < 4, "strangers held it up"


def test_a_proof_without_the_right_first_frame_is_not_enough() -> None:
    with ranks([0, 1]) as group:
        group.begin(0)
        for first in (encode_frame(Kind.GO), encode_frame(Kind.HELLO, b"more"), b"\x01\xff\xff\xff\xff"):
            with group.connect(0) as sock:
                claim = Claim(Purpose.DATA, 5, 1, 0)
                sock.sendall(encode_opening(claim, CHALLENGE))
                group.complete(0.2)
                sock.settimeout(5)
                answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
                sock.sendall(KEY.check_answer(claim, answer, CHALLENGE) + first)
                assert not group.complete(0.2)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        group.begin(1)
        assert group.complete(20)


@pytest.mark.parametrize(
    ("key", "generation", "words"),
    [
        (host_key(b"another", "the job"), 5, "the listening process does not know this job's key"),
        (KEY, 4, "the connection was closed"),
    ],
    ids=["another key", "another generation"],
)
def test_ranks_that_do_not_belong_together_are_not_connected(key: Key, generation: int, words: str) -> None:
    with ranks([0, 1]) as group:
        group.begin(0)
        group.begin(1, key, generation)
        assert not group.complete(1)
        endpoint = group.table.endpoints[0]
        rank_0 = f"rank 0 (local rank 0 of 1 on host host0) at {endpoint} did not accept a connection"
        assert group.meshes[1].missing().startswith(f"{rank_0} ({words}")
        assert group.meshes[0].missing() == f"rank 1 (local rank 0 of 1 on host host1) did not connect to {endpoint}"


def test_a_connection_that_breaks_on_its_way_is_made_again() -> None:
    """Whatever listens at rank 0's place first is not rank 0."""
    with ranks([0, 1]) as group:
        impostor = socket.create_server(("127.0.0.1", 0))
        with impostor:
            endpoints = [endpoint_of(impostor), group.table.endpoints[1]]
            group.table = Table(5, group.table.hosts, group.table.host_of, group.table.pids, endpoints)
            group.begin(1)
            impostor.settimeout(5)
            group.complete(0.1)
            with impostor.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(b"\0" * ANSWER_SIZE)
                assert not group.complete(0.3)
            address = impostor.getsockname()
        group.listeners[0].close()
        group.listeners[0] = socket.create_server(address)
        group.begin(0)
        assert group.complete(20)
