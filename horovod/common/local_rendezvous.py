"""How the ranks of one host meet and come to share memory and descriptors.

Local rank 0 leads: it listens, the others follow and connect (local_channel.py has names and proof). One attempt:

    follower                         leader
    HELLO (who, configuration)  -->  until every local rank is there or the time is over; checks that all agree
                                <--  ACCEPTED (seconds that the leader will still wait)
                                <--  WIRING + descriptors: segment, two eventfds per rank, a pidfd per rank
    probes the segment,
    READY + its arena           -->  all ready
                                <--  GO + the arenas of all (memory that the others may read, see hvd_alloc)
    starts its engine                starts its engine
    STARTED                     -->  all started
                                <--  DONE

Either side may say FAILED with the reason at any time. The leader passes a reason on to every follower, so that one
attempt ends in the same way, with the same words, on every rank that took part; then all of them may try again.

What keeps it safe
  - A rank that is not there yet is waited for; one that closes its connection counts as not there again, and may come
    back with a new one. One that dies ends the attempt (its pidfd).
  - Until ACCEPTED a follower takes a closed connection for bad luck (a leader that has just given up an earlier
    attempt) and connects again; after it, for the end of the attempt.
  - The generation is greater than any that a participant has ever taken part in, and each has its own segment.
  - Every wait has a deadline, and connections that prove nothing are dropped after a few seconds.
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

from horovod import __version__, _core
from horovod.common.environment import Identity, Tunables
from horovod.common.exceptions import HorovodInternalError
from horovod.common.local_channel import Channel, ChannelError, Kind, socket_name

# For the steps after everyone has arrived. They take milliseconds; a stopped process must not be waited for for ever.
STEP_SECONDS = 30.0
_GRACE_SECONDS = 5.0
AUTHENTICATION_SECONDS = 5.0
_LONGEST_PAUSE = 0.05


@dataclasses.dataclass
class Hello:
    """What a rank says of itself; the leader compares all of it."""

    version: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    process_sets: list[list[int]]
    fusion_threshold: int
    cache_capacity: int
    last_generation: int

    @classmethod
    def of(cls, identity: Identity, tunables: Tunables, process_sets: list[list[int]], last_generation: int) -> "Hello":
        """Makes this rank's own."""
        return cls(
            version=__version__,
            rank=identity.rank,
            size=identity.size,
            local_rank=identity.local_rank,
            local_size=identity.local_size,
            cross_rank=identity.cross_rank,
            cross_size=identity.cross_size,
            process_sets=process_sets,
            fusion_threshold=tunables.fusion_threshold,
            cache_capacity=tunables.cache_capacity,
            last_generation=last_generation,
        )

    @classmethod
    def decode(cls, content: dict[str, Any]) -> "Hello":
        """Reads another rank's.

        Raises:
            ChannelError: A field is missing or of another type.
        """
        try:
            hello = cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except KeyError as error:
            raise ChannelError(f"a HELLO without {error}") from None
        for field in dataclasses.fields(cls):
            value = getattr(hello, field.name)
            if field.name == "process_sets":
                valid = isinstance(value, list) and all(
                    isinstance(ranks, list) and all(type(rank) is int for rank in ranks) for ranks in value
                )
            else:
                valid = type(value) is (str if field.name == "version" else int)
            if not valid:
                raise ChannelError(f"a HELLO with a bad {field.name}")
        return hello


@dataclasses.dataclass
class Wiring:
    """What the engine needs to reach the other ranks of the host; the descriptors are closed with the meeting."""

    generation: int
    nonce: int
    segment_fd: int
    pids: list[int]
    alive_fds: list[int]  # -1 where there is none
    doorbells: list[int]
    arena_fds: list[int]  # -1 where there is none

    @classmethod
    def make(cls, pids: list[int], cache_capacity: int, generation: int) -> "Wiring":
        """Makes a segment and the descriptors around it.

        Raises:
            HorovodInternalError: The system refused.
        """
        nonce = int.from_bytes(os.urandom(8), "little")
        wiring = cls(generation, nonce, -1, pids, [], [], [-1] * len(pids))
        try:
            wiring.segment_fd = _core.segment_create(len(pids), cache_capacity, generation, nonce)
            for _ in range(2 * len(pids)):
                wiring.doorbells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            wiring.alive_fds.extend(open_pidfd(pid) for pid in pids)
        except OSError as error:
            wiring.close()
            raise HorovodInternalError(
                f"init: can't make the descriptors for {len(pids)} ranks: {error.strerror}. "
                "If it is the limit of open files, raise it (ulimit -n)."
            ) from None
        except BaseException:
            wiring.close()
            raise
        return wiring

    def descriptors(self) -> list[int]:
        """What WIRING hands over: segment, doorbells, then the pidfds that exist."""
        return [fd for fd in (self.segment_fd, *self.doorbells, *self.alive_fds) if fd >= 0]

    def arenas(self) -> list[int]:
        """What GO hands over: the arenas that exist."""
        return [fd for fd in self.arena_fds if fd >= 0]

    def close(self) -> None:
        """Closes all descriptors."""
        for fd in self.descriptors() + self.arenas():
            os.close(fd)
        self.segment_fd, self.doorbells, self.alive_fds, self.arena_fds = -1, [], [], []


