"""Proof comes before parsing: how both ends of a connection show that they know the job's key, without revealing it.

    connecting -> listening    OPENING  magic, claim, challenge C
    listening  -> connecting   ANSWER   challenge L, HMAC(key, "listening"  C L claim context)
    connecting -> listening    PROOF    HMAC(key, "connecting" L C claim context)

Every length is fixed. The claim says what the connection is for, which rank connects to which, and in which generation;
the context is the job's. Both are part of what is proved, so a proof is good for one connection of one job only, and
neither side's can be sent back to it. What the connecting side says next is its first frame (messages.py).

This keeps strangers out. It does not encrypt, and who can change packets on their way can still change what follows.
"""

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from horovod.common.rendezvous.encoding import ProtocolError

MAGIC = b"HVDMEET1"
CHALLENGE_SIZE = 32
PROOF_SIZE = 32
_OPENING = struct.Struct(f">{len(MAGIC)}sBQII{CHALLENGE_SIZE}s")
OPENING_SIZE = _OPENING.size
ANSWER_SIZE = CHALLENGE_SIZE + PROOF_SIZE
_LISTENING, _CONNECTING = b"listening ", b"connecting"


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LOCAL = 1  # a rank to the leader of its host
    HOST = 2  # the leader of a host to the rendezvous server
    DATA = 3  # a rank to a lower one on another host
    CONTROL = 4  # the leader of a host to rank 0


@dataclass(frozen=True)
class Claim:
    """Who connects to whom, for what."""

    purpose: Purpose
    generation: int  # 0 while none is agreed on
    sender: int  # rank
    receiver: int  # rank; 0 for the server


def encode_opening(claim: Claim, challenge: bytes) -> bytes:
    """Makes the first bytes of a connection."""
    return _OPENING.pack(MAGIC, claim.purpose, claim.generation, claim.sender, claim.receiver, challenge)


def decode_opening(data: bytes) -> tuple[Claim, bytes]:
    """Reads the first bytes of a connection: the claim and the challenge.

    Raises:
        ProtocolError: It is something else.
    """
    if len(data) != OPENING_SIZE or not data.startswith(MAGIC):
        raise ProtocolError("it does not speak this protocol")
    _, purpose, generation, sender, receiver, challenge = _OPENING.unpack(data)
    if purpose not in Purpose.__members__.values():
        raise ProtocolError(f"it comes for an unknown purpose, {purpose}")
    return Claim(Purpose(purpose), generation, sender, receiver), challenge


def new_challenge() -> bytes:
    """Random bytes that only a holder of the key can answer."""
    return secrets.token_bytes(CHALLENGE_SIZE)


@dataclass(frozen=True)
class Key:
    """The job's key, and what else both sides must agree on."""

    secret: bytes = field(repr=False)  # not for tracebacks
    context: bytes

    def _prove(self, role: bytes, asked: bytes, own: bytes, claim: Claim) -> bytes:
        """The answer to the challenge `asked`, by one who sent the challenge `own`."""
        # The lengths of all parts but the last are fixed, so that no two sets of parts make the same text.
        text = role + asked + own + encode_opening(claim, bytes(CHALLENGE_SIZE)) + self.context
        return hmac.new(self.secret, text, hashlib.sha256).digest()

    def answer(self, claim: Claim, asked: bytes, own: bytes) -> bytes:
        """What the listening side says to an opening."""
        return own + self._prove(_LISTENING, asked, own, claim)

    def check_answer(self, claim: Claim, answer: bytes, own: bytes) -> bytes:
        """Checks what the listening side said, and returns the proof that the connecting side owes it.

        Raises:
            ProtocolError: The listening side does not know the key.
        """
        asked, proof = answer[:CHALLENGE_SIZE], answer[CHALLENGE_SIZE:]
        if not hmac.compare_digest(proof, self._prove(_LISTENING, own, asked, claim)):
            raise ProtocolError("the listening process does not know this job's key")
        return self._prove(_CONNECTING, asked, own, claim)

    def check_proof(self, claim: Claim, proof: bytes, asked: bytes, own: bytes) -> None:
        """Checks the connecting side's proof, who sent the challenge `asked` and got `own`.

        Raises:
            ProtocolError: It does not know the key.
        """
        if not hmac.compare_digest(proof, self._prove(_CONNECTING, own, asked, claim)):
            raise ProtocolError("it does not know this job's key")
