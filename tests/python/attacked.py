"""A real job (attacked_job.py) and the test's hand on its stages: at each it is attacked at all that listens.

Every attack is noted together with what the log has to say of it, and at the end the log has to say that, so often.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attacks
from attacks import DOES_NOT_KNOW, NOT_AWAITED, Attack, Attempt
from launching import Launcher
from open_sockets import Listener, is_connected, listeners
from waiting import wait_until

from horovod.common.rendezvous.gate import MAX_STRANGERS
from horovod.common.rendezvous.proof import (
    ANSWER_SIZE,
    MAGIC,
    OPENING_SIZE,
    PROOF_SIZE,
    Claim,
    Key,
    Purpose,
    decode_opening,
)
from horovod.common.rendezvous.server import host_key

OTHER_KEY = Key(b"another key", b"host rendezvous\0another job")
HOST = Claim(Purpose.HOST, 0, 2, 0)
NOBODY = 65534
# From where the attacks come: numbers of addresses, and addresses of those who are many.
_FIRST_SLOW, _FIRST_REPLAY, _MOST_REPLAYS = 30, 40, 6
CROWD, FLOOD = "127.67.0.1", "127.67.0.2"
# Honest ranks give this reason too, so that only the server tells it.
_HUNG_UP = "the connection was closed"
_TURNED_AWAY = re.compile(r"(.*): turned a connection from (.*?) away: (.*)")


def worker(folder: Path, generations: int) -> list[str]:
    """The command of the job's workers."""
    return [sys.executable, str(Path(__file__).with_name("attacked_job.py")), str(folder), str(generations)]


