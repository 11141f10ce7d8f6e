"""Whatever goes wrong while several hosts meet, nobody waits for ever, and all are told the same."""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Outcome, mark, run_ranks, start_ranks, wait_for_mark

from horovod import _core
from horovod.common.environment import read_identity, read_network, read_tunables
from horovod.common.exceptions import HorovodInternalError
from horovod.common.rendezvous.connection import Connection
from horovod.common.rendezvous.meeting import meet
from horovod.common.rendezvous.messages import Kind

SHORT = {"HOROVOD_START_TIMEOUT": "3"}


def own_rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def try_to_meet(process_sets: list[list[int]] | None = None, trouble: Exception | None = None) -> str:
    """One attempt, without engines: its error, or "" for none. No descriptor may be left."""
    _core.arena_fd()  # the process's own memory, which stays
    before = open_files()
    text = ""
    try:
        with meet(read_identity(), read_network(), read_tunables(), process_sets or [], 0) as meeting:
            if trouble is not None:
                raise trouble
            meeting.confirm()
    except (ValueError, HorovodInternalError) as error:
        text = f"{type(error).__name__}: {error}"
    assert open_files() == before, "descriptors were left open"
    return text


# ---- Death at every moment -------------------------------------------------------------------------------------------


def die_at(moment: str) -> None:
    """Has this process killed at a moment such as "before saying LINKED", "after saying REPORT" or "hearing GO"."""
    when, kind = moment.rsplit(" ", 1)
    fatal = Kind[kind]
    say, frame = Connection.say, Connection._frame

    def die() -> None:
        for rank in range(int(os.environ["HOROVOD_SIZE"])):  # who comes later takes no part in this attempt
            if rank != own_rank():
                wait_for_mark(f"rank {rank} was accepted")
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_say(self: Connection, kind: Kind, body: bytes = b"") -> None:
        if when == "before saying" and kind is fatal:
            die()
        say(self, kind, body)
        if when == "after saying" and kind is fatal:
            die()

    def dying_frame(self: Connection, kind: Kind, body: bytes) -> None:
        if when == "hearing" and kind is fatal:
            die()
        frame(self, kind, body)

    Connection.say = dying_say  # type: ignore[method-assign]
    Connection._frame = dying_frame  # type: ignore[method-assign]


def mark_when_accepted() -> None:
    frame = Connection._frame

    def marking_frame(self: Connection, kind: Kind, body: bytes) -> None:
        if kind is Kind.ACCEPTED:
            mark(f"rank {own_rank()} was accepted")
        frame(self, kind, body)

    Connection._frame = marking_frame  # type: ignore[method-assign]


def meet_with_a_victim(victim: int, moment: str) -> str:
    if own_rank() == victim:
        die_at(moment)
    else:
        mark_when_accepted()
    return try_to_meet()


LEADER = [
    "before saying REPORT", "after saying REPORT", "hearing TABLE", "hearing READY", "before saying LINKED",
    "after saying LINKED", "hearing GO", "before saying STARTED",
]  # fmt: skip
FOLLOWER = ["hearing ACCEPTED", "hearing WIRING", "before saying LINKED", "hearing GO"]


@pytest.mark.parametrize(
    ("victim", "moment"),
    [(0, moment) for moment in LEADER[1::2]]
    + [(2, moment) for moment in LEADER]
    + [(3, moment) for moment in FOLLOWER],
)
def test_a_rank_that_dies_ends_the_attempt_for_all_with_one_reason(victim: int, moment: str) -> None:
    with start_ranks(4, meet_with_a_victim, victim, moment, hosts=[2, 2]) as group:
        survivors = [rank for rank in range(4) if rank != victim]
        outcomes = group.wait(25, ranks=survivors)
        told = {outcome.value for outcome in outcomes}
        assert all(outcome.finished for outcome in outcomes), group.describe()
        assert len(told) == 1, group.describe()
        (text,) = told
        place = f"rank {victim} (local rank {victim % 2} of 2 on host testhost{victim // 2})"
        assert f"{place}, pid {group.processes[victim].pid}" in text, group.describe()
        assert "died" in text


