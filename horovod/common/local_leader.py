"""The leader's side of local_rendezvous.py, which has the protocol.

While ranks are awaited, one selector watches the listening socket, every connection and the pidfd of every rank that
has arrived, and no call blocks: a stranger that says nothing, or half of something, holds up nobody.
"""

import contextlib
import dataclasses
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from horovod import _core
from horovod.common.environment import Identity
from horovod.common.exceptions import HorovodInternalError
from horovod.common.local_channel import Channel, ChannelError, Kind, encode_frame, socket_name
from horovod.common.local_guest import Guest
from horovod.common.local_rendezvous import (
    STEP_SECONDS,
    Hello,
    Wiring,
    describe,
    error_of,
    open_pidfd,
    reason_of,
    receive_some,
)

# Connections that have not proved anything yet; beyond it the oldest is dropped.
_MAX_STRANGERS = 256


class _Reception:
    """Collects the guests until every local rank is there."""

    def __init__(self, identity: Identity, own: Hello, timeout: float) -> None:
        self.identity = identity
        self.own = own
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.arrived: dict[int, Guest] = {}
        self.left: dict[int, Guest] = {}  # those that came and closed their connection; their pidfds are still watched
        self.strangers: list[Guest] = []
        self.selector = selectors.DefaultSelector()
        self.name = socket_name(identity)
        self.listener = self._listen()
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _listen(self) -> socket.socket:
        """Takes the address, waiting for an earlier owner to let go of it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            while True:
                try:
                    listener.bind(self.name)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > self.deadline:
                        raise HorovodInternalError(
                            f"init: {describe(0, self.identity)} can't listen for the other ranks: {error.strerror}. "
                            "Does another job run with the same HOROVOD_JOB_ID?"
                        ) from None
                time.sleep(0.02)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            self.selector.close()
            raise
        return listener

    def gather(self) -> None:
        """Returns when all have arrived.

        Raises:
            HorovodInternalError: A rank did not come in time, died, or is there twice.
            ValueError: A rank has another idea of the job.
        """
        while len(self.arrived) < self.identity.local_size - 1:
            now = time.monotonic()
            if now >= self.deadline:
                raise HorovodInternalError(self._who_is_missing())
            for guest in [guest for guest in self.strangers if guest.deadline <= now]:
                self._drop(guest)
            times = [self.deadline, *(guest.deadline for guest in self.strangers)]
            for key, _ in self.selector.select(max(0.0, min(times) - now)):
                if key.fileobj in self.selector.get_map():  # an earlier event may have closed this one
                    key.data()
        self.close_door()

    def close_door(self) -> None:
        """Stops listening and drops everyone who is not part of the job."""
        for guest in list(self.strangers):
            self._drop(guest)
        self.selector.close()
        self.listener.close()

    def close(self) -> None:
        """Closes everything, also the connections of those who have arrived."""
        self.close_door()
        for guest in (*self.arrived.values(), *self.left.values()):
            guest.close()
        self.arrived.clear()
        self.left.clear()

    def tell_failure(self, error: BaseException) -> None:
        """Tells the reason to everyone who has arrived."""
        reason = reason_of(error, self.identity)
        for guest in self.arrived.values():
            with contextlib.suppress(ChannelError):
                guest.channel.send(Kind.FAILED, reason, time.monotonic() + 1)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            raise HorovodInternalError(f"init: can't accept the other ranks: {error.strerror}.") from None
        sock.setblocking(False)
        try:
            channel = Channel(sock)
        except OSError:
            sock.close()
            return
        if channel.uid != os.getuid():
            sock.close()
            return
        if len(self.strangers) >= _MAX_STRANGERS:
            self._drop(self.strangers[0])
        guest = Guest(channel, self.identity.secret_key, self.name)
        self.strangers.append(guest)
        self.selector.register(sock, selectors.EVENT_READ, lambda: self._read(guest))

    def _read(self, guest: Guest) -> None:
        if guest.hello is not None:
            self._hear_from_arrived(guest)
            return
        try:
            guest.read()
            if guest.hello is not None:
                self._receive(guest, guest.hello)
        except ChannelError:
            self._drop(guest)

    def _receive(self, guest: Guest, hello: Hello) -> None:
        """Takes in a rank that has proved the key and said who it is."""
        self._check_identity(hello, guest.channel.pid)
        former = self.arrived.get(hello.local_rank)
        if former is not None:
            if former.channel.pid != guest.channel.pid and not former.is_closed():
                raise HorovodInternalError(
                    f"init: {describe(hello.local_rank, self.identity)} is there twice: pid {former.channel.pid} and "
                    f"pid {guest.channel.pid}. Each rank must be started once."
                )
            self._drop(former)
        guest.reply(encode_frame(Kind.ACCEPTED, {"seconds_left": max(0.0, self.deadline - time.monotonic())}))
        self.strangers.remove(guest)
        self.arrived[hello.local_rank] = guest
        returned = self.left.pop(hello.local_rank, None)
        if returned is not None:
            self._forget_pidfd(returned)
        guest.pidfd = open_pidfd(guest.channel.pid)
        if guest.pidfd >= 0:
            self.selector.register(guest.pidfd, selectors.EVENT_READ, lambda: self._mourn(guest, hello))

    def _check_identity(self, hello: Hello, pid: int) -> None:
        mine, theirs = self.own, hello
        if theirs.version != mine.version:
            raise HorovodInternalError(
                f"init: rank {theirs.rank} (pid {pid}) runs Horovod {theirs.version}, rank {mine.rank} {mine.version}. "
                "All ranks need the same version."
            )
        for field in ("size", "local_size", "cross_rank", "cross_size"):
            if getattr(theirs, field) != getattr(mine, field):
                raise ValueError(
                    f"init: HOROVOD_{field.upper()} is {getattr(theirs, field)} on rank {theirs.rank} (pid {pid}) and "
                    f"{getattr(mine, field)} on rank {mine.rank}; all ranks of a host need the same."
                )
        if theirs.rank != theirs.local_rank or not 0 < theirs.local_rank < mine.local_size:
            raise ValueError(
                f"init: pid {pid} says that it is rank {theirs.rank}, local rank {theirs.local_rank} of "
                f"{mine.local_size}; expected the same number from 1 to {mine.local_size - 1}."
            )

    def _hear_from_arrived(self, guest: Guest) -> None:
        """An arrived rank has nothing to say until WIRING: it has failed, or it is gone."""
        assert guest.hello is not None
        if guest.is_closed():
            # It may come again, or be about to die: a process's connections are closed before its pidfd says so.
            self.selector.unregister(guest.channel.sock)
            guest.channel.close()
            self.left[guest.hello.local_rank] = self.arrived.pop(guest.hello.local_rank)
            return
        _hear(guest, self.identity, None)

    def _mourn(self, guest: Guest, hello: Hello) -> None:
        raise HorovodInternalError(
            f"init: {describe(hello.local_rank, self.identity)}, pid {guest.channel.pid}, died before all ranks had "
            "arrived; see its output."
        )

    def _drop(self, guest: Guest) -> None:
        if guest in self.strangers:
            self.strangers.remove(guest)
        if guest.hello is not None and self.arrived.get(guest.hello.local_rank) is guest:
            del self.arrived[guest.hello.local_rank]
        self.selector.unregister(guest.channel.sock)
        guest.channel.close()
        self._forget_pidfd(guest)

    def _forget_pidfd(self, guest: Guest) -> None:
        if guest.pidfd >= 0:
            self.selector.unregister(guest.pidfd)
        guest.close()

    def _who_is_missing(self) -> str:
        missing = [rank for rank in range(1, self.identity.local_size) if rank not in self.arrived]
        shown = ", ".join(describe(rank, self.identity) for rank in missing[:6])
        text = f"init: {shown}{', ...' if len(missing) > 6 else ''} did not arrive within {self.timeout:g} s; arrived: "
        text += ", ".join(map(str, sorted([0, *self.arrived])))
        for rank, guest in sorted(self.left.items()):
            text += f"; rank {rank} (pid {guest.channel.pid}) came and gave up"
        return text + ". If they only need longer, raise HOROVOD_START_TIMEOUT."


def _hear(guest: Guest, identity: Identity, wanted: Kind | None) -> dict[str, Any]:
    """Receives the frame that an arrived rank must send next; with None, any but FAILED is wrong too.

    Raises:
        HorovodInternalError, ValueError: It said something else, what it failed of, or nothing.
    """
    assert guest.hello is not None
    who = f"{describe(guest.hello.local_rank, identity)}, pid {guest.channel.pid}"
    try:
        kind, content = guest.channel.receive(time.monotonic() + STEP_SECONDS)
    except ChannelError as error:
        raise HorovodInternalError(
            f"init: lost {who}: {error}. It most likely died or was stopped; see its output."
        ) from None
    if kind is Kind.FAILED:
        raise error_of(content)
    if kind is not wanted:
        raise HorovodInternalError(f"init: {who} said {kind.name}, expected {wanted.name if wanted else 'nothing'}.")
    return content


class LeaderMeeting:
    """The meeting as the leader sees it."""

    def __init__(self, reception: _Reception, wiring: Wiring) -> None:
        """Keeps the connections to the followers."""
        self.wiring = wiring
        self._reception = reception

    def hand_over(self) -> None:
        """Gives every follower the descriptors, one after the other, so that few are under way at a time."""
        content = {
            "generation": self.wiring.generation,
            "nonce": self.wiring.nonce,
            "pids": self.wiring.pids,
            "watched": [fd >= 0 for fd in self.wiring.alive_fds],
        }
        for local_rank, guest in sorted(self._reception.arrived.items()):
            deadline = time.monotonic() + STEP_SECONDS
            try:
                guest.channel.send(Kind.WIRING, content, deadline)
                guest.channel.send_descriptors(self.wiring.descriptors(), deadline)
            except ChannelError as error:
                who = describe(local_rank, self._reception.identity)
                raise HorovodInternalError(f"init: {who}, pid {guest.channel.pid}: {error}.") from None
            ready = _hear(guest, self._reception.identity, Kind.READY)
            (self.wiring.arena_fds[local_rank],) = receive_some(guest.channel, ready["arenas"])

    def go(self) -> None:
        """Tells every follower to start, with the arenas of all."""
        own = _core.arena_fd()
        self.wiring.arena_fds[0] = os.dup(own) if own >= 0 else -1
        content = {"arenas": [fd >= 0 for fd in self.wiring.arena_fds]}
        self._say_to_all(Kind.GO, content, self.wiring.arenas())

    def _say_to_all(self, kind: Kind, content: dict[str, Any], fds: list[int]) -> None:
        for local_rank, guest in self._reception.arrived.items():
            deadline = time.monotonic() + STEP_SECONDS
            try:
                guest.channel.send(kind, content, deadline)
                guest.channel.send_descriptors(fds, deadline)
            except ChannelError as error:
                who = describe(local_rank, self._reception.identity)
                raise HorovodInternalError(f"init: lost {who}, pid {guest.channel.pid}: {error}.") from None

    def confirm(self) -> None:
        """Waits until every follower's engine runs, and says so to all."""
        for _, guest in sorted(self._reception.arrived.items()):
            _hear(guest, self._reception.identity, Kind.STARTED)
        self._say_to_all(Kind.DONE, {}, [])


