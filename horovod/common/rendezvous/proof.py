"""Proof comes before parsing: how both ends of a connection show that they know the job's key, without revealing it.

    connecting -> listening    OPENING  magic, claim, challenge C
    listening  -> connecting   ANSWER   challenge L, encrypts, HMAC(key, "listening"  C L claim encrypts context)
    connecting -> listening    PROOF    HMAC(key, "connecting" L C claim encrypts context)

Every length is fixed. The claim says what the connection is for, which rank connects to which, in which generation, and
whether the connecting side encrypts; `encrypts` is whether the listening side does; the context is the job's. All of it
is part of what is proved, so a proof is good for one connection of one job only, neither side's can be sent back to it,
and nobody on the way can have them go on in clear.

If both encrypt, a TLS handshake follows (encryption.py), by a key that comes from the job's and from both challenges:

    HMAC(key, "encryption" C L claim encrypts context)

What the connecting side says next is its first frame (messages.py). Without encryption this keeps strangers out, but
who can change packets on their way can still change what follows.
"""

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from horovod.common.rendezvous.encoding import ProtocolError

MAGIC = b"HVDMEET2"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
_OPENING = struct.Struct(f">{len(MAGIC)}sBQIIB{CHALLENGE_SIZE}s")
OPENING_SIZE = _OPENING.size
ANSWER_SIZE = CHALLENGE_SIZE + 1 + PROOF_SIZE
_LISTENING, _CONNECTING, _ENCRYPTION = b"listening ", b"connecting", b"encryption"


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LOCAL = 1  # a rank to the leader of its host
    HOST = 2  # the leader of a host to the rendezvous server
    DATA = 3  # a rank to a lower one on another host
    CONTROL = 4  # the leader of a host to rank 0
    TABLE = 5  # the leader of a host to another that passes the table on


@dataclass(frozen=True)
class Claim:
    """Who connects to whom, for what."""

    purpose: Purpose
    generation: int  # 0 while none is agreed on
    sender: int  # rank
    receiver: int  # rank; 0 for the server
    encrypts: bool = False  # the sender, if the receiver does

    def __str__(self) -> str:
        """The claim in words."""
        return (
            f"a {self.purpose.name} connection of rank {self.sender} to rank {self.receiver} in generation "
            f"{self.generation}"
        )


def encode_opening(claim: Claim, challenge: bytes) -> bytes:
    """Makes the first bytes of a connection."""
    return _OPENING.pack(
        MAGIC, claim.purpose, claim.generation, claim.sender, claim.receiver, claim.encrypts, challenge
    )


def decode_opening(data: bytes) -> tuple[Claim, bytes]:
    """Reads the first bytes of a connection: the claim and the challenge.

    Raises:
        ProtocolError: It is something else.
    """
    if len(data) != OPENING_SIZE or not data.startswith(MAGIC):
        raise ProtocolError("it does not speak this protocol")
    _, purpose, generation, sender, receiver, encrypts, challenge = _OPENING.unpack(data)
    if purpose not in Purpose.__members__.values():
        raise ProtocolError(f"it comes for an unknown purpose, {purpose}")
    return Claim(Purpose(purpose), generation, sender, receiver, _flag(encrypts)), challenge


def new_challenge() -> bytes:
    """Random bytes that only a holder of the key can answer."""
    return secrets.token_bytes(CHALLENGE_SIZE)


@dataclass(frozen=True)
class Key:
    """The job's key, and what else both sides must agree on."""

    secret: bytes = field(repr=False)  # not for tracebacks
    context: bytes

    def _prove(self, role: bytes, asked: bytes, own: bytes, claim: Claim, encrypts: bool) -> bytes:
        """The answer to the challenge `asked`, by one who sent the challenge `own`."""
        # The lengths of all parts but the last are fixed, so that no two sets of parts make the same text.
        text = role + asked + own + encode_opening(claim, bytes(CHALLENGE_SIZE)) + bytes([encrypts]) + self.context
        return hmac.new(self.secret, text, hashlib.sha256).digest()

    def answer(self, claim: Claim, asked: bytes, own: bytes, encrypts: bool = False) -> bytes:
        """What the listening side says to an opening."""
        return own + bytes([encrypts]) + self._prove(_LISTENING, asked, own, claim, encrypts)

    def check_answer(self, claim: Claim, answer: bytes, own: bytes) -> bytes:
        """Checks what the listening side said, and returns the proof that the connecting side owes it.

        Raises:
            ProtocolError: The listening side does not know the key.
        """
        asked, encrypts, proof = _split_answer(answer)
        if not hmac.compare_digest(proof, self._prove(_LISTENING, own, asked, claim, encrypts)):
            raise ProtocolError("the listening process does not know this job's key")
        return self._prove(_CONNECTING, asked, own, claim, encrypts)

    def check_proof(self, claim: Claim, proof: bytes, asked: bytes, own: bytes, encrypts: bool = False) -> None:
        """Checks the connecting side's proof, who sent the challenge `asked` and got `own`.

        Raises:
            ProtocolError: It does not know the key.
        """
        if not hmac.compare_digest(proof, self._prove(_CONNECTING, own, asked, claim, encrypts)):
            raise ProtocolError("it does not know this job's key")

    def session_key(self, claim: Claim, connecting: bytes, listening: bytes) -> bytes:
        """The key of an encrypted connection, from both sides' challenges."""
        return self._prove(_ENCRYPTION, connecting, listening, claim, True)


def listener_of(answer: bytes) -> tuple[bytes, bool]:
    """The listening side's challenge, and whether it encrypts; true only if the answer was checked."""
    return _split_answer(answer)[:2]


def _split_answer(answer: bytes) -> tuple[bytes, bool, bytes]:
    return answer[:CHALLENGE_SIZE], _flag(answer[CHALLENGE_SIZE]), answer[CHALLENGE_SIZE + 1 :]


def _flag(value: int) -> bool:
    if value > 1:
        raise ProtocolError("it does not speak this protocol")
    return bool(value)