class Meeting(Protocol):
    """A meeting at which everyone has said GO: start the engine, then confirm."""

    wiring: Wiring

    def confirm(self) -> None:
        """Returns when every rank's engine runs; raises if one could not be started."""


class LoneMeeting:
    """A host with one rank."""

    def __init__(self, wiring: Wiring) -> None:
        """Keeps the wiring."""
        self.wiring = wiring

    def confirm(self) -> None:
        """There is nobody to ask."""


class FollowerMeeting:
    """The meeting as a follower sees it."""

    def __init__(self, channel: Channel, wiring: Wiring) -> None:
        """Keeps the connection to the leader."""
        self.wiring = wiring
        self._channel = channel

    def confirm(self) -> None:
        """Says that this engine runs and waits for the others' to."""
        self._channel.send(Kind.STARTED, {}, time.monotonic() + STEP_SECONDS)
        _expect(self._channel, Kind.DONE, 2 * STEP_SECONDS)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where that can't be had."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1  # pid 0: the peer is in a pid namespace that we can't see
    except OSError:
        return -1


def describe(local_rank: int, identity: Identity) -> str:
    """A rank in words. On one host rank and local rank are the same number."""
    return f"rank {local_rank} (local rank {local_rank} of {identity.local_size} on host {identity.host})"


def reason_of(error: BaseException, identity: Identity) -> dict[str, Any]:
    """An error as the content of FAILED."""
    if isinstance(error, (ValueError, HorovodInternalError)):
        return {
            "error": "ValueError" if isinstance(error, ValueError) else "HorovodInternalError",
            "message": str(error),
        }
    text = f"init: {describe(identity.local_rank, identity)} gave up: {type(error).__name__}: {error}"
    return {"error": "HorovodInternalError", "message": text.removesuffix(": ")}


def error_of(content: dict[str, Any]) -> Exception:
    """The error that a FAILED stands for."""
    message = str(content.get("message", "init failed without a reason."))
    return ValueError(message) if content.get("error") == "ValueError" else HorovodInternalError(message)


@contextlib.contextmanager
def meet(
    identity: Identity, tunables: Tunables, process_sets: list[list[int]], last_generation: int
) -> Iterator[Meeting]:
    """Meets the other ranks of this host; what they share is closed at the end of the block.

    An exception inside the block is told to the other ranks, whose attempt then ends with it too.

    Raises:
        ValueError: The ranks' configurations contradict each other.
        HorovodInternalError: A rank did not come, died, or could not take part.
    """
    hello = Hello.of(identity, tunables, process_sets, last_generation)
    if identity.local_size == 1:
        with contextlib.closing(Wiring.make([os.getpid()], tunables.cache_capacity, last_generation + 1)) as wiring:
            yield LoneMeeting(wiring)
    elif identity.local_rank == 0:
        from horovod.common.local_leader import lead

        with lead(identity, hello, tunables.start_timeout) as leader_meeting:
            yield leader_meeting
    else:
        with _follow(identity, hello, tunables.start_timeout) as follower_meeting:
            yield follower_meeting


