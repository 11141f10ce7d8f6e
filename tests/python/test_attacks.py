"""A real job under attack, at every socket at which it listens, at every stage.

Nothing is executed, the job goes on, and the log says who tried. The published holes of the existing Horovod are the
checklist (docs/security.md says more):

  - CVE-2022-0315, insecure temporary files: there are none here (`test_the_package_makes_no_temporary_files`), and the
    sockets within a host know which user comes (`another_user`).
  - CVE-2024-10190, a port that unpickled what anyone sent to it: nothing is parsed before the key is proved, and
    no message is a pickle (`attacks.pickles`, sent to all of them).
  - CVE-2026-31234: no text of it was at hand when this was written. If it came in through a port it is among the
    attacks, or belongs there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import attacks
import numpy as np
from attacks import Attack, Listener, flood, listeners, source_of, strike, what_was_heard
from launching import Launcher
from ranks import start_ranks, wait_for_mark
from waiting import wait_until

import horovod
import horovod.numpy as hvd
from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.proof import ANSWER_SIZE, MAGIC, Claim, Key, Purpose
from horovod.common.rendezvous.server import host_key

OTHER_KEY = Key(b"another key", b"host rendezvous\0another job")
HOST = Claim(Purpose.HOST, 0, 2, 0)
NOBODY = 65534
# From where the attacks come (attacks.py): numbers of addresses, and addresses of those who are many.
FIRST_SLOW, FIRST_REPLAY = 100, 120
CROWD, FLOOD = "127.67.0.1", "127.67.0.2"


class Target:
    """A running job of two hosts with two ranks each, and the test's hand on its stages."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self.bomb = folder / "a pickle was executed"
        started = [json.loads(self.wait(f"started {rank}")) for rank in range(4)]
        self.pids = [pid for pid, _ in started]
        self.same_key_other_job = host_key(started[0][1].encode(), "another job")

    def wait(self, name: str) -> str:
        """Waits until the job has come to a point, and returns what it says of it."""

        def has_come() -> bool:
            assert self._launcher.process.poll() is None, self._launcher.finish_here()
            return (self._folder / name).exists()

        wait_until(has_come, name, 40)
        return (self._folder / name).read_text()

    def release(self, name: str) -> None:
        (self._folder / name).touch()

    def listening(self) -> set[Listener]:
        """Where it listens; rank 2 is left out, whose recorder does too."""
        return {one for one in listeners(self._launcher.living()) if one.pid != self.pids[2]}

    def await_listeners(self, *owners: int) -> list[Listener]:
        """Waits until exactly these processes listen, once each."""
        return sorted(
            wait_until(
                lambda: [one for one in [self.listening()] if sorted(x.pid for x in one) == sorted(owners)],
                f"{owners} listen",
            )[0],
            key=lambda one: owners.index(one.pid),
        )

    def quick(self, claim: Claim) -> dict[str, Attack]:
        return attacks.quick_attacks(claim, OTHER_KEY, self.same_key_other_job, self.bomb)

    def recorded(self, generation: int, where: str) -> list[bytes]:
        """What rank 2 said on its connections to the rendezvous, or to other ranks."""
        seen = [bytes.fromhex(part) for part in json.loads(self.wait(f"recorded {generation}"))[where]]
        return [part for part in seen if part.startswith(MAGIC)]