@pytest.mark.parametrize(("victim", "moment"), [(0, "after saying STARTED"), (2, "hearing DONE"), (3, "hearing DONE")])
def test_a_death_at_the_very_end_lets_nobody_wait(victim: int, moment: str) -> None:
    with start_ranks(4, meet_with_a_victim, victim, moment, hosts=[2, 2]) as group:
        outcomes = group.wait(25, ranks=[rank for rank in range(4) if rank != victim])
        assert all(outcome.finished for outcome in outcomes), group.describe()


def stopped(victim: int) -> str:
    """One rank stops for ever, as by SIGSTOP, when it should connect to the others."""
    from horovod.common.rendezvous import follower, leader, rank

    for module in (follower, leader, rank):
        module.STEP_SECONDS = 2.0  # type: ignore[attr-defined]
    if own_rank() == victim:
        rank.Rank.link = lambda self, wiring: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
    return try_to_meet()


@pytest.mark.parametrize("victim", [2, 3])
def test_a_stopped_rank_is_named_after_some_time(victim: int) -> None:
    with start_ranks(4, stopped, victim, hosts=[2, 2]) as group:
        others = [0, 1] if victim == 2 else [0, 1, 2]
        outcomes = group.wait(25, ranks=others)
        assert all(outcome.finished for outcome in outcomes), group.describe()
        assert len({outcome.value for outcome in outcomes}) == 1, group.describe()
        assert f"rank {victim} (local rank" in outcomes[0].value


# ---- Who does not come, and who contradicts --------------------------------------------------------------------------


def only(*ranks: int) -> str:
    return try_to_meet() if own_rank() in ranks else "not there"


def test_a_missing_host_is_named_with_its_ranks() -> None:
    results = run_ranks(5, only, 0, 1, 4, hosts=[2, 2, 1], env=SHORT)
    assert len({results[rank] for rank in (0, 1, 4)}) == 1
    assert "rank 2-3 of host testhost1 did not arrive within 3 s" in results[0]
    assert "arrived: rank 0-1 of host testhost0; rank 4 of host testhost2" in results[0]


def test_a_missing_rank_of_another_host_is_named() -> None:
    results = run_ranks(4, only, 0, 1, 2, hosts=[2, 2], env=SHORT)
    assert len(set(results[:3])) == 1
    assert "local rank 1 of 2 on host testhost1 (rank 3, if a host's ranks follow each other) did not" in results[0]


def test_a_missing_leader_is_named_to_its_host_and_the_others() -> None:
    results = run_ranks(4, only, 0, 1, 3, hosts=[2, 2], env=SHORT)
    assert results[0] == results[1]
    assert "rank 2-3 of host testhost1 did not arrive within 3 s" in results[0]
    assert (
        "local rank 0 of 2 on host testhost1 (rank 2, if a host's ranks follow each other) was not there" in results[3]
    )


def contradiction(change: Callable[[int], dict[str, str | None]]) -> list[Outcome]:
    with start_ranks(4, try_to_meet, hosts=[2, 2], env=SHORT, env_of_rank=change) as group:
        outcomes = group.wait(25)
        assert all(outcome.finished for outcome in outcomes), group.describe()
        return outcomes


CONTRADICTIONS = [
    ({2: {"HOROVOD_SIZE": "5"}, 3: {"HOROVOD_SIZE": "5"}}, "HOROVOD_SIZE is "),
    (
        {2: {"HOROVOD_CROSS_RANK": "0"}},
        "HOROVOD_CROSS_RANK is 0 on rank 2 (local rank 0 on host testhost1), ",
    ),
    (
        {3: {"HOROVOD_CROSS_SIZE": "3"}},
        "HOROVOD_CROSS_SIZE is 3 on rank 3 (local rank 1 on host testhost1), ",
    ),
    (
        {r: {"HOROVOD_ALLREDUCE": "ring"} for r in (2, 3)},
        "_ALLREDUCE is hierarchical on rank 0 and ring on rank 2",
    ),
    ({3: {"HOROVOD_ALLREDUCE": "ring"}}, "HOROVOD_ALLREDUCE is hierarchical on rank 2 and ring on rank 3"),
    ({r: {"HOROVOD_CACHE_CAPACITY": "7"} for r in (2, 3)}, "HOROVOD_CACHE_CAPACITY is 1024 on rank 0 and 7 on rank 2"),
    ({2: {"HOROVOD_RANK": "3"}, 3: {"HOROVOD_RANK": "2"}}, "HOROVOD_LOCAL_RANK must ascend with HOROVOD_RANK"),
]


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS)
def test_a_contradiction_is_an_error_everywhere(changes: dict[int, dict[str, str | None]], words: str) -> None:
    texts = [outcome.value for outcome in contradiction(lambda rank: changes.get(rank, {}))]
    assert any(text.startswith("ValueError: ") and words in text for text in texts), texts
    # Who came when the attempt had ended already hears that from the others of its host, or from the server.
    late = ("was not there for", "The attempt before ended with: ")
    assert all(words in text or any(word in text for word in late) for text in texts), texts


