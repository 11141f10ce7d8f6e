"""The rendezvous server among strangers and hosts that say anything at any time, also after they have proved the key.

Whatever they say, it goes on serving: nothing is raised, what it answers is of the protocol, and when they have gone
and some time has passed it is idle. The time is the target's own.
"""

import contextlib
import select
import socket

import atheris
import scripts
import targets
from scripts import Script

with atheris.instrument_imports(include=["horovod"]):
    from horovod.common.rendezvous.encryption import PLAIN
    from horovod.common.rendezvous.messages import (
        HEADER_SIZE,
        NOWHERE,
        Configuration,
        HostHello,
        Kind,
        Member,
        Place,
        Report,
        decode_error,
        decode_header,
        encode_error,
        encode_frame,
    )
    from horovod.common.rendezvous.proof import ANSWER_SIZE, Claim, Purpose, encode_opening, new_challenge
    from horovod.common.rendezvous.server import RendezvousServer, host_key
    from horovod.common.rendezvous.table import Table

KEY = host_key(b"the key", "the job")
HOSTS = 3


def settle(server: RendezvousServer) -> None:
    """Has the server do all that there is to do now."""
    server.step()
    while select.select([server], [], [], 0)[0]:
        server.step()


class Caller:
    """One connection to the server."""

    def __init__(self, address: bytes, server: RendezvousServer, rank: int) -> None:
        self.rank = rank
        self._server = server
        self._heard = bytearray()
        self._said_anything = self._proved = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(0)
        self._sock.connect(address)

    def say(self, data: bytes) -> None:
        """Says something, if anyone still listens."""
        self._said_anything = True
        with contextlib.suppress(OSError):
            self._sock.send(data)
        settle(self._server)
        self.listen()

    def prove(self) -> None:
        """Proves the key, unless it is too late for that."""
        if self._said_anything:
            return
        claim, own = Claim(Purpose.HOST, 0, self.rank, 0), new_challenge()
        self.say(encode_opening(claim, own))
        if len(self._heard) == ANSWER_SIZE:
            proof = KEY.check_answer(claim, bytes(self._heard), own)
            self._heard.clear()
            self._proved = True
            self.say(proof)

    def listen(self) -> None:
        """Hears what there is: to one who has proved the key, only frames."""
        try:
            while data := self._sock.recv(1 << 16):
                self._heard += data
        except OSError:
            pass
        while self._proved and len(self._heard) >= HEADER_SIZE:
            kind, length = decode_header(bytes(self._heard[:HEADER_SIZE]))
            if len(self._heard) < HEADER_SIZE + length:
                return
            body = bytes(self._heard[HEADER_SIZE : HEADER_SIZE + length])
            del self._heard[: HEADER_SIZE + length]
            assert kind in (Kind.ACCEPTED, Kind.TABLE, Kind.GO, Kind.DONE, Kind.FAILED)
            if kind is Kind.TABLE:
                Table.decode(body)
            if kind is Kind.FAILED:
                decode_error(body)

    def close(self) -> None:
        self._sock.close()


def hello(script: Script, rank: int) -> bytes:
    """A host's first words."""
    number = script.number
    place = Place(
        *(number(rank), number(2 * HOSTS), number(0), number(2), number(rank // 2), number(HOSTS)),
        f"host{number(rank)}",
    )
    return HostHello("1.0", place, script.number(4711), script.seconds(30.0)).encode()


def report(script: Script, rank: int) -> bytes:
    """What it says of its ranks."""
    members = [
        Member(script.number(rank + local), script.number(rank // 2), script.number(HOSTS), 4711, NOWHERE)
        for local in range(script.number(2, 8))
    ]
    return Report(Configuration([], script.number(1), 1024, False), script.number(0, 64), members).encode()


def say_something(script: Script, caller: Caller) -> None:
    """One of the things that a host may say, or a stranger."""
    match script.pick(9):
        case 0:
            caller.prove()
            caller.say(encode_frame(Kind.HELLO, hello(script, caller.rank)))
        case 1:
            caller.say(encode_frame(Kind.REPORT, report(script, caller.rank)))
        case 2:
            caller.say(encode_frame(Kind.LINKED))
        case 3:
            caller.say(encode_frame(Kind.STARTED))
        case 4:
            caller.say(encode_frame(Kind.FAILED, encode_error(ValueError("a reason"), "rank 1")))
        case 5:
            kind = list(Kind)[script.pick(len(Kind))]
            caller.say(encode_frame(kind, script.take(script.pick(64))))
        case 6:
            caller.say(script.take(script.pick(128)))
        case 7:
            caller.prove()
        case 8:
            caller.close()


def target(data: bytes) -> None:
    """A server, and a few who talk to it by turns."""
    script = Script(data)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")  # the kernel finds a name
    listener.listen(64)
    address: bytes = listener.getsockname()
    server = RendezvousServer(listener, KEY, encryption=PLAIN)  # what it parses is the same, and noise gets to it
    callers = [Caller(address, server, 2 * host) for host in range(HOSTS)]
    try:
        while not script.is_over():
            turn = script.pick(HOSTS + 2)
            if turn < HOSTS:
                say_something(script, callers[turn])
            elif turn == HOSTS:
                scripts.CLOCK.now += script.pick(100)
            else:
                gone = script.pick(HOSTS)
                callers[gone].close()
                callers[gone] = Caller(address, server, 2 * script.pick(HOSTS))
            settle(server)
        for caller in callers:
            caller.close()
        settle(server)
        scripts.CLOCK.now += 1000
        server.step()
        assert server.is_idle()
    finally:
        for caller in callers:
            caller.close()
        server.close()


def seeds() -> list[bytes]:
    """Three hosts that do as they should, then one that dies, one that is late, and noise."""
    everyone = range(HOSTS)
    hellos = b"".join(bytes([host, 0]) + bytes(9) for host in everyone)
    reports = b"".join(bytes([host, 1]) + bytes(9) for host in everyone)
    linked, started = (b"".join(bytes([host, says]) for host in everyone) for says in (2, 3))
    passes = bytes([HOSTS, 99])
    return [
        hellos + reports + linked + started,
        hellos + reports + linked + bytes([1, 8]),
        hellos + bytes([1, 1]) + bytes(9) + passes,
        hellos + reports + bytes([0, 4]) + hellos,
        hellos + bytes([HOSTS + 1, 0, 0, 0, 0]) + bytes(9),
        bytes([0, 6, 100]) + bytes(100),
    ]


if __name__ == "__main__":
    targets.run(target, seeds())
