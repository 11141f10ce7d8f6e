"""What is encrypted between hosts, what is not, and who is told if hosts differ about it."""

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from ranks import come_together, run_ranks, start_ranks
from recording import record_everything
from test_mesh import KEY, Ranks, ranks

import horovod.numpy as hvd
from horovod import _core
from horovod.common.rendezvous.encryption import PLAIN, Encryption, find_encryption
from horovod.common.rendezvous.mesh import Mesh
from horovod.common.rendezvous.proof import Claim, Purpose

needs_libssl = pytest.mark.skipif(
    not find_encryption().library, reason="needs OpenSSL 3 (Debian's package libssl3): " + find_encryption().trouble
)
LIBRARY = "libssl.so.3"
SECRET_NAME = "the-name-of-a-secret-tensor"
SECRET_VALUES = b"weights that nobody else must see "


# ---- What can be seen on the wire ------------------------------------------------------------------------------------


def say_secrets() -> dict[str, list[bytes]]:
    """Sends a tensor with a telling name and telling bytes, and returns what went over this rank's connections."""
    recorders = record_everything()
    hvd.init()
    values = np.frombuffer(SECRET_VALUES * 10_000, np.uint8)
    for root in range(hvd.size()):
        mine = values if hvd.rank() == root else np.zeros_like(values)
        assert np.array_equal(hvd.broadcast(mine, root_rank=root, name=f"{SECRET_NAME}-{root}"), values)
    seen = {name: [part for one in some for part in one.seen()] for name, some in recorders.items()}
    hvd.barrier()
    return seen


@needs_libssl
@pytest.mark.parametrize("encrypt", [False, True], ids=["control", "control and data"])
def test_nothing_that_is_encrypted_can_be_seen_on_the_wire(encrypt: bool) -> None:
    # Rank 2 connects to all others, and speaks for its host.
    seen = run_ranks(3, say_secrets, hosts=[2, 1], env={"HOROVOD_ENCRYPT": str(int(encrypt))})[2]
    assert len(seen["rendezvous"]) == 2 and len(seen["ranks"]) == 6  # two directions of each
    for part in seen["rendezvous"] + seen["ranks"]:
        assert SECRET_NAME.encode() not in part and b"testhost" not in part
    # Without encryption the values are there to be seen.
    assert any(SECRET_VALUES * 1000 in part for part in seen["ranks"]) == (not encrypt)
    assert sum(map(len, seen["ranks"])) > 2 * len(SECRET_VALUES) * 10_000


