"""A rank at a meeting: what it says of itself, and what it needs to talk to the others."""

import hashlib
import hmac
import logging
import os
import socket
import time
from dataclasses import dataclass

from horovod import __version__
from horovod.common.environment import Identity, Tunables
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.addresses import REACH_EACH_OTHER, endpoint_of
from horovod.common.rendezvous.connection import CLOSED
from horovod.common.rendezvous.encryption import Encryption
from horovod.common.rendezvous.loop import Loop
from horovod.common.rendezvous.mesh import Mesh
from horovod.common.rendezvous.messages import NOWHERE, Configuration, Hello, Place
from horovod.common.rendezvous.proof import Key
from horovod.common.rendezvous.refusals import Refusals
from horovod.common.rendezvous.server import host_key
from horovod.common.rendezvous.table import Table
from horovod.common.rendezvous.times import STEP_SECONDS
from horovod.common.rendezvous.wiring import Wiring

_log = logging.getLogger("horovod")


@dataclass
class Rank:
    """This process.

    Attributes:
        loop: In which it waits.
        hello: What it says of itself.
        timeout: How long it waits for others to come.
        local_address: Where the ranks of this host meet.
        local_key: What they prove to each other.
        host_key: What ranks of different hosts prove to each other.
        listener: Where it will listen for ranks of other hosts, if there are any.
        encryption: Which connections with them are encrypted.
        refusals: Tells whom it turned away.
        mesh: Its connections with them, once it has the table.
    """

    loop: Loop
    hello: Hello
    timeout: float
    local_address: bytes
    local_key: Key
    host_key: Key
    listener: socket.socket | None
    encryption: Encryption
    refusals: Refusals
    mesh: Mesh | None = None

    @classmethod
    def make(
        cls,
        identity: Identity,
        tunables: Tunables,
        process_sets: list[list[int]],
        last_generation: int,
        *,
        listener: socket.socket | None,
        encryption: Encryption,
    ) -> "Rank":
        """Makes it from the environment; takes the listening socket over."""
        configuration = Configuration(
            process_sets,
            tunables.fusion_threshold,
            tunables.cache_capacity,
            tunables.allreduce_ring,
            encryption.data,
            bool(encryption.library),
        )
        endpoint = endpoint_of(listener) if listener is not None else NOWHERE
        address = local_address(identity)
        return cls(
            loop=Loop(),
            hello=Hello(__version__, place_of(identity), configuration, last_generation, endpoint),
            timeout=tunables.start_timeout,
            local_address=address,
            local_key=Key(identity.secret_key, address),
            host_key=host_key(identity.secret_key, identity.job_id),
            listener=listener,
            encryption=encryption,
            refusals=Refusals(f"init of rank {identity.rank}", _log.warning, quiet_about=(CLOSED,)),
        )

    @property
    def place(self) -> Place:
        """Where it stands in the job."""
        return self.hello.place

    def listen(self, table: Table) -> None:
        """Lets ranks of other hosts connect, and pass the table on."""
        assert self.listener is not None
        self.mesh = Mesh(
            self.loop,
            self.place.rank,
            table,
            self.listener,
            self.host_key,
            encryption=self.encryption,
            on_refused=self.refusals.add,
        )

    def link(self, wiring: Wiring) -> None:
        """Connects to the ranks of the other hosts.

        Raises:
            HorovodInternalError: Not all of them could be reached.
        """
        if self.mesh is None:
            self.listen(wiring.table)
        mesh = self.mesh
        assert mesh is not None
        mesh.connect()
        try:
            if not self.loop.run_until(mesh.is_complete, time.monotonic() + STEP_SECONDS):
                raise HorovodInternalError(
                    f"init: {self.place} is not connected to all ranks of other hosts after {STEP_SECONDS:g} s: "
                    f"{mesh.missing()}. {REACH_EACH_OTHER}"
                )
            wiring.take(*mesh.take())
        finally:
            mesh.close()

    def close(self) -> None:
        """Closes what it holds."""
        if self.mesh is not None:
            self.mesh.close()
        if self.listener is not None:
            self.listener.close()
        self.loop.close()


def place_of(identity: Identity) -> Place:
    """Where a process stands in its job."""
    return Place(
        identity.rank,
        identity.size,
        identity.local_rank,
        identity.local_size,
        identity.cross_rank,
        identity.cross_size,
        identity.host,
    )


def local_address(identity: Identity) -> bytes:
    """The abstract Unix address at which this job's ranks of this host meet.

    It derives from the key, so that nobody can guess it before it is used. A job without a key is named by its id. One
    without an id either (ranks started by hand) by the process that started it: ranks of one shell find each other, and
    two shells' jobs do not.
    """
    job = identity.job_id or ("" if identity.secret_key else f"uid {os.getuid()} parent {os.getppid()}")
    text = "\0".join(("local rendezvous", job, identity.host))
    return b"\0horovod-" + hmac.new(identity.secret_key, text.encode(), hashlib.sha256).hexdigest().encode()


def describe_unseen(local_rank: int, place: Place) -> str:
    """A rank of the same host that has not told its rank, in words."""
    local = f"local rank {local_rank} of {place.local_size} on host {place.host}"
    if place.local_size == place.size:
        return f"rank {local_rank} ({local})"
    return f"{local} (rank {place.rank - place.local_rank + local_rank}, if a host's ranks follow each other)"
