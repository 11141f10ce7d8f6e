"""The rendezvous server, at which the hosts of a job meet (horovod/common/rendezvous/server.py).

It runs on the host of rank 0: in the launcher, or in the agent that the launcher has there. So the hosts need to reach
each other, as they must anyway, but not the machine that the job was started from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.common.rendezvous.addresses import listen_at
from horovod.common.rendezvous.loop import READ, Loop, Timer
from horovod.common.rendezvous.server import RendezvousServer, host_key
from horovod.runner.environment import RENDEZVOUS_VARIABLES, Credentials

_LOOPBACKS = ("127.0.0.1", "::1")


def serve_on_loopback(
    loop: Loop, credentials: Credentials, host_of_rank: Sequence[str], tell: Callable[[str], object]
) -> dict[str, str]:
    """Serves a job whose hosts are all this machine: nobody else needs to reach it.

    Returns:
        The variables that lead workers to it; none if the job has one host.

    Raises:
        OSError: No port can be listened at.
    """
    if len(set(host_of_rank)) == 1:
        return {}
    trouble: OSError | None = None
    for address in _LOOPBACKS:
        try:
            port = serve(loop, address, credentials, host_of_rank, tell)
        except OSError as error:  # Such a machine has the other one.
            trouble = trouble or error
            continue
        return rendezvous_variables(address, port)
    raise trouble or OSError("this machine has no loopback address")


def serve(
    loop: Loop, address: str, credentials: Credentials, host_of_rank: Sequence[str], tell: Callable[[str], object]
) -> int:
    """Serves at an address of this machine for as long as the loop is run.

    Returns:
        The port.

    Raises:
        OSError: The address can't be listened at.
    """
    listener = listen_at(address, 0)
    port: int = listener.getsockname()[1]
    key = host_key(credentials.secret_key.encode(), credentials.job_id)
    server = RendezvousServer(listener, key, host_of_rank, tell)
    timer: Timer | None = None

    def step() -> None:
        nonlocal timer
        server.step()
        if timer is not None:
            timer.cancel()
        due = server.next_time()
        timer = loop.at(due, step) if due is not None else None

    loop.watch(server.fileno(), READ, lambda _events: step())
    return port


def rendezvous_variables(address: str, port: int) -> dict[str, str]:
    """What leads a worker to the server."""
    return dict(zip(RENDEZVOUS_VARIABLES, (address, str(port), "launcher"), strict=True))
