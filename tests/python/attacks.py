"""What strangers do to a job's listening sockets, and which of those it has.

An attack is a function that gets a connection. Each comes from an address of its own, 127.66.0.N, so that the job's log
can be asked what it says of each of them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod.common.rendezvous.proof import (
    ANSWER_SIZE,
    CHALLENGE_SIZE,
    MAGIC,
    OPENING_SIZE,
    PROOF_SIZE,
    Claim,
    Key,
    Purpose,
    encode_opening,
)

DOES_NOT_KNOW = "it does not know this job's key"
OTHER_PROTOCOL = "it does not speak this protocol"
TOO_SLOW = "it proved nothing within 5 s"
_CLIENT_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(240)


# ---- Where a job listens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A socket that listens, and whose it is."""

    pid: int
    family: socket.AddressFamily
    address: tuple[str, int] | bytes

    def connect(self, source: str = "") -> socket.socket:
        """Connects, from an address of this machine."""
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.settimeout(10)
        if source and self.family == socket.AF_INET:
            sock.bind((source, 0))
        sock.connect(self.address)
        return sock


def listeners(pids: Iterable[int]) -> set[Listener]:
    """All TCP and Unix sockets at which processes listen."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(fd)] = pid
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and owner is not None:
                number, port = fields[1].split(":")
                words = struct.unpack(f">{len(number) // 8}I", bytes.fromhex(number))
                address = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                found.add(Listener(owner, family, (address, int(port, 16))))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        owner = owners.get(f"socket:[{fields[6]}]")
        if fields[3] == "00010000" and owner is not None and len(fields) > 7:
            found.add(Listener(owner, socket.AF_UNIX, fields[7].replace("@", "\0", 1).encode()))
    return found


# ---- Attacks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """What a stranger does with a connection, and what the log says of it."""

    act: Callable[[socket.socket], None]
    told: str

    def __call__(self, sock: socket.socket) -> None:
        self.act(sock)


class Bomb:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def say(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)


def prove(key: Key, claim: Claim) -> Callable[[socket.socket], None]:
    """Goes through the handshake by a key that need not be the job's."""

    def act(sock: socket.socket) -> None:
        own = secrets.token_bytes(CHALLENGE_SIZE)
        sock.sendall(encode_opening(claim, own))
        asked = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)[:CHALLENGE_SIZE]
        # An honest one would see that the other side has another key; this one goes on.
        sock.sendall(key.check_answer(claim, key.answer(claim, own, asked, True), own))

    return act


def reflect(claim: Claim) -> Callable[[socket.socket], None]:
    """Has the listening side answer its own challenge."""

    def act(sock: socket.socket) -> None:
        sock.sendall(encode_opening(claim, bytes(CHALLENGE_SIZE)))
        answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
        with socket.socket(sock.family, socket.SOCK_STREAM) as second:
            second.connect(sock.getpeername())
            second.sendall(encode_opening(claim, answer[:CHALLENGE_SIZE]))
            sock.sendall(second.recv(ANSWER_SIZE, socket.MSG_WAITALL)[-PROOF_SIZE:])

    return act


def replay(recorded: bytes) -> Callable[[socket.socket], None]:
    """Says what an honest one has said before, and waits for the answer where that one did."""

    def act(sock: socket.socket) -> None:
        assert recorded.startswith(MAGIC)
        sock.sendall(recorded[:OPENING_SIZE])
        sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
        sock.sendall(recorded[OPENING_SIZE:])

    return act


def half_close(sock: socket.socket) -> None:
    sock.sendall(MAGIC)
    sock.shutdown(socket.SHUT_WR)


def pickles(bomb: Path) -> dict[str, bytes]:
    """A bomb in every envelope in which the ports of the existing Horovod would take it."""
    data = pickle.dumps(Bomb(bomb))
    put = base64.b64encode(data)
    return {
        "a pickle": data,
        # Its services for tasks and drivers: digest, length, pickle.
        "a pickle with digest and length": secrets.token_bytes(32) + struct.pack("i", len(data)) + data,
        "a pickle with its length": struct.pack(">Q", len(data)) + data,
        # Its store of keys and values: PUT /scope/key with a pickle in base64 (CVE-2024-10190).
        "a pickle by PUT": b"PUT /worker_addresses/0 HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(put), put),
    }


