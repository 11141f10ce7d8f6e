"""Wire messages of a meeting: what is encoded is decoded, and everything else is a ProtocolError."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.rendezvous import messages
from horovod.common.rendezvous.encoding import ProtocolError, Reader
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
    Source,
    WiringNote,
)
from horovod.common.rendezvous.proof import OPENING_SIZE, Claim, Purpose, decode_opening, encode_opening
from horovod.common.rendezvous.table import Table

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
generations = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
endpoints = st.one_of(
    st.just(NOWHERE),
    st.builds(Endpoint, st.ip_addresses(v=4).map(str), st.integers(0, 65535)),
    st.builds(Endpoint, st.ip_addresses(v=6).map(str), st.integers(0, 65535)),
)
configurations = st.builds(
    Configuration, st.lists(st.lists(u32, max_size=5), max_size=5), u64, u32, *[st.booleans()] * 3
)
places = st.builds(Place, u32, u32, u32, u32, u32, u32, texts)
hellos = st.builds(Hello, texts, places, configurations, generations, endpoints)
host_hellos = st.builds(HostHello, texts, places, u32, st.floats(0, 1e6))
reports = st.builds(
    Report, configurations, generations, st.lists(st.builds(Member, u32, u32, u32, u32, endpoints), max_size=5)
)
sources = st.builds(Source, u64, u32, texts, endpoints, st.floats(0, 1e6))
notes = st.lists(st.tuples(u32, st.booleans()), max_size=5).flatmap(
    lambda pairs: st.builds(WiringNote, u64, u64, st.just([p for p, _ in pairs]), st.just([w for _, w in pairs]))
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    host_of: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        host_of.append(draw(st.integers(0, max(host_of, default=-1) + 1)))
    size, hosts = len(host_of), max(host_of) + 1
    return Table(
        draw(u64),
        draw(st.lists(texts, min_size=hosts, max_size=hosts)),
        host_of,
        draw(st.lists(u32, min_size=size, max_size=size)),
        draw(st.lists(endpoints, min_size=size, max_size=size)),
    )


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "Hello": Hello.decode,
    "HostHello": HostHello.decode,
    "Report": Report.decode,
    "WiringNote": WiringNote.decode,
    "Source": Source.decode,
    "Table": Table.decode,
    "flags": lambda body: messages.decode_flags(body, 3),
    "accepted": messages.decode_accepted,
    "error": messages.decode_error,
    "version": messages.read_version,
    "opening": decode_opening,
    "header": lambda body: messages.decode_header(body[:5].ljust(5, b"\0")),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(hellos, host_hellos, reports, sources, notes, tables()))
def test_what_is_encoded_is_decoded(message: Any) -> None:
    assert type(message).decode(message.encode()) == message


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(hellos, host_hellos, reports, sources, notes, tables()), st.data())
def test_a_message_that_is_cut_or_continued_is_refused(message: Any, data: st.DataObject) -> None:
    body = message.encode()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        type(message).decode(body[:cut])
    with pytest.raises(ProtocolError):
        type(message).decode(body + b"\0")


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    body=st.one_of(
        st.binary(max_size=200),
        st.one_of(hellos, host_hellos, reports, sources, notes, tables()).map(lambda message: message.encode()),
    ),
    flips=st.lists(st.tuples(u32, st.integers(0, 255)), max_size=4),
)
def test_noise_is_a_message_or_an_error_and_nothing_else(name: str, body: bytes, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(body)
    for position, value in flips:
        if damaged:
            damaged[position % len(damaged)] = value
    with contextlib.suppress(ProtocolError):
        DECODERS[name](bytes(damaged))


@given(st.builds(Claim, st.sampled_from(Purpose), u64, u32, u32, st.booleans()))
def test_a_claim_survives_the_way(claim: Claim) -> None:
    data = encode_opening(claim, b"c" * 32)
    assert len(data) == OPENING_SIZE
    assert decode_opening(data) == (claim, b"c" * 32)


def test_frames_have_a_largest_size() -> None:
    assert messages.decode_header(messages.encode_frame(Kind.TABLE, b"x" * MAX_FRAME)[:5]) == (Kind.TABLE, MAX_FRAME)
    with pytest.raises(ProtocolError, match="larger than"):
        messages.encode_frame(Kind.TABLE, b"x" * (MAX_FRAME + 1))


def test_after_every_generation_there_is_a_number_for_the_next_one() -> None:
    configuration = Configuration([], 0, 0, False)
    last = Report(configuration, 2**63 - 1, [])
    assert Report.decode(last.encode()) == last
    with pytest.raises(ProtocolError, match="generations"):
        Report.decode(Report(configuration, 2**64 - 1, []).encode())


def test_a_list_that_is_longer_than_its_message_costs_nothing() -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        Configuration.read(Reader(b"\xff\xff\xff\xff" + b"\0" * 20))
