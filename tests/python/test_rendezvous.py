"""How ranks of one host meet: who is let in, and what everyone is told when it fails."""

import os
import resource
import signal
import socket
import threading
import time

import pytest
from ranks import come_together, mark, marked, run_ranks, start_ranks, wait_for_mark

import horovod.numpy as hvd
from horovod import __version__
from horovod.common.environment import read_identity, read_tunables
from horovod.common.rendezvous.encoding import ProtocolError, Writer
from horovod.common.rendezvous.encryption import PLAIN
from horovod.common.rendezvous.follower import Follower
from horovod.common.rendezvous.messages import Kind
from horovod.common.rendezvous.proof import ANSWER_SIZE, MAGIC, OPENING_SIZE, Claim, Key, Purpose, encode_opening
from horovod.common.rendezvous.rank import Rank, local_address
from horovod.common.rendezvous.times import VERDICT_SECONDS

SHORT = {"HOROVOD_START_TIMEOUT": "2"}


def meet_and_add() -> float:
    hvd.init()
    return float(hvd.allreduce([float(hvd.rank() + 1)], op=hvd.Sum)[0])


def sum_of(size: int) -> float:
    return size * (size + 1) / 2


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ---- The good case ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_meet(size: int) -> None:
    assert run_ranks(size, meet_and_add) == [sum_of(size)] * size


def test_ranks_meet_without_key_and_without_job_id() -> None:
    def nameless(_rank: int) -> dict[str, str | None]:
        return {"HOROVOD_SECRET_KEY": None, "HOROVOD_JOB_ID": None}

    assert run_ranks(3, meet_and_add, env_of_rank=nameless) == [6.0] * 3


def late() -> float:
    if os.environ["HOROVOD_RANK"] == os.environ["LATE_RANK"]:
        time.sleep(1)  # the point is that the others are waiting by now; either order must work
    return meet_and_add()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_late_rank_is_waited_for(rank: int) -> None:
    assert run_ranks(3, late, env={"LATE_RANK": str(rank)}) == [6.0] * 3


# ---- Failures that every rank hears of -------------------------------------------------------------------------------


def failing_init(**arguments: object) -> tuple[str, str, bool]:
    before = open_files()
    with pytest.raises((ValueError, hvd.HorovodInternalError)) as caught:
        hvd.init(**arguments)  # type: ignore[arg-type]
    assert not hvd.is_initialized()
    return type(caught.value).__name__, str(caught.value), open_files() == before


def all_but_rank_2() -> tuple[str, str, bool] | None:
    if os.environ["HOROVOD_RANK"] == "2":
        return None
    come_together((0, 1, 3))
    return failing_init()


def test_a_missing_rank_is_named_to_all_others() -> None:
    results = run_ranks(4, all_but_rank_2, env=SHORT)
    words = "rank 2 (local rank 2 of 4 on host testhost) did not arrive within 2 s; arrived: 0, 1, 3"
    for rank in (0, 1, 3):
        kind, text, clean = results[rank]
        assert kind == "HorovodInternalError"
        assert words in text
        assert clean, "descriptors were left open"


def all_but_rank_0() -> tuple[str, str, bool] | None:
    return None if os.environ["HOROVOD_RANK"] == "0" else failing_init()


def test_a_missing_leader_is_named() -> None:
    for result in run_ranks(3, all_but_rank_0, env=SHORT)[1:]:
        assert "rank 0 (local rank 0 of 3 on host testhost) was not there for" in result[1]
        assert result[2], "descriptors were left open"


def differing_sets() -> tuple[str, str, bool]:
    return failing_init(process_sets=[hvd.ProcessSet([0, int(os.environ["HOROVOD_RANK"]) or 1])])


def test_differing_process_sets_are_an_error_everywhere() -> None:
    results = run_ranks(3, differing_sets)
    assert len(set(results)) == 1
    kind, text, clean = results[0]
    assert kind == "ValueError"
    assert text.startswith("Attempted to register process set with mismatching size/values on different ranks")
    assert "rank 0 gave [[0, 1]] to init, rank 2 [[0, 2]]" in text
    assert clean


@pytest.mark.parametrize("name", ["HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD"])
def test_tunables_that_must_be_equal_are_compared(name: str) -> None:
    def differ(rank: int) -> dict[str, str | None]:
        return {name: "7"} if rank == 1 else {}

    results = run_ranks(3, failing_init, env_of_rank=differ)
    assert len(set(results)) == 1
    assert results[0][0] == "ValueError"
    assert f"{name} is" in results[0][1]
    assert "and 7 on rank 1" in results[0][1]


def twice() -> tuple[str, str, bool]:
    come_together(range(3))
    if os.environ["HOROVOD_RANK"] == "2":
        os.environ.update(HOROVOD_RANK="1", HOROVOD_LOCAL_RANK="1")
    return failing_init()