@contextlib.contextmanager
def _follow(identity: Identity, hello: Hello, timeout: float) -> Iterator[FollowerMeeting]:
    leader = describe(0, identity)
    with contextlib.ExitStack() as resources:
        channel = introduce(identity, hello, timeout)
        resources.callback(channel.close)
        try:
            content = _expect(channel, Kind.ACCEPTED, _GRACE_SECONDS)
            content = _expect(channel, Kind.WIRING, float(content["seconds_left"]) + STEP_SECONDS + _GRACE_SECONDS)
            wiring = _receive_wiring(channel, content, identity.local_size)
            resources.callback(wiring.close)
            if _core.segment_probe(wiring.segment_fd) != (wiring.generation, wiring.nonce):
                raise HorovodInternalError(
                    f"init: {describe(identity.local_rank, identity)} does not see the memory that {leader} made. "
                    "Do both run on the same machine?"
                )
            _send_arena(channel)
            content = _expect(channel, Kind.GO, 2 * STEP_SECONDS)
            wiring.arena_fds = receive_some(channel, content["arenas"])
            yield FollowerMeeting(channel, wiring)
        except ChannelError as error:
            raise HorovodInternalError(
                f"init: {describe(identity.local_rank, identity)} lost {leader}, pid {channel.pid}: {error}. "
                "It most likely died or was stopped; see its output."
            ) from None
        except BaseException as error:
            with contextlib.suppress(ChannelError):
                channel.send(Kind.FAILED, reason_of(error, identity), time.monotonic() + 1)
            raise


def _send_arena(channel: Channel) -> None:
    arena = _core.arena_fd()
    deadline = time.monotonic() + STEP_SECONDS
    channel.send(Kind.READY, {"arenas": [arena >= 0]}, deadline)
    channel.send_descriptors([arena] if arena >= 0 else [], deadline)


def receive_some(channel: Channel, exists: list[bool]) -> list[int]:
    """Receives a descriptor for each that exists; -1 for the others."""
    fds = iter(channel.receive_descriptors(sum(exists), time.monotonic() + STEP_SECONDS))
    return [next(fds) if there else -1 for there in exists]


def introduce(identity: Identity, hello: Hello, timeout: float) -> Channel:
    """Connects until the leader has taken our HELLO into account."""
    name = socket_name(identity)
    deadline = time.monotonic() + timeout
    pause = 0.001
    trouble = "nobody listens"
    while time.monotonic() < deadline:
        try:
            return _try_to_introduce(name, identity.secret_key, hello, deadline)
        except (OSError, ChannelError) as error:
            if not isinstance(error, ConnectionRefusedError):
                trouble = str(error)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise HorovodInternalError(
        f"init: {describe(0, identity)} was not there for {describe(identity.local_rank, identity)} within {timeout:g} "
        f"s ({trouble}). Did it start, and with the same HOROVOD_JOB_ID and HOROVOD_SECRET_KEY? If it needs longer, "
        "raise HOROVOD_START_TIMEOUT."
    )


def _try_to_introduce(name: bytes, key: bytes, hello: Hello, deadline: float) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(name)
        channel = Channel(sock)
        if channel.uid != os.getuid():
            raise ChannelError(f"the socket of this job is held by another user, uid {channel.uid}")
        soon = min(deadline, time.monotonic() + AUTHENTICATION_SECONDS)
        channel.authenticate_connecting(key, name, soon)
        channel.send(Kind.HELLO, dataclasses.asdict(hello), soon)
        # The first byte of the answer shows that the leader has read the HELLO; a closed connection that it has not.
        sock.settimeout(max(0.001, soon - time.monotonic()))
        if not sock.recv(1, socket.MSG_PEEK):
            raise ChannelError("the connection was closed")
    except BaseException:
        sock.close()
        raise
    return channel


def _expect(channel: Channel, wanted: Kind, seconds: float) -> dict[str, Any]:
    """Receives the frame that must come next; raises the leader's reason if it is FAILED."""
    kind, content = channel.receive(time.monotonic() + seconds)
    if kind is Kind.FAILED:
        raise error_of(content)
    if kind is not wanted:
        raise ChannelError(f"expected {wanted.name}, got {kind.name}")
    return content


def _receive_wiring(channel: Channel, content: dict[str, Any], local_size: int) -> Wiring:
    generation, nonce, pids, watched = (content[name] for name in ("generation", "nonce", "pids", "watched"))
    fds = channel.receive_descriptors(1 + 2 * local_size + sum(watched), time.monotonic() + STEP_SECONDS)
    pidfds = iter(fds[1 + 2 * local_size :])
    alive_fds = [next(pidfds) if exists else -1 for exists in watched]
    return Wiring(generation, nonce, fds[0], pids, alive_fds, fds[1 : 1 + 2 * local_size], [])
