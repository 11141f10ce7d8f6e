"""A job on several machines under attack by one that has no part in it, and what can be seen of the job's key.

The machines are namespaces (machines.py): h1 and h2 have the ranks, h3 has started the job, h4 attacks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import attacks
import psutil
import pytest
from attacked import HOST, OTHER_KEY, Target, worker
from attacks import OTHER_PROTOCOL, Attack, Attempt, drip, flood, say
from machines import Machine, MachineLauncher, Machines, machines
from open_sockets import Listener, is_connected, listeners, network_sockets
from waiting import wait_until

from horovod.common.rendezvous.proof import CHALLENGE_SIZE

JOB = ("-np", "4", "-H", "h1:2,h2:2", "--start-timeout", "100")
# What a probe's answer is: a proof that the host is of the job, good for this challenge only.
PROBE_PROOF_SIZE = 32
STAYS_TOO_LONG = "it has not gone after 5 s"
# From where h4 attacks: the first of its addresses for the server and the ranks, and for the probes of each host.
AT_JOB, AT_PROBES = 100, {"h1": 150, "h2": 200}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Four machines; every test leaves them as they were."""
    with machines(4, tmp_path_factory.mktemp("machines")) as made:
        made["h4"].run("for n in $(seq 100 250); do ip addr add 10.77.0.$n/24 dev eth0; done")
        yield made


def listening_on(*some: Machine) -> set[Listener]:
    """Where anyone listens on machines, but for sshd."""
    found = set()
    for machine in some:
        with machine.network():
            sshd = machine.processes("sshd")
            found |= listeners(pid for pid in machine.processes("") if pid not in sshd)
    return found


