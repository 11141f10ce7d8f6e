"""A host that calls a rendezvous server which says anything, before it has proved the key and after that.

What the host makes of it is the table, or one of the two errors of init. The time is the target's own.
"""

import contextlib
import select
import socket

import atheris
import scripts
import targets
from scripts import Script

with atheris.instrument_imports(include=["horovod"]):
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.rendezvous.loop import Loop
    from horovod.common.rendezvous.messages import (
        HEADER_SIZE,
        NOWHERE,
        Configuration,
        Hello,
        HostHello,
        Kind,
        Place,
        decode_header,
        encode_accepted,
        encode_error,
        encode_frame,
    )
    from horovod.common.rendezvous.proof import OPENING_SIZE, PROOF_SIZE, decode_opening, new_challenge
    from horovod.common.rendezvous.server import host_key
    from horovod.common.rendezvous.server_line import ServerLine

KEY = host_key(b"the key", "the job")
HELLO = Hello("1.0", Place(0, 2, 0, 1, 0, 2, "a"), Configuration([], 1, 1, False), 0, NOWHERE)


def settle(loop: Loop) -> None:
    """Has the host do all that there is to do now."""
    loop.step(0.0)
    while select.select([loop], [], [], 0)[0]:
        loop.step(0.0)


class Server:
    """The listening side of whatever connections the host makes."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel finds a name
        self._listener.listen(64)
        self._listener.settimeout(0)
        self.address: bytes = self._listener.getsockname()
        self._sock: socket.socket | None = None

    def accept(self) -> None:
        """Takes the next connection, if there is one, and drops the one before."""
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            self.hang_up()
            accepted.settimeout(0)
            self._sock = accepted

    def hear(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._sock.recv(1 << 16) if self._sock else b""
        return b""

    def say(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._sock:
                self._sock.send(data)

    def prove(self, loop: Loop) -> None:
        """Answers the opening of a new connection, and checks what comes then."""
        opening = self.hear()
        if len(opening) != OPENING_SIZE:
            return
        claim, challenge = decode_opening(opening)
        own = new_challenge()
        self.say(KEY.answer(claim, challenge, own))
        settle(loop)
        heard = self.hear()
        if not heard:  # something else had been said before the answer
            return
        KEY.check_proof(claim, heard[:PROOF_SIZE], challenge, own)
        kind, length = decode_header(heard[PROOF_SIZE : PROOF_SIZE + HEADER_SIZE])
        assert kind is Kind.HELLO
        body = heard[PROOF_SIZE + HEADER_SIZE :]
        assert len(body) == length
        assert HostHello.decode(body).place == HELLO.place

    def hang_up(self) -> None:
        if self._sock:
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        self.hang_up()
        self._listener.close()


def say_something(script: Script, server: Server, loop: Loop) -> None:
    """One of the things that a server may say, or something else."""
    match script.pick(8):
        case 0:
            server.accept()
            server.prove(loop)
        case 1:
            server.say(encode_frame(Kind.ACCEPTED, encode_accepted(script.seconds(30.0))))
        case 2:
            server.say(encode_frame(Kind.FAILED, encode_error(ValueError("a reason"), "the server")))
        case 3:
            server.say(encode_frame(Kind.TABLE, script.take(script.pick(64))))
        case 4:
            kind = list(Kind)[script.pick(len(Kind))]
            server.say(encode_frame(kind, script.take(script.pick(64))))
        case 5:
            server.accept()
            server.say(script.take(script.pick(128)))
        case 6:
            server.hang_up()
        case 7:
            scripts.CLOCK.now += script.pick(40)


def target(data: bytes) -> None:
    """A host that waits for the table, and a server that goes by the script."""
    script, loop, server = Script(data), Loop(), Server()
    line = ServerLine(loop, HELLO, [(socket.AF_UNIX, server.address)], KEY, timeout=30.0)
    try:
        settle(loop)
        while not script.is_over():
            say_something(script, server, loop)
            settle(loop)
            assert line.seconds_left() >= 0.0
    except (HorovodInternalError, ValueError) as error:
        assert type(error) in (HorovodInternalError, ValueError), "a subclass is an accident"
        assert str(error)
    finally:
        line.close()
        server.close()
        loop.close()


def seeds() -> list[bytes]:
    """A server that does as it should, one that gives up, one that is late, and noise."""
    accepted = bytes([0, 1, 0])
    return [
        accepted + bytes([3, 4]) + bytes(4),
        accepted + bytes([2]),
        accepted + bytes([6]),
        bytes([7, 39]),
        bytes([5, 64]) + bytes(64),
        bytes([0, 4, 4, 20]) + bytes(20),
    ]


if __name__ == "__main__":
    targets.run(target, seeds())