def test_a_rank_on_two_hosts_is_named_with_both() -> None:
    """Host 1 says that it has the ranks 1 and 3: rank 1 is host 0's."""
    outcomes = contradiction(lambda rank: {"HOROVOD_RANK": "1"} if rank == 2 else {})
    assert outcomes[0].value == outcomes[2].value, outcomes
    text = outcomes[0].value
    assert "rank 1 is there twice: on host testhost" in text
    assert "(ranks [0, 1])" in text and "(ranks [1, 3])" in text


def differing_sets() -> str:
    return try_to_meet([[0, 1]] if own_rank() < 2 else [[0, 2]])


def test_differing_process_sets_are_an_error_everywhere() -> None:
    results = run_ranks(4, differing_sets, hosts=[2, 2])
    assert len(set(results)) == 1
    assert "rank 0 gave [[0, 1]] to init, rank 2 [[0, 2]]" in results[0]


# ---- Failing late, and trying again ----------------------------------------------------------------------------------


def fails_then_meets(culprit: int) -> tuple[str, str]:
    trouble = HorovodInternalError(f"init: rank {culprit} has no engine today") if own_rank() == culprit else None
    return try_to_meet(trouble=trouble), try_to_meet()


@pytest.mark.parametrize("culprit", [0, 1, 2, 4])
def test_a_rank_that_fails_late_fails_all_and_all_may_try_again(culprit: int) -> None:
    expected = (f"HorovodInternalError: init: rank {culprit} has no engine today", "")
    assert run_ranks(5, fails_then_meets, culprit, hosts=[2, 1, 2]) == [expected] * 5


def interrupted() -> str:
    """Rank 4 never comes; Ctrl-C at one rank that waits for it."""
    if own_rank() == 3:
        wait_for_mark("others wait")
    if own_rank() == int(os.environ["INTERRUPTED_RANK"]):
        mark("others wait")
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(KeyboardInterrupt):
            try_to_meet()
        return "interrupted"
    return try_to_meet() if own_rank() != 4 else "not there"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ctrl_c_at_one_rank_ends_the_wait_of_all(rank: int) -> None:
    start = time.monotonic()
    results = run_ranks(5, interrupted, hosts=[2, 2, 1], env={"INTERRUPTED_RANK": str(rank)})
    assert time.monotonic() - start < 25, "they waited for the end of the time"
    assert results[rank] == "interrupted"
    told = [text for index, text in enumerate(results[:4]) if index != rank]
    assert len(set(told)) == 1
    assert f"rank {rank} (local rank {rank % 2} of 2 on host testhost{rank // 2}) gave up: KeyboardInterrupt" in told[0]


def meet_many_times() -> list[int]:
    counts, generation = [], 0
    for _ in range(20):
        with meet(read_identity(), read_network(), read_tunables(), [], generation) as meeting:
            meeting.confirm()
            assert meeting.wiring.table.generation == generation + 1
            generation += 1
        counts.append(len(open_files()))
    return counts


def test_twenty_meetings_leave_no_descriptors() -> None:
    for counts in run_ranks(4, meet_many_times, hosts=[2, 1, 1]):
        assert len(set(counts)) == 1, counts