def test_a_rank_that_is_there_twice_is_named() -> None:
    with start_ranks(3, twice, env=SHORT) as group:
        outcomes = group.wait()
        told = [outcome.value[1] for outcome in outcomes if outcome.finished and "twice" in outcome.value[1]]
        # The second one of them may not have been let in; the leader and the first one know.
        assert len(told) >= 2, group.describe()
        assert "rank 1 (local rank 1 of 3 on host testhost) is there twice: pid " in told[0]


def dies_while_waiting() -> tuple[str, str, bool] | None:
    rank = os.environ["HOROVOD_RANK"]
    if rank == "2":
        wait_for_mark("the leader has failed")
        return None
    if rank == "1":
        introduce()
        os.kill(os.getpid(), signal.SIGKILL)
    result = failing_init()
    mark("the leader has failed")
    return result


def test_a_rank_that_dies_while_others_are_awaited_ends_the_attempt_at_once() -> None:
    with start_ranks(3, dies_while_waiting) as group:
        (leader,) = group.wait(15, ranks=[0])
        assert leader.finished, group.describe()
        assert "rank 1 (local rank 1 of 3 on host testhost), pid" in leader.value[1]
        assert "died before all ranks had arrived" in leader.value[1]


def interrupted() -> str | None:
    """Rank 2 never comes. Ctrl-C at one of those who wait for it, once rank 1 has been accepted."""
    rank = os.environ["HOROVOD_RANK"]
    if rank == "2":
        wait_for_mark("told 0")
        wait_for_mark("told 1")
        return None
    come_together((0, 1))
    if rank == os.environ["INTERRUPTED_RANK"]:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
            hvd.init()
        text = "interrupted"
    else:
        text = failing_init()[1]
    mark(f"told {rank}")
    return text


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_the_wait_and_the_others_are_told(rank: int) -> None:
    texts = run_ranks(3, interrupted, env={"INTERRUPTED_RANK": str(rank), "HOROVOD_START_TIMEOUT": "15"})
    assert texts[rank] == "interrupted"
    assert f"rank {rank} (local rank {rank} of 3 on host testhost) gave up: KeyboardInterrupt" in texts[1 - rank]


# ---- Trying again ----------------------------------------------------------------------------------------------------


def wrong_once() -> float:
    """Rank 1 fails before it meets anyone, while the others wait; then everyone goes on as if nothing had been."""
    if os.environ["HOROVOD_RANK"] == "1":
        with pytest.raises(ValueError, match="invalid rank"):
            hvd.init(process_sets=[hvd.ProcessSet([9])])
    return meet_and_add()


def test_a_rank_that_failed_alone_may_come_later() -> None:
    assert run_ranks(3, wrong_once) == [6.0] * 3


def all_fail_then_all_meet() -> float:
    rank = int(os.environ["HOROVOD_RANK"])
    for _ in range(3):
        with pytest.raises(ValueError, match="mismatching size/values"):
            hvd.init(process_sets=[hvd.ProcessSet([rank])])
    return meet_and_add()


def test_an_attempt_that_failed_everywhere_can_be_repeated() -> None:
    assert run_ranks(3, all_fail_then_all_meet) == [6.0] * 3


def gives_up_and_comes_again() -> float:
    rank = os.environ["HOROVOD_RANK"]
    if rank == "1":
        introduce().close()
        mark("rank 1 has given up once")
    if rank == "2":
        wait_for_mark("rank 1 has given up once")
    return meet_and_add()


def introduce() -> Follower:
    """The first half of a follower's init: a connection that has said HELLO and was accepted."""
    follower = Follower(Rank.make(read_identity(), read_tunables(), [], 41, listener=None, encryption=PLAIN))
    follower.introduce()
    return follower


def test_a_rank_that_gave_up_may_come_again_while_the_leader_waits() -> None:
    assert run_ranks(3, gives_up_and_comes_again) == [6.0] * 3


def engine_fails_on_one_rank() -> float:
    """The limit of open files makes rank 1 fail at its last step; the others must not be left with a running engine."""
    if os.environ["HOROVOD_RANK"] == "1":
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = max(int(name) for name in open_files())
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 3, limits[1]))
        begin = time.monotonic()
        kind, text, _ = failing_init()
        # It hears that its reason is that of all, and has not to wait for it in vain.
        assert time.monotonic() - begin < VERDICT_SECONDS
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    else:
        kind, text, _ = failing_init()
    assert kind == "HorovodInternalError", text
    return meet_and_add()


def test_a_rank_that_can_not_open_files_fails_all_and_all_recover() -> None:
    assert run_ranks(3, engine_fails_on_one_rank) == [6.0] * 3