def test_without_a_library_everything_can_be_seen_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows too that the test above looks at the right place."""
    monkeypatch.setenv("HOROVOD_TLS_LIBRARY", "none")  # for the server
    with start_ranks(3, say_secrets, hosts=[2, 1], env={"HOROVOD_TLS_LIBRARY": "none"}) as group:
        outcomes = group.wait()
        seen = outcomes[2].value
    assert any(b"testhost" in part for part in seen["rendezvous"])
    assert any(SECRET_NAME.encode() in part for part in seen["ranks"])
    words = "are not encrypted: HOROVOD_TLS_LIBRARY=none."
    assert [words in outcome.stderr for outcome in outcomes] == [True, False, False]


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TLS_LIBRARY", "libnothing.so.9")
    encryption = find_encryption()
    assert not encryption.library and "libnothing.so.9" in encryption.trouble
    monkeypatch.setenv("HOROVOD_TLS_LIBRARY", "libm.so.6")
    assert "not OpenSSL 3" in find_encryption().trouble


# ---- Ranks that differ -----------------------------------------------------------------------------------------------


# A host that comes after the others have given up is told after this time, with their reason.
SHORT = {"HOROVOD_START_TIMEOUT": "5"}


def try_to_meet() -> str:
    come_together(range(int(os.environ["HOROVOD_SIZE"])))
    try:
        hvd.init()
    except (ValueError, hvd.HorovodInternalError) as error:
        return str(error)
    return ""


@needs_libssl
@pytest.mark.parametrize("rank", [0, 1, 2], ids=["leader", "follower", "other"])
def test_a_rank_that_wants_its_data_encrypted_alone_is_an_error_everywhere(rank: int) -> None:
    def alone(one: int) -> dict[str, str | None]:
        return {"HOROVOD_ENCRYPT": "1"} if one == rank else {}

    for text in run_ranks(3, try_to_meet, hosts=[2, 1], env=SHORT, env_of_rank=alone):
        assert f"HOROVOD_ENCRYPT is {int(rank == 0)} on rank 0 and {int(rank != 0)} on rank" in text


@needs_libssl
@pytest.mark.parametrize(
    ("rank", "hosts"), [(0, [1, 2]), (1, [2, 1]), (2, [2, 1])], ids=["leader", "follower", "other"]
)
def test_a_rank_that_finds_no_library_is_named_everywhere(rank: int, hosts: list[int]) -> None:
    def alone(one: int) -> dict[str, str | None]:
        return {"HOROVOD_TLS_LIBRARY": "libnone.so"} if one == rank else {}

    for text in run_ranks(3, try_to_meet, hosts=hosts, env=SHORT, env_of_rank=alone):
        assert f"rank {rank}" in text.split(" encrypts its control connections, and ")[1].split(" can't")[0]
        assert "libssl3" in text and "HOROVOD_TLS_LIBRARY=none everywhere" in text


def test_data_is_not_sent_in_clear_for_lack_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TLS_LIBRARY", "libnone.so")
    env = {"HOROVOD_ENCRYPT": "1", "HOROVOD_TLS_LIBRARY": "libnone.so"}
    for text in run_ranks(2, try_to_meet, hosts=[1, 1], env=env | SHORT):
        assert "HOROVOD_ENCRYPT=1, and rank" in text and "libnone.so" in text and "libssl3" in text
    # One host has nothing to encrypt.
    assert run_ranks(2, try_to_meet, hosts=[2], env=env) == [""] * 2


def test_encryption_without_a_key_is_refused() -> None:
    results = run_ranks(
        2,
        try_to_meet,
        hosts=[1, 1],
        env={"HOROVOD_ENCRYPT": "1", "HOROVOD_INSECURE": "1"},
        env_of_rank=lambda _rank: {"HOROVOD_SECRET_KEY": None},
    )
    assert all("HOROVOD_ENCRYPT=1 needs a key: set HOROVOD_SECRET_KEY_FILE" in text for text in results)


# ---- The mesh, in one process ----------------------------------------------------------------------------------------


def begin(group: Ranks, rank: int, encryption: Encryption) -> None:
    mesh = Mesh(group.loop, rank, group.table, group.listeners[rank], KEY, encryption=encryption)
    mesh.connect()
    group.meshes[rank] = mesh


@needs_libssl
@pytest.mark.parametrize("data", [False, True])
def test_the_connections_that_are_to_be_encrypted_are(data: bool) -> None:
    with ranks([0, 1, 0]) as group:
        for rank in range(3):
            begin(group, rank, find_encryption(data))
        assert group.complete(20)
        for rank, mesh in group.meshes.items():
            links, controls, sessions = mesh.take()
            fds = [fd for fd in links + controls if fd >= 0]
            wanted = {fd for fd in (links if data else []) + controls if fd >= 0}
            assert sessions.keys() == wanted and len(wanted) == {0: 1, 1: 1, 2: 0}[rank] + data * (1 + (rank == 1))
            for fd in fds:
                os.close(fd)


@needs_libssl
@pytest.mark.parametrize("plain", [0, 1])
def test_a_connection_that_only_one_side_encrypts_is_not_used(plain: int) -> None:
    with ranks([0, 1]) as group:
        for rank in range(2):
            begin(group, rank, PLAIN if rank == plain else find_encryption(True))
        assert not group.complete(0.5)


# ---- Sessions, as the meeting uses them ------------------------------------------------------------------------------


@contextlib.contextmanager
def session_pair(keys: tuple[bytes, bytes]) -> Iterator[list[tuple[_core.TlsSession, int]]]:
    with contextlib.ExitStack() as sockets:
        pair = [sockets.enter_context(sock) for sock in socket.socketpair()]
        for sock in pair:
            sock.setblocking(False)
        yield [
            (_core.TlsSession(LIBRARY, index == 1, key), sock.fileno())
            for index, (sock, key) in enumerate(zip(pair, keys, strict=True))
        ]


def shake_hands(ends: list[tuple[_core.TlsSession, int]]) -> None:
    for _ in range(10):
        if all([session.handshake(fd) for session, fd in ends]):
            return
    raise AssertionError("the handshake does not end")


@needs_libssl
def test_what_one_end_of_a_session_writes_the_other_reads() -> None:
    with session_pair((b"k" * 32, b"k" * 32)) as ends:
        shake_hands(ends)
        (one, one_fd), (other, other_fd) = ends
        assert other.read(other_fd, 10) is None
        data = bytes(range(256)) * 8000
        sent, heard = 0, b""
        while len(heard) < len(data):
            sent += one.write(one_fd, data[sent:])
            one.flush(one_fd)
            heard += other.read(other_fd, 100_000) or b""
        assert heard == data and not one.has_output()
        with pytest.raises(ValueError, match="a byte at least"):
            one.read(one_fd, 0)


@needs_libssl
def test_sessions_with_different_keys_do_not_come_about() -> None:
    with session_pair((b"k" * 32, b"l" * 32)) as ends, pytest.raises(hvd.HorovodInternalError, match="TLS handshake"):
        shake_hands(ends)
    with pytest.raises(ValueError, match="a key of 5 bytes; expected 32"):
        _core.TlsSession(LIBRARY, True, b"short")
    with pytest.raises(hvd.HorovodInternalError, match="libnothing"):
        _core.TlsSession("libnothing.so.9", True, b"k" * 32)


def test_the_key_of_a_connection_is_its_own() -> None:
    claim, one, other = Claim(Purpose.DATA, 3, 2, 1, True), b"a" * 32, b"b" * 32
    keys = {
        KEY.session_key(claim, one, other),
        KEY.session_key(claim, other, one),
        KEY.session_key(claim, one, b"c" * 32),
        KEY.session_key(Claim(Purpose.CONTROL, 3, 2, 1, True), one, other),
        KEY.session_key(Claim(Purpose.DATA, 4, 2, 1, True), one, other),
        KEY.session_key(Claim(Purpose.DATA, 3, 0, 1, True), one, other),
        KEY.session_key(Claim(Purpose.DATA, 3, 2, 0, True), one, other),
    }
    assert len(keys) == 7 and all(len(key) == 32 for key in keys)


def test_nobody_on_the_way_can_talk_two_sides_out_of_encryption() -> None:
    claim, asked, own = Claim(Purpose.CONTROL, 3, 2, 0, True), b"a" * 32, b"b" * 32
    answer = bytearray(KEY.answer(claim, asked, own, True))
    answer[32] = 0  # "I do not encrypt"
    with pytest.raises(Exception, match="does not know this job's key"):
        KEY.check_answer(claim, bytes(answer), asked)
    plain = Claim(Purpose.CONTROL, 3, 2, 0, False)
    proof = KEY.check_answer(claim, KEY.answer(claim, asked, own, True), asked)
    with pytest.raises(Exception, match="does not know this job's key"):
        KEY.check_proof(plain, proof, asked, own, True)
