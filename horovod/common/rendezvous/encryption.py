"""Which connections between hosts are encrypted, and by which library.

TLS 1.3 by OpenSSL's libssl, which is found at run time; the sessions themselves are the engine's (src/transport/tls.h).
What is for the whole job to know (rendezvous and control connections) is encrypted wherever libssl is; data is if the
user wants it. Whether a connection is, both sides say before they prove the key, and the proof covers it (proof.py): so
nobody can talk them out of it. Ranks that differ about it don't meet.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod.common.environment import read
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.proof import Purpose

if TYPE_CHECKING:
    from horovod._core import TlsSession

DEFAULT_LIBRARY = "libssl.so.3"
NO_LIBRARY = "none"  # what HOROVOD_TLS_LIBRARY says to go without


@dataclass(frozen=True)
class Encryption:
    """What one process can and wants to encrypt.

    Attributes:
        library: The libssl to use; empty: nothing is encrypted.
        data: Whether the tensors are.
        trouble: Why there is no library.
    """

    library: str = ""
    data: bool = False
    trouble: str = ""

    def covers(self, purpose: Purpose) -> bool:
        """Whether connections for a purpose are to be encrypted. Those within a host never are."""
        if purpose is Purpose.DATA:
            return self.data
        return bool(self.library) and purpose is not Purpose.LOCAL

    def open_session(self, key: bytes, *, listening: bool) -> "TlsSession":
        """Makes one end of an encrypted connection.

        Raises:
            ProtocolError: The system refused.
        """
        from horovod import _core

        try:
            return _core.TlsSession(self.library, listening, key)
        except HorovodInternalError as error:
            raise ProtocolError(str(error)) from None

    def check(self, who: object) -> None:
        """Checks that what is wanted can be done.

        Raises:
            HorovodInternalError: Data is to be encrypted, and there is no library.
        """
        if self.data and not self.library:
            raise HorovodInternalError(
                f"init: HOROVOD_ENCRYPT=1, and {who} can't encrypt: {self.trouble}. Install OpenSSL 3 there (Debian's "
                "package libssl3), or let HOROVOD_TLS_LIBRARY name its libssl."
            )


PLAIN = Encryption(trouble="nothing is to be encrypted")


def find_encryption(data: bool = False) -> Encryption:
    """What this process can encrypt.

    Args:
        data: Whether tensors are to be encrypted.
    """
    name: str = read("HOROVOD_TLS_LIBRARY") or DEFAULT_LIBRARY
    if name.lower() == NO_LIBRARY:
        return Encryption("", data, f"HOROVOD_TLS_LIBRARY={name}")
    trouble = _load(name)
    return Encryption("" if trouble else name, data, trouble)


@functools.cache
def _load(name: str) -> str:
    """Loads a libssl, and returns why it can't be used."""
    from horovod import _core  # the launcher of one host needs no engine

    try:
        _core.tls_load(name)
    except HorovodInternalError as error:
        # Python may have come with one that is in no usual place; once it is loaded it is found by its name.
        with contextlib.suppress(ImportError):
            import _ssl  # noqa: F401
        try:
            _core.tls_load(name)
        except HorovodInternalError:
            return str(error)
    return ""


def check_alike(who: object, encrypts: bool, other: object, other_encrypts: bool) -> None:
    """Checks that two sides agree about encryption.

    Raises:
        HorovodInternalError: One of them encrypts, and the other does not.
    """
    if encrypts == other_encrypts:
        return
    with_it, without = (who, other) if encrypts else (other, who)
    raise HorovodInternalError(
        f"init: {with_it} encrypts its control connections, and {without} can't: no libssl is found there. Install "
        f"OpenSSL 3 there (Debian's package libssl3), or set HOROVOD_TLS_LIBRARY={NO_LIBRARY} everywhere to go without."
    )
