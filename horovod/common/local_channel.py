"""An authenticated connection between two ranks of one host, over an abstract Unix socket.

Proof comes before parsing. The kernel names the peer's user (SO_PEERCRED), which must be ours; then both sides show
that they know the job's key without revealing it:

    connecting -> listening    magic, challenge C                             (40 bytes)
    listening  -> connecting   challenge L, HMAC(key, "listening" C L name)   (64 bytes)
    connecting -> listening    HMAC(key, "connecting" L C name)               (32 bytes)

Every length up to here is fixed. After it come frames (kind, length, JSON) of at most MAX_FRAME bytes; descriptors
follow a frame in chunks, each with one byte.
"""

import array
import contextlib
import enum
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.common.environment import Identity

MAGIC = b"HVDLOCAL"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
OPENING_SIZE = len(MAGIC) + CHALLENGE_SIZE
MAX_FRAME = 1 << 20
_HEADER = struct.Struct(">BI")
HEADER_SIZE = _HEADER.size
_FDS_PER_CHUNK = 200  # the kernel takes at most 253 in one message


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1  # follower: who I am and what I was configured with
    ACCEPTED = 2  # leader: wait for the others
    WIRING = 3  # leader: here is the segment and what belongs to it
    READY = 4  # follower: I see the segment
    GO = 5  # leader: everyone sees it, start your engine
    STARTED = 6  # follower: my engine runs
    DONE = 7  # leader: everyone's does
    FAILED = 8  # either: this attempt is over, and why


class ChannelError(Exception):
    """The connection is of no use: closed, refused, too slow or not one of ours."""


def socket_name(identity: Identity) -> bytes:
    """The abstract address at which this job's ranks of this host meet.

    It derives from the key, so that nobody can guess it before it is used. A job without a key is named by its id. One
    without an id either (ranks started by hand) by the process that started it: ranks of one shell find each other, and
    two shells' jobs do not.
    """
    job = identity.job_id or ("" if identity.secret_key else f"uid {os.getuid()} parent {os.getppid()}")
    text = "\0".join(("local rendezvous", job, identity.host))
    return b"\0horovod-" + hmac.new(identity.secret_key, text.encode(), hashlib.sha256).hexdigest().encode()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The peer's pid and uid, as the kernel knows them."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def new_challenge() -> bytes:
    """Random bytes that only a holder of the key can answer."""
    return secrets.token_bytes(CHALLENGE_SIZE)


def prove(key: bytes, role: bytes, asked: bytes, own: bytes, name: bytes) -> bytes:
    """The answer to the challenge `asked`, by one who sent the challenge `own`."""
    return hmac.new(key, b"\0".join((role, asked, own, name)), hashlib.sha256).digest()


def encode_frame(kind: Kind, content: dict[str, Any]) -> bytes:
    """Makes the bytes of a frame.

    Raises:
        ChannelError: The content is larger than a frame may be.
    """
    body = json.dumps(content).encode()
    if len(body) > MAX_FRAME:
        raise ChannelError(f"a message of {len(body)} bytes is larger than the {MAX_FRAME} that are allowed")
    return _HEADER.pack(kind, len(body)) + body


def decode_header(header: bytes) -> tuple[Kind, int]:
    """Reads a frame's header: what it says and how long its body is.

    Raises:
        ChannelError: There is no such frame.
    """
    kind, length = _HEADER.unpack(header)
    if length > MAX_FRAME or kind not in Kind.__members__.values():
        raise ChannelError(f"not a message of this protocol (kind {kind}, {length} bytes)")
    return Kind(kind), length


def decode_body(body: bytes) -> dict[str, Any]:
    """Reads a frame's body.

    Raises:
        ChannelError: It is not what encode_frame makes.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ChannelError("a message is not JSON") from None
    if not isinstance(content, dict):
        raise ChannelError("a message is not a JSON object")
    return content


class Channel:
    """A connection with deadlines; every deadline is a time of the monotonic clock."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        self.sock = sock
        self.pid, self.uid = peer_credentials(sock)

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()

    def authenticate_connecting(self, key: bytes, name: bytes, deadline: float) -> None:
        """Proves the key to the listening side and has it prove it.

        Raises:
            ChannelError: The other side does not know the key, or is not there.
        """
        own = new_challenge()
        self._send(MAGIC + own, deadline)
        answer = self._receive(CHALLENGE_SIZE + PROOF_SIZE, deadline)
        asked, proof = answer[:CHALLENGE_SIZE], answer[CHALLENGE_SIZE:]
        if not hmac.compare_digest(proof, prove(key, b"listening", own, asked, name)):
            raise ChannelError("the listening process does not know this job's key")
        self._send(prove(key, b"connecting", asked, own, name), deadline)

    def send(self, kind: Kind, content: dict[str, Any], deadline: float) -> None:
        """Sends a frame."""
        self._send(encode_frame(kind, content), deadline)

    def receive(self, deadline: float) -> tuple[Kind, dict[str, Any]]:
        """Receives a frame."""
        kind, length = decode_header(self._receive(HEADER_SIZE, deadline))
        return kind, decode_body(self._receive(length, deadline))

    def send_descriptors(self, fds: Sequence[int], deadline: float) -> None:
        """Sends descriptors, in order."""
        for start in range(0, len(fds), _FDS_PER_CHUNK):
            chunk = list(fds[start : start + _FDS_PER_CHUNK])
            while True:
                with self._socket_errors(deadline):
                    try:
                        socket.send_fds(self.sock, [b"d"], chunk)
                        break
                    except OSError as error:
                        # Too many descriptors under way for this user: the receiver takes them out one by one.
                        if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                            raise
                time.sleep(0.005)

    def receive_descriptors(self, count: int, deadline: float) -> list[int]:
        """Receives descriptors, close-on-exec; the caller's to close.

        Raises:
            ChannelError: Not all of them came.
        """
        fds: list[int] = []
        try:
            while len(fds) < count:
                with self._socket_errors(deadline):
                    data, ancillary, flags, _ = self.sock.recvmsg(
                        1, socket.CMSG_SPACE(_FDS_PER_CHUNK * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                    )
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        received = array.array("i")
                        received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                        fds.extend(received)
                if not data:
                    raise ChannelError("the connection was closed")
                if flags & socket.MSG_CTRUNC:
                    raise ChannelError(
                        f"only {len(fds)} of {count} descriptors could be received: raise the limit of open files "
                        "(ulimit -n)"
                    )
            if len(fds) != count:
                raise ChannelError(f"expected {count} descriptors, got {len(fds)}")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def _send(self, data: bytes, deadline: float) -> None:
        with self._socket_errors(deadline):
            self.sock.sendall(data)

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            with self._socket_errors(deadline):
                part = self.sock.recv(size - len(parts))
            if not part:
                raise ChannelError("the connection was closed")
            parts += part
        return bytes(parts)

    @contextlib.contextmanager
    def _socket_errors(self, deadline: float) -> Iterator[None]:
        """Gives the socket the time that is left, and turns its errors into ChannelError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise ChannelError("no answer in time")
        self.sock.settimeout(left)
        try:
            yield
        except TimeoutError:
            raise ChannelError("no answer in time") from None
        except OSError as error:
            raise ChannelError(f"the connection failed: {error.strerror or error}") from None
