"""How ranks of several hosts meet: what they get, and what everyone is told when it fails."""

import os
import re
import select
import socket
from collections.abc import Sequence

import numpy as np
import pytest
from ranks import mark, run_ranks, wait_for_mark

import horovod.numpy as hvd
from horovod.common.environment import read_identity, read_network, read_tunables
from horovod.common.rendezvous.meeting import meet
from horovod.common.rendezvous.tree import FANOUT
from horovod.common.rendezvous.wiring import Wiring

LAYOUTS = [[1, 1], [2, 2], [3, 1], [1, 2], [1, 1, 1], [2, 1, 2], [1, 2, 1, 1], [2, 2, 2, 2]]
# So many that some get the table from others (tree.py).
LAYOUTS.append([2] + [1] * FANOUT)


def exchange(fds: Sequence[int], text: bytes) -> list[bytes]:
    """Sends a text on every connection and returns what came on each."""
    for fd in fds:
        os.write(fd, text)
    received = [b""] * len(fds)
    for index, fd in enumerate(fds):
        while not received[index].endswith(b"."):
            assert select.select([fd], [], [], 20)[0], f"nothing came on connection {index}"
            received[index] += os.read(fd, 100)
    return received


def talk(wiring: Wiring) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Says the own rank on every link and control, and returns what the others said, by rank and by host."""
    rank = os.environ["HOROVOD_RANK"]
    links = {peer: fd for peer, fd in enumerate(wiring.links) if fd >= 0}
    controls = {host: fd for host, fd in enumerate(wiring.controls) if fd >= 0}
    heard = exchange([*links.values(), *controls.values()], f"rank {rank}.".encode())
    return dict(zip(links, heard, strict=False)), dict(zip(controls, heard[len(links) :], strict=True))


def meet_and_talk() -> tuple[object, ...]:
    with meet(read_identity(), read_network(), read_tunables(), [], 6) as meeting:
        wiring = meeting.wiring
        for fd in (*wiring.links, *wiring.controls):
            if fd >= 0:
                assert not os.get_inheritable(fd)
                with socket.socket(fileno=os.dup(fd)) as sock:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        heard = talk(wiring)
        meeting.confirm()
        table = wiring.table
        return table.hosts, table.host_of, table.pids, table.generation, heard, os.getpid()


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_every_rank_is_connected_to_those_of_other_hosts(hosts: list[int]) -> None:
    results = run_ranks(sum(hosts), meet_and_talk, hosts=hosts)
    host_of = [host for host, count in enumerate(hosts) for _ in range(count)]
    leaders = [host_of.index(host) for host in range(len(hosts))]
    for rank, (names, its_host_of, pids, generation, (links, controls), _) in enumerate(results):
        assert names == [f"testhost{host}" for host in range(len(hosts))]
        assert its_host_of == host_of
        assert pids == [result[5] for result in results]
        assert generation == 7
        others = [peer for peer in range(sum(hosts)) if host_of[peer] != host_of[rank]]
        assert links == {peer: f"rank {peer}.".encode() for peer in others}
        if rank == 0:
            assert controls == {host: f"rank {leaders[host]}.".encode() for host in range(1, len(hosts))}
        elif rank in leaders:
            assert controls == {0: b"rank 0."}
        else:
            assert controls == {}


def init_and_add() -> float:
    hvd.init()
    assert hvd.is_homogeneous() == (os.environ["HOMOGENEOUS"] == "1")
    return float(hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum)[999])


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [3, 1], [1, 3, 2]], ids=str)
def test_their_engines_run_together(hosts: list[int]) -> None:
    size = sum(hosts)
    env = {"HOMOGENEOUS": str(int(len(set(hosts)) == 1))}
    assert run_ranks(size, init_and_add, hosts=hosts, env=env) == [size * (size + 1) / 2] * size


# ---- Ranks that come when all is over --------------------------------------------------------------------------------


def init_with_another_size(wrong: int, late: int) -> str:
    """One rank has another idea of the job's size; another one comes when the others know that."""
    rank = int(os.environ["HOROVOD_RANK"])
    if rank == wrong:
        if os.environ["HOROVOD_LOCAL_SIZE"] == os.environ["HOROVOD_SIZE"]:
            os.environ["HOROVOD_LOCAL_SIZE"] = "9"
        os.environ["HOROVOD_SIZE"] = "9"
    if rank == late:
        wait_for_mark("failed")
    with pytest.raises(ValueError, match="HOROVOD_SIZE") as caught:
        hvd.init()
    mark("failed")
    return str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "wrong", "late"),
    [([3], 1, 2), ([1, 2], 1, 2)],
    ids=["sent away by the leader", "whose leader was sent away by the server"],
)
def test_a_follower_that_comes_late_is_told_why_its_leader_gave_up(hosts: list[int], wrong: int, late: int) -> None:
    texts = run_ranks(3, init_with_another_size, wrong, late, hosts=hosts)
    assert len(set(texts)) == 1
    assert re.search(f"HOROVOD_SIZE is .*9 on rank {wrong} ", texts[late])
