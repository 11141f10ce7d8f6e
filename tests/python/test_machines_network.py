"""Networks between machines that are slow, lossy, or gone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import script
from machines import SHARED_ADDRESS, Machines, machines
from test_machines_trouble import ONE_SCREEN
from waiting import wait_until

# Many small operations and a large one, so that something is always under way; a file tells how far it has come.
TRAIN = script(
    """
    import numpy as np
    import horovod.numpy as hvd
    hvd.init()
    steps = int(os.environ["STEPS"])
    for step in range(steps):
        small = hvd.allreduce(np.full(10, float(step)), op=hvd.Sum, name="small")
        assert (small == step * hvd.size()).all()
        large = hvd.allreduce(np.full(100_000, rank + 1.0), op=hvd.Sum, name="large")
        assert (large == hvd.size() * (hvd.size() + 1) / 2).all()
        if rank == 0: open(os.environ["PROGRESS"], "w").write(str(step))
        time.sleep(float(os.environ.get("PAUSE", "0")))
    hvd.barrier()
    print("done", rank)
    """
)
HOSTS = ["-np", "4", "-H", "h1:2,h2:2"]
DONE = [f"[{rank}]<stdout>:done {rank}" for rank in range(4)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines; every test leaves them as they were."""
    with machines(2, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three of them."""
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


def settings(tmp_path: Path, steps: int, pause: float = 0.0) -> dict[str, Any]:
    return {"STEPS": str(steps), "PAUSE": str(pause), "PROGRESS": str(tmp_path / "progress")}


def wait_for_progress(tmp_path: Path, beyond: int = -1) -> int:
    def steps() -> int:
        path = tmp_path / "progress"
        text = path.read_text() if path.exists() else ""
        return int(text) + 1 if text and int(text) > beyond else 0

    return wait_until(steps, f"a step beyond {beyond}", 40) - 1


def assert_told(err: str, what: str) -> None:
    """The launcher tells the loss of h2 on one screen: host, ranks, what happened and where to look."""
    own = [line for line in err.splitlines() if not re.match(r"\[\d+\]<", line)]
    assert len(own) <= ONE_SCREEN, err
    assert own[0].startswith(f"horovodrun: lost host h2 (ranks 2-3): {what}"), err


def test_a_slow_link(cluster: Machines, tmp_path: Path) -> None:
    cluster["h2"].run("tc qdisc add dev eth0 root tbf rate 20mbit burst 32kb latency 200ms")
    try:
        code, out, err = cluster.horovodrun(*HOSTS, *TRAIN, **settings(tmp_path, 3))
        shaped = cluster["h2"].run("tc -s qdisc show dev eth0")
    finally:
        cluster["h2"].run("tc qdisc del dev eth0 root")
    assert code == 0, err
    assert sorted(out.splitlines()) == DONE
    # The large sums of three steps went that way, and had to wait there.
    sent, waited = map(int, re.findall(r"Sent (\d+) bytes .* overlimits (\d+)", shaped)[0])
    assert sent > 3 * 800_000 and waited > 0, shaped


def test_packets_that_are_lost(cluster: Machines, tmp_path: Path) -> None:
    with cluster["h2"].filtered("numgen random mod 100 lt 3 counter drop"):
        code, out, err = cluster.horovodrun(*HOSTS, *TRAIN, **settings(tmp_path, 8), seconds=100)
        assert cluster["h2"].counted() > 0, "nothing was lost"
    assert code == 0, err
    assert sorted(out.splitlines()) == DONE


def test_packets_that_are_late(tmp_path: Path) -> None:
    with machines(2, tmp_path, delays={"h2": 0.05}) as cluster:
        connect = "import socket, time; t = time.monotonic(); "
        connect += "socket.create_connection(('h2', 22)); print(time.monotonic() - t)"
        assert float(cluster["h1"].run(f'{sys.executable} -c "{connect}"')) > 0.1
        code, out, err = cluster.horovodrun(*HOSTS, *TRAIN, **settings(tmp_path, 5), seconds=100)
    assert code == 0, err
    assert sorted(out.splitlines()) == DONE


def test_a_link_that_is_down_for_two_seconds(cluster: Machines, tmp_path: Path) -> None:
    with cluster.launch(*HOSTS, *TRAIN, **settings(tmp_path, 30, 0.1)) as launcher:
        wait_for_progress(tmp_path, 3)
        cluster.cut(cluster["h2"])
        before = wait_for_progress(tmp_path)
        time.sleep(2)
        assert wait_for_progress(tmp_path) <= before + 1, "without the link nothing can go on"
        cluster.mend(cluster["h2"])
        code, out, err = launcher.finish(100)
    assert code == 0, err
    assert sorted(out.splitlines()) == DONE


def test_a_link_that_is_down_for_good(cluster: Machines, tmp_path: Path) -> None:
    environment = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "3", "HOROVOD_GRACE_SECONDS": "1"}
    with cluster.launch(*HOSTS, *TRAIN, **settings(tmp_path, 10_000, 0.1), **environment) as launcher:
        wait_for_progress(tmp_path, 3)
        cluster.cut(cluster["h2"])
        try:
            code, _, err = launcher.finish_here(60)
            # The agent of h2 hears nothing either, and ends its workers by itself.
            launcher.wait_until_nothing_is_left()
            cluster.wait_until_nothing_is_left()
        finally:
            cluster.mend(cluster["h2"])
    assert code == 1, err
    assert_told(err, "nothing was heard from it for 3 s. Is it up, and the network between?")


@pytest.mark.parametrize(
    ("rules", "hosts", "between"),
    [
        # Both reach h1, where rank 0 is and which hears both, but not each other.
        (["ip saddr 10.77.0.2 counter drop"], "h1:2,h2:2,h3:2", "[23]"),
        # Whatever is small passes: probes, handshakes, heartbeats. So it is where the cable's packets are too large for
        # what lies between, and nobody says so.
        (["meta length 601-65535 counter drop"], "h1:2,h3:2", "[13]"),
    ],
)
def test_a_path_that_swallows_what_is_sent_is_told_by_those_at_its_ends(
    three: Machines, tmp_path: Path, rules: list[str], hosts: str, between: str
) -> None:
    environment = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "3", "HOROVOD_GRACE_SECONDS": "1"}
    count = str(2 * len(hosts.split(",")))
    arguments = ["-np", count, "-H", hosts, *TRAIN]
    with three.launch(*arguments, **settings(tmp_path, 10_000, 0.1), **environment) as launcher:
        wait_for_progress(tmp_path, 3)
        with three["h3"].filtered(*rules):
            code, _, err = launcher.finish(60)
            assert three["h3"].counted() > 0
    assert code == 1, err
    told = rf"connection with rank \d \(pid \d+ on host h{between}\) was lost \(for 3 s its host has confirmed none of "
    assert re.search(told, err), err
    three.wait_until_nothing_is_left()


def test_a_machine_that_is_switched_off(tmp_path: Path) -> None:
    with machines(2, tmp_path) as cluster:
        environment = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "3", "HOROVOD_GRACE_SECONDS": "1"}
        with cluster.launch(*HOSTS, *TRAIN, **settings(tmp_path, 10_000, 0.1), **environment) as launcher:
            wait_for_progress(tmp_path, 3)
            cluster["h2"].power_off()
            code, _, err = launcher.finish(60)
        assert code == 1, err
        assert_told(err, "the connection to it ended: ssh ended with exit code 255. Has h2 gone down, or was")


WHERE = script(
    """
    import psutil
    import horovod.numpy as hvd
    hvd.init()
    hvd.allreduce([1.0])
    connections = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    used = sorted({c.laddr.ip for c in connections} | {c.raddr.ip for c in connections})
    print(rank, os.environ["HOROVOD_HOST_ADDRESS"], os.environ["HOROVOD_GLOO_IFACE"], *used)
    hvd.barrier()
    """
)


def test_of_several_networks_the_one_that_was_chosen_or_that_works_is_used(tmp_path: Path) -> None:
    """All hosts have the same address at docker0: each reaches itself there, and nobody else."""

    def places(*options: str) -> list[list[str]]:
        code, out, err = pair.horovodrun("-np", "2", "-H", "h1,h2", *options, *WHERE)
        assert code == 0, err
        return [line.partition(":")[2].split()[1:] for line in sorted(out.splitlines())]

    with machines(2, tmp_path, two_networks=True) as pair:
        second = ["10.78.0.1", "10.78.0.2"]
        by_second = [[address, "eth1", *second] for address in second]
        assert places("--network-interfaces", "eth1") == by_second
        assert places("--network-interfaces", "docker0,eth1") == by_second
        # Nobody listens on h2 to what comes by the network that ssh takes.
        with pair["h2"].filtered("tcp dport 22 accept", "ct state established accept", "meta l4proto tcp reject"):
            found = places()
        assert found[1][:2] == ["10.78.0.2", "eth1"]
        assert not [place for place in [*found, *places()] if SHARED_ADDRESS in place]
        code, _, err = pair.horovodrun("-np", "2", "-H", "h1,h2", "--network-interfaces", "docker0", *WHERE)
        assert code == 1
        assert f"  h2 can't be reached by all others:\n    at {SHARED_ADDRESS} (docker0) from h1: " in err