class OnMachines(Target):
    """A job of h1 and h2 that h4 attacks."""

    def __init__(self, cluster: Machines, launcher: MachineLauncher, folder: Path) -> None:
        def check() -> None:
            assert launcher.process.poll() is None, launcher.finish_here()

        self._hosts, self._attacker = [cluster["h1"], cluster["h2"], cluster["h3"]], cluster["h4"]
        super().__init__(folder, 4, lambda: [], check)

    def begin(self, listener: Listener, some: Mapping[str, Attack], first: int = 0) -> list[Attempt]:
        """Begins attacks from h4."""
        with self._attacker.network():
            return super().begin(listener, some, first)

    def _find_ranks(self, pids: list[int]) -> list[int]:
        # These are the pids that they have on their machines.
        found = {}
        for machine in self._hosts[:2]:
            for pid in machine.processes("attacked_job.py"):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found.update({int(word[13:]): pid for word in words if word.startswith(b"HOROVOD_RANK=")})
        assert sorted(found) == list(range(len(pids)))
        return [pid for _, pid in sorted(found.items())]

    def _listeners(self) -> set[Listener]:
        return listening_on(*self._hosts)

    def _is_connected(self, rank: int) -> bool:
        assert self.server is not None
        with self._hosts[rank // 2].network():
            return is_connected(self.pids[rank], self.server)

    def _source_of(self, number: int) -> str:
        return f"10.77.0.{AT_JOB + number}"

    def _begin_at_leader(self, unix: Listener, generation: int, *, slowly: bool) -> list[Attempt]:
        return []  # No other machine leads there.

    def _connect_in_a_crowd(self, listener: Listener) -> socket.socket:
        with self._attacker.network():
            return listener.connect()


# ---- What can be seen of the job's processes -------------------------------------------------------------------------


class Seen(NamedTuple):
    """A process, as who looks at it on its machine may see it."""

    host: str
    command: bytes
    environment: bytes


def everyone(cluster: Machines) -> list[Seen]:
    """All processes of all machines."""
    found = []
    for machine in cluster.all:
        for pid in machine.processes(""):
            with contextlib.suppress(OSError):  # It has just ended.
                folder = Path(f"/proc/{pid}")
                found.append(Seen(machine.name, (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()))
    return found


def check_secrecy(seen: list[Seen], key: str) -> None:
    """Whether nobody has the key on the command line, and only workers in the environment."""
    secret = key.encode()
    assert [one for one in seen if secret in one.command] == []
    assert [one for one in seen if secret in one.environment and b"attacked_job.py" not in one.command] == []
    # Those that lead to the hosts were among them.
    programs = [(one.host, one.command.split(b"\0")[0].rpartition(b"/")[2].split(b":")[0]) for one in seen]
    assert programs.count(("h3", b"ssh")) == 2 and {("h1", b"sshd"), ("h2", b"sshd")} <= set(programs)
    agents = [one.host for one in seen if b"horovod.runner.agent" in one.command and b"ssh" not in one.command]
    assert {"h1", "h2"} <= set(agents)


# ---- The probes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held_up(machine: Machine, folder: Path) -> Iterator[Path]:
    """Has a machine be slow in finding out its own addresses: until the file that this gives is there."""
    go_on = folder / "go on"
    copy = folder / "psutil"
    original = Path(psutil.__file__).parent
    shutil.copytree(original, copy)
    with open(copy / "__init__.py", "a") as module:
        module.write(f"\nimport time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n")
    with machine.mounted(str(copy), str(original)):
        yield go_on


def probes_of(machine: Machine) -> list[Listener]:
    """The probes of a host, that of IPv4 first, once both are there."""

    def found() -> list[Listener]:
        now = listening_on(machine)
        assert {one.pid for one in now} <= machine.processes("horovod.runner.agent").keys()
        return sorted(now, key=lambda one: one.family) if len(now) == 2 else []

    return wait_until(found, f"{machine.name} can be probed")


def attack_probes(attacker: Machine, host: Machine, bomb: Path) -> list[Attempt]:
    """Begins attacks from a machine at the probes of a host; the first one only asks, and stays."""
    challenge = bytes(CHALLENGE_SIZE)
    slow = {
        "a challenge": Attack(say(challenge), STAYS_TOO_LONG, PROBE_PROOF_SIZE),
        "silence": Attack(lambda _sock: None, STAYS_TOO_LONG),
        "half a challenge": Attack(say(challenge[1:]), STAYS_TOO_LONG),
        "a byte now and then": Attack(drip(challenge), STAYS_TOO_LONG),
    }
    quick = {
        name: Attack(attack.act, OTHER_PROTOCOL, PROBE_PROOF_SIZE)
        for name, attack in attacks.quick_attacks(HOST, OTHER_KEY, OTHER_KEY, bomb).items()
        if name != "half-closed"  # As a host does that does not wait any longer: not worth a word.
    }
    pickled = {name: quick[name] for name in attacks.pickles(bomb)}
    by_ipv4, by_ipv6 = probes_of(host)
    with attacker.network():
        return [
            *attacks.begin(by_ipv4, {**slow, **quick}, lambda number: f"10.77.0.{AT_PROBES[host.name] + number}"),
            *attacks.begin(by_ipv6, pickled, lambda _number: ""),
        ]


def test_a_job_on_several_machines_under_attack_by_another_goes_on_and_keeps_its_key_for_itself(
    cluster: Machines, tmp_path: Path
) -> None:
    h1, h2, _, h4 = cluster.all
    marks = tmp_path / "marks"
    marks.mkdir()
    bomb = marks / "a pickle was executed"
    seen = {}
    with (
        held_up(h2, tmp_path) as go_on,
        cluster.launch(*JOB, *worker(marks, 1), on="h3", HOROVOD_HEARTBEAT_TIMEOUT_SECONDS="100") as launcher,
        contextlib.ExitStack() as while_probing,
    ):
        # The probes: h1 can be probed and h2 is slow. Then the launcher is, so that the probes of both stay open.
        at_probes = {h1: attack_probes(h4, h1, bomb)}
        os.kill(launcher.supervisor(), signal.SIGSTOP)
        go_on.touch()
        at_probes[h2] = attack_probes(h4, h2, bomb)
        seen["probing"] = everyone(cluster)
        heard = {host: attacks.end(attempts) for host, attempts in at_probes.items()}
        assert [len(of_host[0]) for of_host in heard.values()] == [PROBE_PROOF_SIZE] * 2
        assert heard[h1][0] != heard[h2][0], "what one host answers is of no use for another"
        probe = probes_of(h1)[0]
        with h4.network():
            while_probing.enter_context(flood(probe, ["10.77.0.4"]))
        os.kill(launcher.supervisor(), signal.SIGCONT)
        job = OnMachines(cluster, launcher, marks)
        while_probing.close()
        for host, attempts in at_probes.items():
            for attempt in attempts:
                job.expect(f"horovodrun: probe of host {host.name}", attempt.who, attempt.attack.told)

        # The probes are gone, and what listens is the server of the agent on rank 0's host: of all that h1 to h3 run.
        server = job.await_server()
        assert server.address[:1] == (h1.address,) and server.pid in h1.processes("horovod.runner.agent")
        waiting = job.begin_slowly(server, HOST)
        job.strike_all_ways(server, HOST)
        job.release("attacked before anyone came")
        seen["gathering"] = everyone(cluster)
        job.attack_gathering(1)
        job.attack_linking(1, slowly=True)
        attacks.end(waiting)
        job.attack_starting(1)
        job.release("attacked while starting 1")
        for rank in range(4):
            job.wait(f"met 1 {rank}")
        check_sockets_of_launcher_and_agents(cluster, server)
        seen["training"] = everyone(cluster)
        job.attack_training(1)
        job.attack_after_shutdown(1)
        job.release("attacked after shutdown 1")
        code, out, err = launcher.finish(60)
    cluster.wait_until_nothing_is_left()
    assert code == 0 and all(f"rank {rank} is content" in out for rank in range(4)), err
    assert not bomb.exists()
    job.check_log(err)
    for stage in seen.values():
        check_secrecy(stage, job.key)
    assert any(job.key.encode() in one.environment for one in seen["gathering"]), "workers have it there"
    assert job.key not in out + err


def check_sockets_of_launcher_and_agents(cluster: Machines, server: Listener) -> None:
    """Whether they have no socket of the network, listening or not, but the server's."""
    for machine in cluster.all[:3]:
        with machine.network():
            found = network_sockets(machine.processes("horovod.runner"))
        ssh = machine.processes("ssh")
        own = [one for one in found if one.pid not in ssh]
        assert all(one.pid == server.pid and one.local == server.address for one in own), own
        assert bool(own) == (machine.name == "h1")