# ---- Strangers -------------------------------------------------------------------------------------------------------


def connect(name: bytes) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(name)
            return sock
        except ConnectionRefusedError:
            sock.close()
            assert time.monotonic() < deadline
            time.sleep(0.005)


def is_dropped(sock: socket.socket, seconds: float = 8) -> bool:
    """Whether the leader closes the connection, whatever it says before."""
    sock.settimeout(seconds)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def prove(sock: socket.socket, key: Key) -> None:
    """The connecting side of the proof, as rank 1's."""
    claim = Claim(Purpose.LOCAL, 0, 1, 0)
    sock.sendall(encode_opening(claim, b"c" * 32))
    answer = sock.recv(ANSWER_SIZE, socket.MSG_WAITALL)
    sock.sendall(key.check_answer(claim, answer, b"c" * 32))


def attack(key: Key, name: bytes) -> dict[str, bool]:
    """Runs every attack against a leader that waits; says of each whether it was turned away."""
    turned_away = {}
    garbage = connect(name)
    garbage.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
    turned_away["garbage"] = is_dropped(garbage, 2)

    wrong_key = connect(name)
    with pytest.raises(ProtocolError, match="does not know this job's key"):
        prove(wrong_key, Key(b"not the key", key.context))
    wrong_key.sendall(b"\0" * 32)
    turned_away["wrong key"] = is_dropped(wrong_key, 2)

    parrot = connect(name)  # sends the leader's own proof back to it
    parrot.sendall(encode_opening(Claim(Purpose.LOCAL, 0, 1, 0), b"c" * 32))
    parrot.sendall(parrot.recv(ANSWER_SIZE, socket.MSG_WAITALL)[32:])
    turned_away["reflection"] = is_dropped(parrot, 2)

    other_purpose = connect(name)
    other_purpose.sendall(encode_opening(Claim(Purpose.DATA, 0, 1, 0), b"c" * 32))
    turned_away["other purpose"] = is_dropped(other_purpose, 2)

    oversized = connect(name)
    prove(oversized, key)
    oversized.sendall(b"\x01\xff\xff\xff\xff")
    turned_away["oversized"] = is_dropped(oversized, 2)

    for what, kind, body in (
        ("unknown kind", 99, b""),
        ("not HELLO", Kind.GO, b""),
        ("empty", Kind.HELLO, b""),
        ("a version and no more", Kind.HELLO, Writer().text(__version__).bytes()),
        ("a long text", Kind.HELLO, b"\xff" * 40),
    ):
        odd = connect(name)
        prove(odd, key)
        odd.sendall(bytes([kind]) + len(body).to_bytes(4, "big") + body)
        turned_away[what] = is_dropped(odd, 2)

    half_open, silent = connect(name), connect(name)
    half_open.sendall((MAGIC + b"1234")[: OPENING_SIZE - 1])
    turned_away["half-open"] = is_dropped(half_open)
    turned_away["silent"] = is_dropped(silent)
    return turned_away


def attacked() -> object:
    if os.environ["HOROVOD_RANK"] != "1":
        return meet_and_add()
    identity = read_identity()
    name = local_address(identity)
    turned_away = attack(Key(identity.secret_key, name), name)
    assert meet_and_add() == 6.0
    return turned_away


def test_strangers_are_turned_away_and_disturb_nobody() -> None:
    results = run_ranks(3, attacked)
    assert results[0] == results[2] == 6.0
    assert len(results[1]) == 12
    assert all(results[1].values()), results[1]


def crowded() -> float:
    if os.environ["HOROVOD_RANK"] != "1":
        return meet_and_add()
    name = local_address(read_identity())
    crowd = [connect(name) for _ in range(400)]
    result = meet_and_add()
    assert len(crowd) == 400
    return result


def test_a_crowd_of_silent_connections_does_not_keep_ranks_out() -> None:
    assert run_ranks(3, crowded) == [6.0] * 3


def squatted() -> tuple[str, str, bool] | None:
    """Rank 0 is replaced by a process that listens at the right place but does not know the key."""
    name = local_address(read_identity())
    if os.environ["HOROVOD_RANK"] == "1":
        wait_for_mark("listening")
        result = failing_init()
        mark("told")
        return result
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        listener.settimeout(0.1)
        mark("listening")
        while not marked("told"):
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            with sock:
                sock.recv(OPENING_SIZE)
                sock.sendall(b"\0" * ANSWER_SIZE)
    return None


def test_a_follower_does_not_trust_a_leader_without_the_key() -> None:
    result = run_ranks(2, squatted, env=SHORT)[1]
    assert result[0] == "HorovodInternalError"
    assert "does not know this job's key" in result[1]
