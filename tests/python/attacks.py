"""What strangers do to a job's listening sockets.

An attack is a function that gets a connection. Each comes from an address of its own, or at a Unix socket from a
process of its own, so that the job's log can be asked what it says of each of them.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_sockets import Listener

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
    listener_of,
)

DOES_NOT_KNOW = "it does not know this job's key"
OTHER_PROTOCOL = "it does not speak this protocol"
NOT_AWAITED = "which is not awaited"
TOO_SLOW = "it proved nothing within 5 s"
# So that half an opening takes longer than the time there is for all of it.
_DRIP_SECONDS = 0.2
_REFLECTOR = "127.67.0.3"
_CLIENT_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(240)


# ---- Attacks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """What a stranger does with a connection, what the log says of it, and how many bytes it hears at most."""

    act: Callable[[socket.socket], None]
    told: str
    learns: int = 0

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
        answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
        if len(answer) < ANSWER_SIZE:  # it was turned away before
            return
        asked, encrypts = listener_of(answer)
        # An honest one would see that the other side has another key; this one goes on as if it had the same.
        sock.sendall(key.check_answer(claim, key.answer(claim, own, asked, encrypts), own))

    return act


def reflect(claim: Claim) -> Callable[[socket.socket], None]:
    """Has the listening side answer its own challenge."""

    def act(sock: socket.socket) -> None:
        address = sock.getpeername()
        sock.sendall(encode_opening(claim, bytes(CHALLENGE_SIZE)))
        answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
        with socket.socket(sock.family, socket.SOCK_STREAM) as second:
            if str(sock.getsockname()[:1]).startswith("('127."):  # from where no flood comes
                second.bind((_REFLECTOR, 0))
            second.connect(address)
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


def drip(data: bytes) -> Callable[[socket.socket], None]:
    """Says a byte now and then: who waits for the next one, each time for some seconds, waits for ever."""

    def act(sock: socket.socket) -> None:
        def say_slowly() -> None:
            with contextlib.suppress(OSError):
                for byte in data:
                    sock.send(bytes([byte]))
                    time.sleep(_DRIP_SECONDS)

        threading.Thread(target=say_slowly, daemon=True).start()

    return act


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
        "lengths of 4 GiB": Attack(say(opening + b"\x01\xff\xff\xff\xff" * 100), DOES_NOT_KNOW, ANSWER_SIZE),
        "no key": Attack(prove(Key(b"", other_job.context), claim), DOES_NOT_KNOW, ANSWER_SIZE),
        "another key": Attack(prove(key, claim), DOES_NOT_KNOW, ANSWER_SIZE),
        "another job with the same key": Attack(prove(other_job, claim), DOES_NOT_KNOW, ANSWER_SIZE),
        "its own proof": Attack(reflect(claim), DOES_NOT_KNOW, ANSWER_SIZE),
        "another purpose": Attack(
            say(encode_opening(Claim(other_purpose, 0, 1, 0), bytes(CHALLENGE_SIZE))), NOT_AWAITED
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
        "an opening alone": Attack(say(opening), TOO_SLOW, ANSWER_SIZE),
        "half a proof": Attack(say(opening + bytes(PROOF_SIZE - 1)), TOO_SLOW, ANSWER_SIZE),
        "a byte now and then": Attack(drip(opening), TOO_SLOW),
    }


def what_was_heard(sock: socket.socket, seconds: float) -> bytes:
    """All that comes until the other side ends the connection, which it must within some seconds."""
    heard = b""
    sock.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            heard += part
    return heard


@dataclass(frozen=True)
class Attempt:
    """An attack that has been begun."""

    name: str
    attack: Attack
    who: str  # as the log has it
    sock: socket.socket


def begin(
    listener: Listener, attacks: Mapping[str, Attack], source_of: Callable[[int], str], first: int = 0
) -> list[Attempt]:
    """Begins attacks, each from the address of its number, or at a Unix socket from a process of its own."""
    begun = []
    for number, (name, attack) in enumerate(attacks.items(), first):
        sock, who = listener.connect_as(source_of(number))
        with contextlib.suppress(ConnectionError):  # it was turned away before it had said all
            attack(sock)
        begun.append(Attempt(name, attack, who, sock))
    return begun


def end(attempts: Sequence[Attempt]) -> list[bytes]:
    """Waits until all of them are turned away, having learned no more than they may, and returns what that was."""
    heard = []
    for attempt in attempts:
        with attempt.sock as sock:
            heard.append(what_was_heard(sock, 20))
            assert len(heard[-1]) <= attempt.attack.learns, attempt.name
    return heard


_FLOOD_BEGINS = 6000
_FLOOD = """
import errno, socket, sys
address, sources, held = (sys.argv[1], int(sys.argv[2])), sys.argv[3].split(","), []
made = 0
while True:
    for source in sources:
        made += 1
        if made == int(sys.argv[4]):
            print("flooding", flush=True)
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
    """Another process connects as fast as it can, from some addresses, and holds hundreds of connections.

    The block begins when it has made more of them than may come at once.
    """
    assert not isinstance(listener.address, bytes)
    address, port = listener.address
    arguments = [address, str(port), ",".join(sources), str(_FLOOD_BEGINS)]
    process = subprocess.Popen([sys.executable, "-c", _FLOOD, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"flooding\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