@contextlib.contextmanager
def lead(identity: Identity, own: Hello, timeout: float) -> Iterator[LeaderMeeting]:
    """Waits for the other local ranks and brings them to GO; see local_rendezvous.meet."""
    with contextlib.ExitStack() as resources:
        reception = _Reception(identity, own, timeout)
        resources.callback(reception.close)
        try:
            reception.gather()
            hellos = {0: own} | {rank: guest.hello for rank, guest in reception.arrived.items() if guest.hello}
            _check_configuration(hellos)
            pids = [os.getpid(), *(reception.arrived[rank].channel.pid for rank in range(1, identity.local_size))]
            generation = 1 + max(hello.last_generation for hello in hellos.values())
            wiring = Wiring.make(pids, own.cache_capacity, generation)
            resources.callback(wiring.close)
            meeting = LeaderMeeting(reception, wiring)
            meeting.hand_over()
            meeting.go()
            yield meeting
        except BaseException as error:
            reception.tell_failure(error)
            raise


def _check_configuration(hellos: dict[int, Hello]) -> None:
    """Checks, once all are there and will hear of it, that all were configured alike."""
    own = dataclasses.asdict(hellos[0])
    for rank, hello in sorted(hellos.items()):
        if hello.process_sets != own["process_sets"]:
            raise ValueError(
                "Attempted to register process set with mismatching size/values on different ranks: "
                f"rank 0 gave {own['process_sets']} to init, rank {rank} {hello.process_sets}."
            )
        for field in ("fusion_threshold", "cache_capacity"):
            if getattr(hello, field) != own[field]:
                raise ValueError(
                    f"init: HOROVOD_{field.upper()} is {own[field]} on rank 0 and {getattr(hello, field)} on rank "
                    f"{rank}; all ranks need the same."
                )
