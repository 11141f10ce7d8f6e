"""What is said at a meeting, as bytes: frames (kind, length, body), and the body of each kind.

All functions here are pure: bytes in, a message or a ProtocolError out. Nothing is read from a connection by them
before it has proved the key (proof.py). The version comes first in what ranks say of themselves, so that it can be
compared (`read_version`) before anything is decoded whose form depends on it.
"""

import enum
import ipaddress
import math
import socket
import struct
from dataclasses import dataclass

from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.encoding import ProtocolError, Reader, Writer

MAX_FRAME = 1 << 20
_HEADER = struct.Struct(">BI")
HEADER_SIZE = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame says. A leader is said things by the ranks of its host and says things to the server."""

    HELLO = 1  # upwards: who I am. Between ranks: the first frame, which is empty
    ACCEPTED = 2  # downwards: wait for the others
    REPORT = 3  # leader to server: the ranks of my host are there, and this is what they want
    TABLE = 4  # downwards: these are all hosts and ranks; connect to them
    WIRING = 5  # leader to rank: here is the segment and what belongs to it
    READY = 6  # rank to leader: I see the segment
    LINKED = 7  # upwards: I am connected to the ranks of the other hosts
    GO = 8  # downwards: everyone is, start your engine
    STARTED = 9  # upwards: my engine runs
    DONE = 10  # downwards: everyone's does
    FAILED = 11  # either: this attempt is over, and why
    SOURCE = 12  # server to leader: that one passes the table on to you


def encode_frame(kind: Kind, body: bytes = b"") -> bytes:
    """Makes the bytes of a frame.

    Raises:
        ProtocolError: The body is larger than a frame may be.
    """
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes is larger than the {MAX_FRAME} that are allowed")
    return _HEADER.pack(kind, len(body)) + body


def decode_header(header: bytes) -> tuple[Kind, int]:
    """Reads a frame's header: what it says and how long its body is.

    Raises:
        ProtocolError: There is no such frame.
    """
    kind, length = _HEADER.unpack(header)
    if length > MAX_FRAME or kind not in Kind.__members__.values():
        raise ProtocolError(f"not a message of this protocol (kind {kind}, {length} bytes)")
    return Kind(kind), length


def read_version(body: bytes) -> str:
    """The version that a Hello or HostHello begins with."""
    return Reader(body).text()


# ---- Parts of messages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens for ranks of other hosts; the address is empty if it does not."""

    address: str
    port: int

    def __str__(self) -> str:
        """As in a URL."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def write(self, writer: Writer) -> None:
        """Adds it to a message."""
        packed = ipaddress.ip_address(self.address).packed if self.address else b""
        writer.blob(packed).number("H", self.port)

    @classmethod
    def read(cls, reader: Reader) -> "Endpoint":
        """Reads it from a message."""
        packed, port = reader.blob(), reader.integer("H")
        if len(packed) not in (0, 4, 16):
            raise ProtocolError(f"an address of {len(packed)} bytes")
        return cls(str(ipaddress.ip_address(packed)) if packed else "", port)


NOWHERE = Endpoint("", 0)


def socket_address(endpoint: Endpoint) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Where to connect to."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    return family, (endpoint.address, endpoint.port)


@dataclass(frozen=True)
class Configuration:
    """What must be the same on all ranks."""

    process_sets: list[list[int]]
    fusion_threshold: int
    cache_capacity: int
    allreduce_ring: bool
    encrypt: bool = False  # data
    can_encrypt: bool = False

    def write(self, writer: Writer) -> None:
        """Adds it to a message."""
        writer.each(self.process_sets, lambda ranks: writer.numbers("I", ranks))
        writer.number("Q", self.fusion_threshold).number("I", self.cache_capacity)
        for flag in (self.allreduce_ring, self.encrypt, self.can_encrypt):
            writer.number("B", flag)

    @classmethod
    def read(cls, reader: Reader) -> "Configuration":
        """Reads it from a message."""
        sets = reader.each(lambda: reader.numbers("I"))
        return cls(sets, reader.integer("Q"), reader.integer("I"), reader.flag(), reader.flag(), reader.flag())


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the job; its cross size is 0 if nobody has told it (environment.UNTOLD)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str

    def __str__(self) -> str:
        """The rank in words."""
        return f"rank {self.rank} (local rank {self.local_rank} of {self.local_size} on host {self.host})"

    def write(self, writer: Writer) -> None:
        """Adds it to a message."""
        for number in (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size):
            writer.number("I", number)
        writer.text(self.host)

    @classmethod
    def read(cls, reader: Reader) -> "Place":
        """Reads it from a message."""
        rank, size, local_rank, local_size, cross_rank, cross_size = (reader.integer("I") for _ in range(6))
        return cls(rank, size, local_rank, local_size, cross_rank, cross_size, reader.text())


# ---- Messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """HELLO of a rank to the leader of its host."""

    version: str
    place: Place
    configuration: Configuration
    last_generation: int
    endpoint: Endpoint

    def encode(self) -> bytes:
        """Makes the body."""
        writer = Writer().text(self.version)
        self.place.write(writer)
        self.configuration.write(writer)
        self.endpoint.write(writer.number("Q", self.last_generation))
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> "Hello":
        """Reads the body."""
        reader = Reader(body)
        version, place, configuration = reader.text(), Place.read(reader), Configuration.read(reader)
        hello = cls(version, place, configuration, _last_generation(reader), Endpoint.read(reader))
        reader.end()
        return hello


@dataclass(frozen=True)
class HostHello:
    """HELLO of a leader to the server, while it still waits for the ranks of its host."""

    version: str
    place: Place
    pid: int
    timeout: float  # how long it will wait for the other hosts

    def encode(self) -> bytes:
        """Makes the body."""
        writer = Writer().text(self.version)
        self.place.write(writer)
        return writer.number("I", self.pid).number("d", self.timeout).bytes()

    @classmethod
    def decode(cls, body: bytes) -> "HostHello":
        """Reads the body."""
        reader = Reader(body)
        hello = cls(reader.text(), Place.read(reader), reader.integer("I"), _seconds(reader.real()))
        reader.end()
        return hello


@dataclass(frozen=True)
class Member:
    """A rank in a report; see `Place` for a cross size of 0."""

    rank: int
    cross_rank: int
    cross_size: int
    pid: int
    endpoint: Endpoint

    def write(self, writer: Writer) -> None:
        """Adds it to a message."""
        for number in (self.rank, self.cross_rank, self.cross_size, self.pid):
            writer.number("I", number)
        self.endpoint.write(writer)

    @classmethod
    def read(cls, reader: Reader) -> "Member":
        """Reads it from a message."""
        rank, cross_rank, cross_size, pid = (reader.integer("I") for _ in range(4))
        return cls(rank, cross_rank, cross_size, pid, Endpoint.read(reader))


@dataclass(frozen=True)
class Report:
    """REPORT: a host whose ranks are all there and agree. Its members are in the order of their local ranks."""

    configuration: Configuration
    last_generation: int  # the greatest that one of its ranks took part in
    members: list[Member]

    def encode(self) -> bytes:
        """Makes the body."""
        writer = Writer()
        self.configuration.write(writer)
        writer.number("Q", self.last_generation).each(self.members, lambda member: member.write(writer))
        return writer.bytes()

    @classmethod
    def decode(cls, body: bytes) -> "Report":
        """Reads the body."""
        reader = Reader(body)
        configuration, last = Configuration.read(reader), _last_generation(reader)
        report = cls(configuration, last, reader.each(lambda: Member.read(reader)))
        reader.end()
        return report


@dataclass(frozen=True)
class Source:
    """SOURCE: the leader of which host passes the table on, where, and how long to wait for it."""

    generation: int
    rank: int
    host: str
    endpoint: Endpoint
    seconds: float

    def encode(self) -> bytes:
        """Makes the body."""
        writer = Writer().number("Q", self.generation).number("I", self.rank).text(self.host)
        self.endpoint.write(writer)
        return writer.number("d", self.seconds).bytes()

    @classmethod
    def decode(cls, body: bytes) -> "Source":
        """Reads the body."""
        reader = Reader(body)
        generation, rank, host = reader.integer("Q"), reader.integer("I"), reader.text()
        source = cls(generation, rank, host, Endpoint.read(reader), _seconds(reader.real()))
        reader.end()
        return source


@dataclass(frozen=True)
class WiringNote:
    """WIRING: what the descriptors are that follow it."""

    generation: int
    nonce: int
    pids: list[int]  # by local rank
    watched: list[bool]  # by local rank: whether there is a pidfd

    def encode(self) -> bytes:
        """Makes the body."""
        writer = Writer().number("Q", self.generation).number("Q", self.nonce).numbers("I", self.pids)
        return writer.numbers("B", self.watched).bytes()

    @classmethod
    def decode(cls, body: bytes) -> "WiringNote":
        """Reads the body."""
        reader = Reader(body)
        generation, nonce, pids = reader.integer("Q"), reader.integer("Q"), reader.numbers("I")
        note = cls(generation, nonce, pids, reader.each(reader.flag))
        reader.end()
        if len(note.watched) != len(note.pids):
            raise ProtocolError(f"{len(note.pids)} pids and {len(note.watched)} notes about them")
        return note


def encode_flags(flags: list[bool]) -> bytes:
    """Makes the body of READY and GO: for whom there is an arena, whose descriptor follows."""
    return Writer().numbers("B", flags).bytes()


def decode_flags(body: bytes, count: int) -> list[bool]:
    """Reads the body of READY and GO."""
    reader = Reader(body)
    flags = reader.each(reader.flag)
    reader.end()
    if len(flags) != count:
        raise ProtocolError(f"expected {count} flags, got {len(flags)}")
    return flags


def encode_accepted(seconds: float, rank: int = 0) -> bytes:
    """Makes the body of ACCEPTED: how long the one who accepts will wait for the others, and its rank."""
    return Writer().number("d", seconds).number("I", rank).bytes()


def decode_accepted(body: bytes) -> tuple[float, int]:
    """Reads the body of ACCEPTED."""
    reader = Reader(body)
    seconds, rank = _seconds(reader.real()), reader.integer("I")
    reader.end()
    return seconds, rank


def encode_error(error: BaseException, place: object) -> bytes:
    """Makes the body of FAILED: the reason, by the rank (or server) that gives up."""
    if isinstance(error, (ValueError, HorovodInternalError)) and str(error):
        text = str(error)
    else:
        text = f"init: {place} gave up: {type(error).__name__}: {error}".removesuffix(": ")
    # What fits into a log; a frame could hold more.
    return Writer().number("B", isinstance(error, ValueError)).text(text[:20000]).bytes()


def decode_error(body: bytes) -> Exception:
    """Reads the body of FAILED: the error to raise."""
    reader = Reader(body)
    wrong_value, text = reader.flag(), reader.text()
    reader.end()
    if not text:
        raise ProtocolError("a failure without a reason")
    return ValueError(text) if wrong_value else HorovodInternalError(text)


def _last_generation(reader: Reader) -> int:
    value = reader.integer("Q")
    if value >= 1 << 63:
        raise ProtocolError(f"{value} generations can't have been")  # and there must be a number for the next one
    return value


def _seconds(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ProtocolError(f"{value} is not a number of seconds")
    return value