def one_has_met_more_often() -> int:
    with meet(read_identity(), read_network(), read_tunables(), [], 40 + own_rank()) as meeting:
        meeting.confirm()
        return meeting.wiring.table.generation


def test_the_generation_is_newer_than_any_that_a_rank_has_seen() -> None:
    assert run_ranks(3, one_has_met_more_often, hosts=[1, 2]) == [43] * 3


# ---- Without a launcher ----------------------------------------------------------------------------------------------


def by_rank_0(port: str) -> dict[str, str]:
    return {"HOROVOD_RENDEZVOUS_SERVER": "rank0", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}


def free_port(address: str = "127.0.0.1") -> str:
    """A port that stays free: none of those that the kernel gives to whoever asks for any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first_of_the_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_of_the_kernel // 2, first_of_the_kernel)
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.bind((address, port))
            return str(port)


def meets_twice() -> tuple[str, str]:
    return try_to_meet(), try_to_meet()


def test_rank_0_serves_where_there_is_no_launcher() -> None:
    assert run_ranks(4, meets_twice, hosts=[2, 1, 1], env=by_rank_0(free_port())) == [("", "")] * 4


def test_a_failure_reaches_all_from_rank_0_s_server_and_all_may_try_again() -> None:
    expected = ("HorovodInternalError: init: rank 1 has no engine today", "")
    env = by_rank_0(free_port())
    assert run_ranks(3, fails_then_meets, 1, hosts=[1, 2], env=env) == [expected] * 3


def test_hosts_meet_over_ipv6() -> None:
    env = by_rank_0(free_port("::1")) | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "::1"}
    assert run_ranks(3, try_to_meet, hosts=[1, 2], env=env) == [""] * 3


def test_the_network_interface_may_be_chosen() -> None:
    assert run_ranks(2, try_to_meet, hosts=[1, 1], env={"HOROVOD_GLOO_IFACE": "lo"}) == [""] * 2
    results = run_ranks(2, try_to_meet, hosts=[1, 1], env={"HOROVOD_GLOO_IFACE": "nosuch0"})
    assert all("HOROVOD_GLOO_IFACE='nosuch0': there is no such interface here" in text for text in results)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = by_rank_0(str(taken.getsockname()[1])) | SHORT
        results = run_ranks(2, try_to_meet, hosts=[1, 1], env=env)
    assert "can't listen for the other hosts at 127.0.0.1 port" in results[0]
    assert "Address already in use" in results[0]
    assert "did not reach the rendezvous at 127.0.0.1" in results[1]


def test_several_hosts_without_a_key_say_what_to_set() -> None:
    def keyless(_rank: int) -> dict[str, str | None]:
        return {"HOROVOD_SECRET_KEY": None}

    for text in run_ranks(2, try_to_meet, hosts=[1, 1], env_of_rank=keyless):
        assert "HOROVOD_SECRET_KEY_FILE" in text and "HOROVOD_INSECURE=1" in text
    env = by_rank_0(free_port()) | {"HOROVOD_INSECURE": "1"}
    assert run_ranks(2, try_to_meet, hosts=[1, 1], env=env, env_of_rank=keyless) == [""] * 2


def test_several_hosts_without_an_address_say_what_to_set() -> None:
    def lost(_rank: int) -> dict[str, str | None]:
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": None}

    for text in run_ranks(2, try_to_meet, hosts=[1, 1], env_of_rank=lost):
        assert "HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT must be set" in text


def test_another_key_is_not_let_in_and_says_so() -> None:
    def other(rank: int) -> dict[str, str | None]:
        return {"HOROVOD_SECRET_KEY": "another"} if rank == 1 else {}

    results = run_ranks(2, try_to_meet, hosts=[1, 1], env=SHORT, env_of_rank=other)
    assert "rank 1 of host testhost1 did not arrive" in results[0]
    assert "the listening process does not know this job's key" in results[1]


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a random text\n")
    env = by_rank_0(free_port()) | {"HOROVOD_SECRET_KEY_FILE": str(tmp_path / "key")}
    assert run_ranks(2, try_to_meet, hosts=[1, 1], env=env) == [""] * 2