def another_user(listener: Listener) -> bytes:
    """What another user of this machine hears at a socket."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(NOBODY)
            with listener.connect() as sock:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(MAGIC)
                os.write(write_end, b"heard: " + what_was_heard(sock, 5))
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with open(read_end, "rb") as heard:
        return heard.read()


def strike_all(job: Target, generation: int, server: Listener, supervisor: int) -> None:
    """Attacks the job at all stages of a generation."""
    local = Claim(Purpose.LOCAL, 0, 1, 0)
    # Ranks meet; rank 0 waits for rank 1.
    _, unix = job.await_listeners(supervisor, job.pids[0])
    assert unix.family == socket.AF_UNIX
    strike(unix, list(job.quick(local).values()))
    if os.getuid() == 0:
        assert another_user(unix) == b"heard: "
    job.release(f"attacked while gathering {generation}")

    # Ranks 0 and 1 wait for connections from rank 3.
    _, *ranks = job.await_listeners(supervisor, job.pids[0], job.pids[1])
    replays = [Attack(attacks.replay(recorded), "") for recorded in job.recorded(1, "ranks")]
    assert len(replays) == 3  # two for data, one for control
    for rank, listener in enumerate(ranks):
        strike(listener, list(job.quick(Claim(Purpose.DATA, generation, 3, rank)).values()))
        strike(listener, replays, FIRST_REPLAY)
    job.release(f"attacked while linking {generation}")

    # Training: nobody but the server listens any more.
    for rank in range(4):
        job.wait(f"met {generation} {rank}")
    assert job.listening() == {server}
    (recorded,) = job.recorded(1, "rendezvous")
    strike(server, [Attack(attacks.replay(recorded), "")], FIRST_REPLAY)
    with contextlib.ExitStack() as sockets:
        before = files_of(supervisor)
        for _ in range(MAX_STRANGERS + 200):
            sockets.enter_context(server.connect(CROWD))
        strike(server, list(job.quick(HOST).values()))
        assert files_of(supervisor) <= before + MAX_STRANGERS + 20
    job.release(f"attacked while training {generation}")

    for rank in range(4):
        job.wait(f"shut down {generation} {rank}")
    assert job.listening() == {server}
    strike(server, list(job.quick(HOST).values()))


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def check_log(err: str, quick: dict[str, Attack], slow: dict[str, Attack]) -> None:
    """Whether the log says of each attack from where it came, and what was wrong with it."""

    def has(where: str, number: int, told: str) -> bool:
        start = f"{where}: turned a connection from {source_of(number)} away: "
        return any(start in line and told in line.partition(start)[2] for line in err.splitlines())

    for first, some in ((0, quick), (FIRST_SLOW, slow)):
        for number, (name, attack) in enumerate(some.items(), first):
            assert has("horovodrun: rendezvous", number, attack.told), f"{name}: {err}"
    assert has("horovodrun: rendezvous", FIRST_REPLAY, attacks.DOES_NOT_KNOW), err
    for rank in (0, 1):
        where = f"[{rank}]<stderr>:init of rank {rank}"
        for number, (name, attack) in enumerate(quick.items()):
            # One that only hangs up may be a rank that gives up.
            assert has(where, number, attack.told) == (name != "half-closed"), f"rank {rank}, {name}: {err}"
        replays = range(FIRST_REPLAY, FIRST_REPLAY + 3)
        assert any(has(where, number, attacks.DOES_NOT_KNOW) for number in replays), err
        assert all(has(where, number, "which is not awaited") for number in replays), err
    here = f"[0]<stderr>:init of rank 0: turned a connection from pid {os.getpid()}, uid {os.getuid()} away: "
    assert here + attacks.OTHER_PROTOCOL in err and here + attacks.DOES_NOT_KNOW in err
    if os.getuid() == 0:
        assert f", uid {NOBODY} away: it is another user's" in err
    assert f"turned a connection from {CROWD} away: it proved nothing, and too many others came" in err


def test_a_job_under_attack_at_every_port_and_stage_goes_on_and_tells_who_tried(tmp_path: Path) -> None:
    worker = [sys.executable, str(Path(__file__).with_name("attacked_job.py")), str(tmp_path)]
    with (
        contextlib.ExitStack() as held,
        Launcher("-np", "4", "-H", "localhost:2,127.0.0.2:2", *worker) as launcher,
    ):
        job = Target(launcher, tmp_path)
        supervisor = launcher.supervisor()
        # Before the first rank came.
        (server,) = job.await_listeners(supervisor)
        quick, slow = job.quick(HOST), attacks.slow_attacks(HOST)
        waiting = [held.enter_context(server.connect(source_of(FIRST_SLOW + number))) for number in range(len(slow))]
        for sock, attack in zip(waiting, slow.values(), strict=True):
            attack(sock)
        strike(server, list(quick.values()))
        job.release("attacked before anyone came")

        strike_all(job, 1, server, supervisor)
        for sock in waiting:
            assert len(what_was_heard(sock, 6)) <= ANSWER_SIZE
        memory = resident_bytes(supervisor)
        # Again, with a flood, from elsewhere and from where the ranks are, while the hosts meet.
        with flood(server, [FLOOD, "127.0.0.1"]):
            wait_until(lambda: files_of(supervisor) > MAX_STRANGERS, "the flood has come")
            job.release("attacked after shutdown 1")
            strike_all(job, 2, server, supervisor)
        assert resident_bytes(supervisor) < memory + (20 << 20)
        job.release("attacked after shutdown 2")
        code, out, err = launcher.finish()
    assert code == 0, err
    assert all(f"rank {rank} is content" in out for rank in range(4)), err
    assert not job.bomb.exists()
    check_log(err, quick, slow)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- Where rank 0 serves ---------------------------------------------------------------------------------------------


def meet_at_rank_0() -> float:
    if os.environ["HOROVOD_RANK"] == "1":
        wait_for_mark("attacked")
    hvd.init()
    return float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


def test_the_server_of_rank_0_stands_the_same_attacks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"HOROVOD_RENDEZVOUS_SERVER": "rank0", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    with start_ranks(2, meet_at_rank_0, env=env, hosts=[1, 1]) as group:
        pid = group.processes[0].pid
        (server,) = wait_until(lambda: listeners([pid]), "rank 0 listens")
        assert server.address == ("127.0.0.1", port)
        bomb = tmp_path / "a pickle was executed"
        quick = attacks.quick_attacks(HOST, OTHER_KEY, host_key(group.key.encode(), "another job"), bomb)
        strike(server, list(quick.values()))
        (group.folder / "attacked").touch()
        outcomes = group.wait()
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0], group.describe()
    assert not bomb.exists()
    for number, attack in enumerate(quick.values()):
        assert f"rendezvous: turned a connection from {source_of(number)} away: " in outcomes[0].stderr
        assert attack.told in outcomes[0].stderr


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_the_package_makes_no_temporary_files() -> None:
    """What does not exist can't be taken first by another user (CVE-2022-0315)."""
    sources = [path for path in Path(horovod.__file__).parent.rglob("*.py") if "site-packages/horovod" in str(path)]
    assert len(sources) > 50
    for path in sources:
        words = path.read_text()
        assert "tempfile" not in words and "mktemp" not in words and '"/tmp' not in words, path
