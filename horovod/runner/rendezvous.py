"""The launcher's rendezvous server, at which the hosts of a job meet (horovod/common/rendezvous/server.py)."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.runner.environment import RENDEZVOUS_VARIABLES, Credentials
from horovod.runner.hosts import Slot, host_names

# All hosts are this machine, so nobody else needs to reach it.
_LOOPBACKS = ("127.0.0.1", "::1")


def open_server(slots: Sequence[Slot], credentials: Credentials) -> tuple[RendezvousServer | None, dict[str, str]]:
    """Open the server that a job needs: none if it has one host.

    Returns:
        The server, to be stepped by whoever has a loop, and the variables that lead workers to it.

    Raises:
        OSError: No port can be listened at.
    """
    if len(host_names(slots)) == 1:
        return None, {}
    trouble: OSError | None = None
    for address in _LOOPBACKS:
        try:
            listener = listen_at(address, 0)
        except OSError as error:  # Such a machine has the other one.
            trouble = trouble or error
            continue
        values = (address, str(listener.getsockname()[1]), "launcher")
        key = host_key(credentials.secret_key.encode(), credentials.job_id)
        server = RendezvousServer(listener, key, [slot.hostname for slot in slots])
        return server, dict(zip(RENDEZVOUS_VARIABLES, values, strict=True))
    raise trouble or OSError("this machine has no loopback address")