def quick_attacks(claim: Claim, key: Key, other_job: Key, bomb: Path) -> dict[str, Attack]:
    """Those who are turned away at once.

    Args:
        claim: What an honest one would come for now.
        key: One that is not this job's.
        other_job: The key of another job that has the same secret.
        bomb: The file that must not appear.
    """
    opening = encode_opening(claim, bytes(CHALLENGE_SIZE))
    other_purpose = next(purpose for purpose in Purpose if purpose is not claim.purpose)
    attacks = {
        "HTTP": Attack(say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100)), OTHER_PROTOCOL),
        "TLS": Attack(say(_CLIENT_HELLO), OTHER_PROTOCOL),
        "noise": Attack(say(b"\xff" * 100_000), OTHER_PROTOCOL),
        "lengths of 4 GiB": Attack(say(opening + b"\x01\xff\xff\xff\xff" * 100), DOES_NOT_KNOW),
        "no key": Attack(prove(Key(b"", other_job.context), claim), DOES_NOT_KNOW),
        "another key": Attack(prove(key, claim), DOES_NOT_KNOW),
        "another job with the same key": Attack(prove(other_job, claim), DOES_NOT_KNOW),
        "its own proof": Attack(reflect(claim), DOES_NOT_KNOW),
        "another purpose": Attack(
            say(encode_opening(Claim(other_purpose, 0, 1, 0), bytes(CHALLENGE_SIZE))), "which is not awaited"
        ),
        "an unknown purpose": Attack(say(MAGIC + b"\x63" + bytes(OPENING_SIZE)), "it comes for an unknown purpose"),
        "half-closed": Attack(half_close, "the connection was closed"),
    }
    return attacks | {name: Attack(say(data + bytes(200)), OTHER_PROTOCOL) for name, data in pickles(bomb).items()}


def slow_attacks(claim: Claim) -> dict[str, Attack]:
    """Those who do not go on."""
    opening = encode_opening(claim, bytes(CHALLENGE_SIZE))
    return {
        "silence": Attack(lambda _sock: None, TOO_SLOW),
        "half an opening": Attack(say(opening[:-1]), TOO_SLOW),
        "an opening alone": Attack(say(opening), TOO_SLOW),
        "half a proof": Attack(say(opening + bytes(PROOF_SIZE - 1)), TOO_SLOW),
    }


def what_was_heard(sock: socket.socket, seconds: float) -> bytes:
    """All that comes until the other side ends the connection, which it must within some seconds."""
    heard = b""
    sock.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            heard += part
    return heard


def source_of(number: int) -> str:
    """The address of an attacker."""
    return f"127.66.0.{1 + number}"


def strike(listener: Listener, attacks: Sequence[Attack], first: int = 0) -> None:
    """Makes attacks, one after the other, each from its own address: all are turned away, and learn nothing."""
    for number, attack in enumerate(attacks, first):
        with listener.connect(source_of(number)) as sock:
            with contextlib.suppress(ConnectionError):  # it was turned away before it had said all
                attack(sock)
            assert len(what_was_heard(sock, 5)) <= ANSWER_SIZE, attack


_FLOOD = """
import errno, socket, sys
address, sources, held = (sys.argv[1], int(sys.argv[2])), sys.argv[3].split(","), []
while True:
    for source in sources:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        try:
            sock.bind((source, 0))
            sock.connect_ex(address)
        except OSError:
            pass
        held.append(sock)
        if len(held) > 900:
            held.pop(0).close()
"""


@contextlib.contextmanager
def flood(listener: Listener, sources: Sequence[str]) -> Iterator[None]:
    """Another process connects as fast as it can, from some addresses, and holds hundreds of connections."""
    assert not isinstance(listener.address, bytes)
    address, port = listener.address
    process = subprocess.Popen([sys.executable, "-c", _FLOOD, address, str(port), ",".join(sources)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