class Target:
    """A running job of two hosts with two ranks each.

    Attributes:
        bomb: The file that pickles would make.
        pids: Of the ranks.
        server: The rendezvous server's socket, once `await_server` has found it.
    """

    def __init__(
        self, folder: Path, size: int, processes: Callable[[], Iterable[int]], check: Callable[[], None]
    ) -> None:
        """Waits until its ranks run.

        Args:
            folder: Of its marks.
            size: How many ranks it has.
            processes: All that belong to it.
            check: Fails if it has ended.
        """
        self._folder, self._processes, self._check = folder, processes, check
        self.bomb = folder / "a pickle was executed"
        started = [json.loads(self.wait(f"started {rank}")) for rank in range(size)]
        self.key: str = started[0][1]
        self.pids = self._find_ranks([pid for pid, _ in started])
        self.same_key_other_job = host_key(self.key.encode(), "another job")
        self.server: Listener | None = None
        self._expected: Counter[tuple[str, str, str]] = Counter()
        self._generation = 1

    # ---- Stages ------------------------------------------------------------------------------------------------------

    def wait(self, name: str) -> str:
        """Waits until the job has come to a point, and returns what it says of it."""

        def has_come() -> bool:
            self._check()
            return (self._folder / name).exists()

        wait_until(has_come, name, 60)
        return (self._folder / name).read_text()

    def release(self, name: str) -> None:
        """Lets it go on."""
        (self._folder / name).touch()

    def await_server(self) -> Listener:
        """Waits until one socket listens, and nobody else."""
        (self.server,) = wait_until(lambda: one if len(one := self.listening()) == 1 else set(), "the server listens")
        return self.server

    def await_listeners(self, ranks: Sequence[int], *, server: bool = True) -> list[Listener]:
        """Waits until exactly these ranks listen, at one socket each, and the server if it is to; all by rank."""
        owners = [self.pids[rank] for rank in ranks]

        def as_wanted() -> list[list[Listener]]:
            self._check()
            now = self.listening()
            others = sorted(now - {self.server}, key=lambda one: self.pids.index(one.pid) if one.pid in owners else -1)
            there = (self.server in now) == (server and self.server is not None)
            return [others] if there and [one.pid for one in others] == owners else []

        try:
            return wait_until(as_wanted, f"ranks {ranks} listen{', and the server' * server}", 40)[0]
        except AssertionError as error:
            raise AssertionError(f"{error}; pids {self.pids}, it listens at {self.listening()}") from None

    def listening(self) -> set[Listener]:
        """Where it listens; rank 2 is left out where a recorder of its does too."""
        recording = self.pids[2] if len(self.pids) > 2 else 0
        return {one for one in self._listeners() if one.pid != recording or one.address[:1] != ("127.0.0.1",)}

    # ---- Attacks -----------------------------------------------------------------------------------------------------

    def quick(self, claim: Claim) -> dict[str, Attack]:
        """Attacks that are turned away at once."""
        return attacks.quick_attacks(claim, OTHER_KEY, self.same_key_other_job, self.bomb)

    def begin(self, listener: Listener, some: Mapping[str, Attack], first: int = 0) -> list[Attempt]:
        """Begins attacks at a socket, and notes what is to be told of them."""
        where = self.name_of(listener)
        begun = attacks.begin(listener, some, self._source_of, first)
        for attempt in begun:
            if attempt.attack.told != _HUNG_UP or listener == self.server:
                self.expect(where, attempt.who, attempt.attack.told)
        return begun

    def strike(self, listener: Listener, some: Mapping[str, Attack], first: int = 0) -> None:
        """Makes attacks at a socket: all are turned away, and learn nothing."""
        attacks.end(self.begin(listener, some, first))

    def strike_all_ways(self, listener: Listener, claim: Claim, replays: Sequence[bytes] = ()) -> None:
        """Makes all attacks that are turned away at once."""
        self.strike(listener, self.quick(claim))
        repeated = {
            f"replay {number}": Attack(attacks.replay(part), DOES_NOT_KNOW, ANSWER_SIZE)
            for number, part in enumerate(replays)
        }
        self.strike(listener, repeated, _FIRST_REPLAY)

    def begin_slowly(self, listener: Listener, claim: Claim) -> list[Attempt]:
        """Begins attacks that are turned away after some seconds: those at several sockets wait together."""
        return self.begin(listener, attacks.slow_attacks(claim), _FIRST_SLOW)

    def expect(self, where: str, who: str, told: str) -> None:
        """Notes what the log has to tell once more."""
        self._expected[where, who, told] += 1

    def check_log(self, err: str) -> None:
        """Whether the log says of each attack from where it came, and what was wrong with it, so often as it came."""
        lines = [match.groups() for match in map(_TURNED_AWAY.fullmatch, err.splitlines()) if match]
        assert self._expected
        wrong = []
        for (where, who, told), count in self._expected.items():
            reasons = [reason for place, peer, reason in lines if (place, peer) == (where, who)]
            if sum(told in reason for reason in reasons) != count:
                wrong.append(f"{where}, {who}: expected {count} times '{told}', found {reasons}")
        assert not wrong, "\n".join([*wrong, err])

    # ---- All at once -------------------------------------------------------------------------------------------------

    def attack_gathering(self, generation: int, *, slowly: bool = False) -> None:
        """Attacks it while the ranks of a host meet: rank 0 waits for rank 1, and the server for their host."""
        self._generation = generation
        (unix,) = self.await_listeners([0])
        assert is_abstract(unix) and self.server is not None
        server = self.server
        wait_until(lambda: all(self._is_connected(rank) for rank in (0, 2)), "both hosts have come to the server")
        slow = self._begin_at_leader(unix, generation, slowly=slowly)
        slow += self.begin_slowly(server, HOST) if slowly else []
        self.strike_all_ways(server, HOST, self._recorded(generation, "rendezvous"))
        attacks.end(slow)
        self.release(f"attacked while gathering {generation}")

    def attack_by_another_user(self, unix: Listener) -> None:
        """Another user of this machine comes to a rank's Unix socket."""
        if os.getuid() != 0:
            return
        sock, who = unix.connect_by_another_process(NOBODY)
        with contextlib.suppress(ConnectionError):
            sock.sendall(MAGIC)
        attacks.end([Attempt("another user", Attack(lambda _sock: None, ""), who, sock)])
        self.expect(self.name_of(unix), who, "it is another user's")

    def attack_linking(self, generation: int, *, slowly: bool = False) -> None:
        """Attacks it while ranks 0 and 1 wait for connections from rank 3."""
        ranks = self.await_listeners([0, 1])
        assert self.server is not None
        replays = self._recorded(generation + 1, "ranks")
        assert len(replays) == 3 * generation  # two for data, one for control
        slow = self.begin_slowly(self.server, HOST) if slowly else []
        for rank, listener in enumerate(ranks):
            data = Claim(Purpose.DATA, generation, 3, rank)
            slow += self.begin_slowly(listener, data) if slowly else []
            self.strike_all_ways(listener, data)
            for number, part in enumerate(replays, _FIRST_REPLAY):
                claimed, _ = decode_opening(part[:OPENING_SIZE])
                is_awaited = (claimed.generation, claimed.receiver) == (generation, rank)
                told, learns = (DOES_NOT_KNOW, ANSWER_SIZE) if is_awaited else (NOT_AWAITED, 0)
                self.strike(listener, {"replay": Attack(attacks.replay(part), told, learns)}, number)
        self.strike_all_ways(self.server, HOST, self._recorded(generation + 1, "rendezvous"))
        attacks.end(slow)
        self.release(f"attacked while linking {generation}")

    def attack_starting(self, generation: int, *, slowly: bool = False) -> list[Attempt]:
        """Attacks it while the engines start: the server waits to hear of rank 3; the slow attacks go on."""
        self.wait(f"starting {generation}")
        assert self.await_listeners([]) == [] and self.server is not None
        slow = self.begin_slowly(self.server, HOST) if slowly else []
        self.strike_all_ways(self.server, HOST, self._recorded(generation + 1, "rendezvous"))
        return slow

    def attack_training(self, generation: int) -> None:
        """Attacks it while it trains, when nobody but the server listens any more, also by a crowd of others."""
        for rank in range(len(self.pids)):
            self.wait(f"met {generation} {rank}")
        assert self.server is not None and self.listening() == {self.server}
        with contextlib.ExitStack() as sockets:
            before = files_of(self.server.pid)
            for _ in range(MAX_STRANGERS + 200):
                sockets.enter_context(self._connect_in_a_crowd(self.server))
            self.strike_all_ways(self.server, HOST, self._recorded(generation + 1, "rendezvous"))
            assert files_of(self.server.pid) <= before + MAX_STRANGERS + 20
        self.release(f"attacked while training {generation}")

    def attack_after_shutdown(self, generation: int) -> None:
        """Attacks it when no rank takes part any more."""
        for rank in range(len(self.pids)):
            self.wait(f"shut down {generation} {rank}")
        assert self.server is not None and self.listening() == {self.server}
        self.strike_all_ways(self.server, HOST, self._recorded(generation + 1, "rendezvous"))

    # ---- What other kinds of jobs do otherwise -----------------------------------------------------------------------

    def name_of(self, listener: Listener) -> str:
        """What the log calls a socket."""
        if listener == self.server:
            return "horovodrun: rendezvous"
        rank = self.pids.index(listener.pid)
        return f"[{rank}]<stderr>:init of rank {rank}"

    def _begin_at_leader(self, unix: Listener, generation: int, *, slowly: bool) -> list[Attempt]:
        local = Claim(Purpose.LOCAL, 0, 1, 0)
        slow = self.begin_slowly(unix, local) if slowly else []
        self.strike_all_ways(unix, local, self._recorded_at_leader(generation))
        self.attack_by_another_user(unix)
        return slow

    def _connect_in_a_crowd(self, listener: Listener) -> socket.socket:
        return listener.connect(CROWD)

    def _find_ranks(self, pids: list[int]) -> list[int]:
        return pids

    def _listeners(self) -> set[Listener]:
        return listeners(self._processes())

    def _is_connected(self, rank: int) -> bool:
        return self.server is not None and is_connected(self.pids[rank], self.server)

    def _source_of(self, number: int) -> str:
        return f"127.66.{self._generation}.{1 + number}"

    def _recorded(self, generation: int, where: str) -> list[bytes]:
        """What rank 2 said in the generation before one, on its connections to the rendezvous or to other ranks."""
        if generation == 1:
            return []
        return _handshakes(json.loads(self.wait(f"recorded {generation - 1}"))[where])[-_MOST_REPLAYS:]

    def _recorded_at_leader(self, generation: int) -> list[bytes]:
        """What rank 1 said to rank 0 in the generation before one."""
        return _handshakes(json.loads(self.wait(f"recorded at the leader {generation - 1}"))) if generation > 1 else []


class LaunchedTarget(Target):
    """One that horovodrun has started on this machine."""

    def __init__(self, launcher: Launcher, folder: Path, size: int = 4) -> None:
        def check() -> None:
            assert launcher.process.poll() is None, launcher.finish_here()

        super().__init__(folder, size, launcher.living, check)


def _handshakes(recorded: list[str]) -> list[bytes]:
    """What an honest one has said from the opening to the proof and beyond; in a flood it may not have come so far."""
    seen = [bytes.fromhex(part) for part in recorded]
    return [part for part in seen if part.startswith(MAGIC) and len(part) > OPENING_SIZE + PROOF_SIZE]


def is_abstract(listener: Listener) -> bool:
    """Whether it is a Unix socket that is no file."""
    return listener.family == socket.AF_UNIX and listener.address[:1] == b"\0"


def files_of(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
