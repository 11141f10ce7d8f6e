"""Real jobs under attack, at every socket at which they listen, at every stage.

Nothing is executed, the job goes on, and the log says who tried. The published holes of the existing Horovod are the
checklist (docs/security.md says more):

  - CVE-2022-0315, insecure temporary files: there are none here (`test_the_package_makes_no_temporary_files`), and the
    sockets within a host know which user comes (`Target.attack_by_another_user`).
  - CVE-2024-10190, a port that unpickled what anyone sent to it: nothing is parsed before the key is proved, and
    no message is a pickle (`attacks.pickles`, sent to all of them).
  - CVE-2026-31234: no text of it was at hand when this was written. If it came in through a port it is among the
    attacks, or belongs there.

test_attacks_machines.py has the ports that only a job on several machines opens.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import attacked_job
import attacks
from attacked import CROWD, FLOOD, HOST, LaunchedTarget, Target, is_abstract, worker
from attacks import flood
from launching import Launcher
from open_sockets import Listener, listeners, network_sockets
from ranks import Group, start_ranks
from waiting import wait_until

import horovod

TWO_HOSTS = ("-np", "4", "-H", "localhost:2,127.0.0.2:2")


def test_a_job_under_attack_at_every_port_and_stage_goes_on_and_tells_who_tried(tmp_path: Path) -> None:
    with Launcher(*TWO_HOSTS, *worker(tmp_path, 2), HOROVOD_START_TIMEOUT="60") as launcher:
        job = LaunchedTarget(launcher, tmp_path)
        server = job.await_server()
        assert server.pid == launcher.supervisor()
        # Before the first rank comes: who is slow then is not gone when they meet.
        waiting = job.begin_slowly(server, HOST)
        job.strike_all_ways(server, HOST)
        job.release("attacked before anyone came")

        job.attack_gathering(1, slowly=True)
        attacks.end(waiting)
        job.attack_linking(1, slowly=True)
        waiting = job.attack_starting(1, slowly=True)
        job.release("attacked while starting 1")
        job.attack_training(1)
        job.attack_after_shutdown(1)
        attacks.end(waiting)

        memory = resident_bytes(server.pid)
        # Again, with a flood, from elsewhere and from where the ranks are, while the hosts meet.
        with flood(server, [FLOOD, "127.0.0.1"]):
            job.release("attacked after shutdown 1")
            job.attack_gathering(2)
            job.attack_linking(2)
            job.attack_starting(2)
            job.release("attacked while starting 2")
            job.attack_training(2)
            job.attack_after_shutdown(2)
        assert resident_bytes(server.pid) < memory + (20 << 20)
        job.release("attacked after shutdown 2")
        code, out, err = launcher.finish()
    assert code == 0, err
    assert all(f"rank {rank} is content" in out for rank in range(4)), err
    assert not job.bomb.exists()
    job.check_log(err)
    assert f"turned a connection from {CROWD} away: it proved nothing, and too many others came" in err
    assert re.search(rf"turned a connection from {FLOOD} away: .* \(number 100 from there\)", err)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- Where rank 0 serves ---------------------------------------------------------------------------------------------


class OfRank0(Target):
    """One that nobody has launched: its server is in rank 0, and listens during init only."""

    def __init__(self, group: Group, port: int) -> None:
        def check() -> None:
            assert all(process.poll() is None for process in group.processes), group.describe()

        super().__init__(group.folder, 4, lambda: [process.pid for process in group.processes], check)
        self.server = Listener(self.pids[0], socket.AF_INET, ("127.0.0.1", port))

    def name_of(self, listener: Listener) -> str:
        """What the log calls a socket."""
        return "rendezvous" if listener == self.server else f"init of rank {self.pids.index(listener.pid)}"

    def attack_meeting(self, generation: int, *, slowly: bool) -> None:
        """Attacks it at all stages of a generation in which something listens; at the others nothing does."""
        server = self.server
        assert server is not None
        wait_until(lambda: server in self.listening(), "rank 0 listens")
        # Those who are slow come at each stage, and all have gone before the last one ends.
        slow = self.begin_slowly(server, HOST) if slowly else []
        self.attack_gathering(generation)
        slow += self.begin_slowly(server, HOST) if slowly else []
        self.attack_linking(generation)
        attacks.end([*slow, *self.attack_starting(generation, slowly=slowly)])
        self.release(f"attacked while starting {generation}")
        for rank in range(4):
            self.wait(f"met {generation} {rank}")
        self.await_listeners([], server=False)
        self.release(f"attacked while training {generation}")
        for rank in range(4):
            self.wait(f"shut down {generation} {rank}")
        assert self.listening() == set()


def test_the_server_of_rank_0_stands_the_same_attacks() -> None:
    env = {"HOROVOD_RENDEZVOUS_SERVER": "rank0", "HOROVOD_START_TIMEOUT": "60"}
    with contextlib.ExitStack() as resources:
        # As long as this one has the port nobody else gets it; who means it and listens there does.
        reserved = resources.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        group = resources.enter_context(start_ranks(4, attacked_job.main, 2, env=env, hosts=[2, 2]))
        job = OfRank0(group, port)
        assert job.server is not None and job.listening() == set()
        job.release("attacked before anyone came")
        job.attack_meeting(1, slowly=True)
        job.release("attacked after shutdown 1")
        # The server is another one each time; before it listens a flood could only take its port away.
        wait_until(lambda: job.server in job.listening(), "rank 0 listens again")
        with flood(job.server, [FLOOD, "127.0.0.1"]):
            job.attack_meeting(2, slowly=False)
        job.release("attacked after shutdown 2")
        outcomes = group.wait()
        assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3], group.describe()
    assert not job.bomb.exists()
    err = "\n".join(outcome.stderr for outcome in outcomes)
    job.check_log(err)
    assert re.search(rf"turned a connection from {FLOOD} away: .* \(number 100 from there\)", err)


# ---- horovod.run -----------------------------------------------------------------------------------------------------


class RunLauncher(Launcher):
    """A running program that has called horovod.run for the job under attack."""

    def __init__(self, folder: Path, hosts: str) -> None:
        call = f"horovod.run(attacked_job.run_in, ({str(folder)!r}, 1), num_proc=4, hosts={hosts!r}, start_timeout=60)"
        program = f"import attacked_job, horovod; print('values', {call})"
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        self._start([sys.executable, "-P", "-c", program], {"PYTHONPATH": path})


def test_no_port_takes_the_pickles_that_horovod_run_sends_by_other_ways(tmp_path: Path) -> None:
    """Its function and what that returns are pickles, and go through ssh and pipes."""
    with RunLauncher(tmp_path, TWO_HOSTS[-1]) as launcher:
        job = LaunchedTarget(launcher, tmp_path)
        server = job.await_server()
        job.strike_all_ways(server, HOST)
        job.release("attacked before anyone came")
        job.attack_gathering(1)
        job.attack_linking(1)
        job.attack_starting(1)
        job.release("attacked while starting 1")
        job.attack_training(1)
        job.attack_after_shutdown(1)
        job.release("attacked after shutdown 1")
        code, out, err = launcher.finish()
    assert code == 0 and "values [0, 1, 2, 3]\n" in out, err
    assert not job.bomb.exists()
    job.check_log(err)


# ---- Nothing to attack -----------------------------------------------------------------------------------------------


def test_a_job_of_one_host_has_no_network_socket_and_keeps_other_users_out(tmp_path: Path) -> None:
    with Launcher("-np", "2", *worker(tmp_path, 1)) as launcher:

        def sockets() -> set[Listener]:
            """Where it listens, when it has no socket of the network in any state."""
            processes = launcher.living()
            assert len(processes) == 4  # horovodrun, its supervisor, the ranks
            assert network_sockets(processes) == []
            return listeners(processes)

        job = LaunchedTarget(launcher, tmp_path, 2)
        assert sockets() == set()
        job.release("attacked before anyone came")
        (unix,) = wait_until(sockets, "rank 0 listens for rank 1")
        assert is_abstract(unix) and unix.pid == job.pids[0]
        job.attack_by_another_user(unix)
        job.release("attacked while gathering 1")
        job.wait("starting 1")
        assert sockets() == set()
        job.release("attacked while starting 1")
        for name, then in (("met", "while training"), ("shut down", "after shutdown")):
            for rank in range(2):
                job.wait(f"{name} 1 {rank}")
            assert sockets() == set()
            job.release(f"attacked {then} 1")
        code, out, err = launcher.finish()
    assert code == 0 and all(f"rank {rank} is content" in out for rank in range(2)), err
    if os.getuid() == 0:
        job.check_log(err)


def test_the_package_makes_no_temporary_files() -> None:
    """What does not exist can't be taken first by another user (CVE-2022-0315)."""
    sources = [path for path in Path(horovod.__file__).parent.rglob("*.py") if "site-packages/horovod" in str(path)]
    assert len(sources) > 50
    for path in sources:
        words = path.read_text()
        assert "tempfile" not in words and "mktemp" not in words and '"/tmp' not in words, path
