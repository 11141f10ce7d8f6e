"""How the ranks of a job meet.

Those of one host come to share memory and descriptors: local rank 0 leads and listens at an abstract Unix socket, the
others follow and connect. If there are other hosts, only leaders talk to the rendezvous server, which joins the hosts
(server.py); every rank then connects to those of other hosts (mesh.py). One attempt, within a host:

    follower                         leader
    HELLO (who, configuration)  -->  until every local rank is there or the time is over; checks that all agree
                                <--  ACCEPTED (seconds that the leader will still wait)
                                     [reports its host, and gets the table of all hosts]
                                <--  TABLE (all hosts and ranks)
                                <--  WIRING + descriptors: segment, two eventfds per rank, a pidfd per rank
    probes the segment,
    READY + its arena           -->  all ready
    [connects to other hosts         [connects to other hosts
    LINKED                      -->  all linked: tells the server, which says GO when all hosts are]
                                <--  GO + the arenas of all (memory that the others may read, see hvd_alloc)
    starts its engine                starts its engine
    STARTED                     -->  all started [tells the server, which says DONE when all hosts are]
                                <--  DONE

What is in brackets happens if there are several hosts. Everyone may say FAILED with the reason at any time, upwards;
the topmost (the server, or the leader of an only host) tells the first reason that it hears to all. Who has failed
waits for that answer, so that one attempt ends in the same way, with the same words, on every rank that took part; then
all of them may try again. A leader that is sent away before its followers have come waits some seconds for them, to
tell them why.

What keeps it safe
  - A rank that is not there yet is waited for; one that closes its connection counts as not there again, and may come
    back with a new one. One that dies ends the attempt (its pidfd).
  - Until ACCEPTED a follower takes a closed connection for bad luck (a leader that has just given up an earlier
    attempt) and connects again; after it, for the end of the attempt.
  - The generation is greater than any that a participant has ever taken part in, and each has its own segments,
    and its own connections: a proof of another generation is none.
  - Every wait has a deadline, connections that prove nothing are dropped after a few seconds, and in every wait
    everything is heard that can end it: the leader, the followers and their deaths, the server.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from horovod.common.environment import UNTOLD, Identity, Network, Tunables
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous import addresses
from horovod.common.rendezvous.caller import Address
from horovod.common.rendezvous.encryption import PLAIN, Encryption, find_encryption
from horovod.common.rendezvous.follower import follow
from horovod.common.rendezvous.hosting import serving
from horovod.common.rendezvous.leader import lead
from horovod.common.rendezvous.messages import NOWHERE
from horovod.common.rendezvous.rank import Rank
from horovod.common.rendezvous.server import RendezvousServer
from horovod.common.rendezvous.server_line import ServerLine
from horovod.common.rendezvous.table import Table
from horovod.common.rendezvous.wiring import Wiring

_log = logging.getLogger("horovod")

# How often to ask for a name that is not known yet.
_NAME_SECONDS = 0.5


@dataclass
class Meeting:
    """A meeting at which everyone has said GO: start the engine, then confirm.

    Attributes:
        wiring: What the engine needs to reach the others.
        confirm: Returns when every rank's engine runs; raises if one could not be started.
    """

    wiring: Wiring
    confirm: Callable[[], None]


@contextlib.contextmanager
def meet(
    identity: Identity,
    network: Network,
    tunables: Tunables,
    process_sets: list[list[int]],
    last_generation: int,
) -> Iterator[Meeting]:
    """Meets the other ranks; what they share is closed at the end of the block.

    An exception inside the block is told to the other ranks, whose attempt then ends with it too.

    Raises:
        ValueError: The ranks' configurations contradict each other, or the environment is not complete.
        HorovodInternalError: A rank did not come, died, or could not take part.
    """
    check_place(identity)
    with contextlib.ExitStack() as resources:
        if identity.size == 1:
            table = Table(last_generation + 1, [identity.host], [0], [os.getpid()], [NOWHERE])
            wiring = resources.enter_context(contextlib.closing(Wiring.make(table, 0, tunables.cache_capacity)))
            yield Meeting(wiring, lambda: None)
            return
        server: list[Address] = []
        listener = None
        encryption = PLAIN
        if identity.local_size < identity.size:
            encryption = find_encryption(network.encrypt)
            _check_network(identity, network)
            _tell_about_encryption(identity, encryption)
            server = _where_hosts_meet(network, tunables.start_timeout)
            if network.own_address:
                listener = addresses.bind_to(network.own_address)
            else:
                listener = addresses.bind_for_peers(server, network.interface)
        rank = resources.enter_context(
            contextlib.closing(
                Rank.make(identity, tunables, process_sets, last_generation, listener=listener, encryption=encryption)
            )
        )
        if identity.local_rank > 0:
            yield Meeting(*resources.enter_context(follow(rank)))
            return

        def call_server() -> ServerLine:
            if identity.rank == 0 and not network.launcher_serves:
                resources.enter_context(serving(_own_server(rank, network, server)))
            return ServerLine(
                rank.loop,
                rank.hello,
                server,
                rank.host_key,
                timeout=rank.timeout,
                encryption=encryption,
                advice=network.advice,
            )

        yield Meeting(*resources.enter_context(lead(rank, call_server if server else None)))


def check_place(identity: Identity) -> None:
    """Checks what a rank can know of its place by itself.

    Raises:
        ValueError: It can't be so.
    """
    if identity.local_size == identity.size:
        if identity.rank != identity.local_rank:
            raise ValueError(
                f"init: HOROVOD_RANK={identity.rank} and HOROVOD_LOCAL_RANK={identity.local_rank}: on one host they "
                "must be the same."
            )
        if identity.cross_size != 1:
            raise ValueError(
                f"init: HOROVOD_CROSS_SIZE={identity.cross_size}, but all {identity.size} ranks are on host "
                f"{identity.host}: expected 1."
            )
    if identity.rank < identity.local_rank and (identity.cross_rank, identity.cross_size) != UNTOLD:
        raise ValueError(
            f"init: HOROVOD_RANK={identity.rank} and HOROVOD_LOCAL_RANK={identity.local_rank}: on a host both must "
            "ascend together, and rank 0 must be local rank 0."
        )


def _check_network(identity: Identity, network: Network) -> None:
    """Checks what several hosts need."""
    place = f"init: the job has {identity.size} ranks, {identity.local_size} of them on host {identity.host}"
    if not network.address or not network.port:
        raise ValueError(
            f"{place}: HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT must be set on all ranks, to an "
            f"address of rank 0's host and a free port there; horovodrun does so by itself. {network.advice}".rstrip()
        )
    if identity.secret_key:
        return
    if network.encrypt:
        raise HorovodInternalError(
            f"{place}, and HOROVOD_ENCRYPT=1 needs a key: set HOROVOD_SECRET_KEY_FILE to a file with the same random "
            "text on all hosts, or HOROVOD_SECRET_KEY to the text."
        )
    if not network.insecure:
        raise HorovodInternalError(
            f"{place}, and there is no key by which they know each other: set HOROVOD_SECRET_KEY_FILE to a file with "
            "the same random text on all hosts, or HOROVOD_SECRET_KEY to the text. HOROVOD_INSECURE=1 goes without: "
            "then everyone who can reach the hosts can take part."
        )
    if identity.local_rank == 0:
        _log.warning("HOROVOD_INSECURE=1: without a key everyone who can reach host %s can take part.", identity.host)


def _tell_about_encryption(identity: Identity, encryption: Encryption) -> None:
    if identity.rank == 0 and not encryption.library and not encryption.data:
        _log.warning(
            "The control connections between hosts prove the job's key, but are not encrypted: %s. OpenSSL 3 on all "
            "hosts (Debian's package libssl3) would encrypt them.",
            encryption.trouble,
        )


def _where_hosts_meet(network: Network, timeout: float) -> list[Address]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            found = addresses.resolve(network.address, network.port)
            return addresses.for_others(network.address, found, network.interface)
        except OSError as error:
            if network.names_come_late and time.monotonic() < deadline:
                time.sleep(_NAME_SECONDS)
                continue
            waited = f" even after {timeout:g} s" if network.names_come_late else ""
            raise HorovodInternalError(
                f"init: HOROVOD_GLOO_RENDEZVOUS_ADDR={network.address!r} is not known here{waited}: {error.strerror}. "
                f"{network.advice}".rstrip()
            ) from None


def _own_server(rank: Rank, network: Network, where: list[Address]) -> RendezvousServer:
    try:
        listener = addresses.listen_at_one_of(where)
    except OSError as error:
        raise HorovodInternalError(
            f"init: {rank.place} can't listen for the other hosts at {network.address} port {network.port} "
            f"(HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT): {error.strerror}. It must be an address of "
            f"this host and a port that nobody uses. {network.advice}".rstrip()
        ) from None
    return RendezvousServer(listener, rank.host_key, tell=_log.warning, once=True, encryption=rank.encryption)
