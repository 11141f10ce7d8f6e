"""Messages of a meeting: any bytes are refused with ProtocolError, or decode to what encodes to them again."""

import contextlib
from typing import Any

import atheris
import targets

with atheris.instrument_imports(include=["horovod"]):
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.rendezvous import messages, proof
    from horovod.common.rendezvous.encoding import ProtocolError
    from horovod.common.rendezvous.messages import (
        Configuration,
        Endpoint,
        Hello,
        HostHello,
        Kind,
        Member,
        Place,
        Report,
        Source,
        WiringNote,
    )
    from horovod.common.rendezvous.table import Table

MESSAGES: tuple[Any, ...] = (Hello, HostHello, Report, Source, WiringNote, Table)


def examples() -> list[Any]:
    """One message of each kind."""
    place = Place(2, 4, 0, 2, 1, 2, "a host")
    configuration = Configuration([[0, 1], [2, 3]], 1 << 27, 1024, True)
    v4, v6 = Endpoint("127.0.0.1", 80), Endpoint("::1", 81)
    return [
        Hello("1.0", place, configuration, 3, v4),
        HostHello("1.0", place, 4711, 30.0),
        Report(configuration, 3, [Member(2, 1, 2, 4711, v4), Member(3, 1, 2, 4712, v6)]),
        Source(3, 8, "host1", v4, 13.0),
        WiringNote(1, 2, [4711, 4712], [True, False]),
        Table(4, ["a", "b"], [0, 0, 1, 1], [1, 2, 3, 4], [v4, v6, messages.NOWHERE, v4]),
    ]


def check_parts(data: bytes) -> None:
    """What is not a whole message by a class of its own."""
    if len(data) >= messages.HEADER_SIZE:
        kind, length = messages.decode_header(data[: messages.HEADER_SIZE])
        assert messages.encode_frame(kind, bytes(length)).startswith(data[: messages.HEADER_SIZE])


def check_opening(data: bytes) -> None:
    claim, challenge = proof.decode_opening(data)
    assert proof.encode_opening(claim, challenge) == data


def check_accepted(data: bytes) -> None:
    assert messages.encode_accepted(*messages.decode_accepted(data)) == data


def check_flags(data: bytes) -> None:
    assert messages.encode_flags(messages.decode_flags(data, len(data) - 4)) == data


def check_error(data: bytes) -> None:
    error = messages.decode_error(data)
    assert isinstance(error, (ValueError, HorovodInternalError))
    assert len(str(error)) > 20000 or messages.encode_error(error, "") == data


def target(data: bytes) -> None:
    """Gives the bytes to every decoder."""
    for message in MESSAGES:
        with contextlib.suppress(ProtocolError):
            assert message.decode(data).encode() == data
    for check in (check_parts, check_opening, check_accepted, check_flags, check_error, messages.read_version):
        with contextlib.suppress(ProtocolError):
            check(data)


def seeds() -> list[bytes]:
    """All messages, and what is not a class of its own."""
    opening = proof.encode_opening(proof.Claim(proof.Purpose.DATA, 1, 2, 3), bytes(proof.CHALLENGE_SIZE))
    return [message.encode() for message in examples()] + [
        messages.encode_frame(Kind.TABLE, b"body"),
        messages.encode_accepted(1.5, 3),
        messages.encode_flags([True, False]),
        messages.encode_error(ValueError("a text"), "rank 1"),
        opening,
    ]


if __name__ == "__main__":
    targets.run(target, seeds())
