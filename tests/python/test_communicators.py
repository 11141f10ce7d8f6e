"""Communicators of mpi4py as arguments, under the real mpirun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import REPORT, call_mpirun, found_out_by_meeting, mpirun_program, start_mpirun
from launching import run
from machines import Machines, machines

BEGIN = """
import os, sys, time
from mpi4py import MPI
import horovod.numpy as hvd
world = MPI.COMM_WORLD
def tell(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once, since ranks share the pipe
def told_by(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def total(**more):
    return int(hvd.allreduce([float(world.rank)], op=hvd.Sum, **more)[0])
"""


def call(ranks: int, program: str, **environment: str) -> list[str]:
    """What a program prints under mpirun on this host, sorted."""
    named = [word for name in environment for word in ("-x", name)]
    command = [str(mpirun_program()), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *named]
    words = [f"{name}={value}" for name, value in environment.items()]
    ended = start_mpirun(["env", *words, *command, sys.executable, "-P", "-c", BEGIN + program])
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


def test_the_ranks_are_those_of_the_communicator() -> None:
    told = call(
        3,
        """
hvd.init(comm=world.Split(0, -world.rank))
tell(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), world.rank, total())
""",
    )
    assert told == ["0 3 0 3 1 2 3", "1 3 1 3 1 1 3", "2 3 2 3 1 0 3"]


def test_parts_of_a_split_communicator_are_worlds_of_their_own_and_init_may_come_again() -> None:
    told = call(
        4,
        """
hvd.init(comm=world.Split(world.rank % 2, world.rank))
parts = hvd.rank(), hvd.size(), total()
hvd.shutdown()
hvd.init(comm=world)
tell(world.rank, *parts, hvd.rank(), hvd.size(), total(), hvd.mpi_threads_supported(), hvd.mpi_enabled())
""",
    )
    assert told == [
        "0 0 2 2 0 4 6 True False",
        "1 0 2 4 1 4 6 True False",
        "2 1 2 2 2 4 6 True False",
        "3 1 2 4 3 4 6 True False",
    ]


@pytest.mark.parametrize("comm", ["world", "None"])
def test_a_process_set_may_be_a_communicator(comm: str) -> None:
    """The parts of a split one are all registered, also with those that are in none of them."""
    told = call(
        4,
        f"""
ours = world.Split(world.rank % 2 if world.rank < 3 else MPI.UNDEFINED, world.rank)
mine, pair = hvd.ProcessSet(ours), hvd.ProcessSet([3, 0])
assert (mine.ranks, mine.included(), mine.mpi_comm) == (None, None, ours)
for _ in range(2):
    hvd.init({comm}, process_sets=[mine, pair])
    hvd.init({comm}, process_sets=[mine, pair])  # as another binding does
    ids = (mine.process_set_id, pair.process_set_id)
    sums = [total(process_set=each) for each in (mine, pair) if each.included()]
    if ours:
        other = told_by(lambda: hvd.init(process_sets=[hvd.ProcessSet(ours)]))
        assert other.startswith("ValueError: init: Horovod runs already, and ProcessSet("), other
    added = told_by(lambda: hvd.add_process_set(hvd.ProcessSet(ours)))
    assert added.startswith("NotImplementedError: add_process_set: ProcessSet("), added
    hvd.barrier()
    hvd.shutdown()
tell(world.rank, mine.ranks, *ids, *sums)
""",
    )
    assert told == ["0 [0, 2] 1 3 2 3", "1 [1] 2 3 1", "2 [0, 2] 1 3 2", "3 None None 3 3"]


OVERLAP = "give communicators that overlap. All ranks need theirs in the same order."


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ("[hvd.ProcessSet([0])] * world.rank", "init: rank 0 gives 0 process sets, rank 1 gives 1."),
        (
            "[hvd.ProcessSet([0] if world.rank else MPI.COMM_SELF)]",
            "init: process_sets[0] is a list of ranks here and a communicator on other ranks: rank 1.",
        ),
        (
            "[hvd.ProcessSet(both if world.rank else MPI.COMM_SELF)]",
            f"init: process_sets[0]: ranks [0, 1] {OVERLAP}",
        ),
    ],
)
def test_sets_that_do_not_go_together_are_refused_on_all_ranks(sets: str, told: str) -> None:
    program = f"""
both = world.Split(0, -world.rank)
tell(told_by(lambda: hvd.init(world, process_sets={sets})))
"""
    assert call(2, program) == [f"ValueError: {told}"] * 2


def test_sets_in_another_order_are_not_taken_for_each_other() -> None:
    """Rank 0's row and rank 2's column have the same lowest rank and the same size."""
    told = call(
        4,
        """
columns = hvd.ProcessSet(world.Split(world.rank % 2))
rows = hvd.ProcessSet(world.Split(world.rank // 2))
sets = [columns, rows] if world.rank else [rows, columns]
tell(told_by(lambda: hvd.init(world, process_sets=sets)))
hvd.init(world, process_sets=[columns, rows])
tell(world.rank, columns.ranks, rows.ranks)
""",
    )
    sets = ["0 [0, 2] [0, 1]", "1 [1, 3] [0, 1]", "2 [0, 2] [2, 3]", "3 [1, 3] [2, 3]"]
    assert told == [*sets, *[f"ValueError: init: process_sets[0]: ranks [0, 2] {OVERLAP}"] * 4]


def test_a_communicator_that_is_not_the_jobs_is_refused() -> None:
    told = call(
        2,
        """
part = world.Split(0 if world.rank == 0 else MPI.UNDEFINED)
outer = hvd.ProcessSet(world.Dup())
alone = told_by(lambda: hvd.init(MPI.COMM_SELF, process_sets=[outer]))
assert alone == "ValueError: init: process_sets[0] is a communicator with processes that are not in the job: rank 0."
outside = told_by(lambda: hvd.init(part))
tell(world.rank, outside, hvd.size() if hvd.is_initialized() else "")
hvd.shutdown()
inter = MPI.COMM_SELF.Create_intercomm(0, world, 1 - world.rank)
tell(told_by(lambda: hvd.init(inter)))
group = world.Get_group()
for refuses, expected in (
    (lambda: hvd.init(group), "init: comm must be None, the list of all ranks or a communicator of mpi4py, got "),
    (lambda: hvd.ProcessSet(group), "ProcessSet: expected a list of ranks, got "),
):
    error = told_by(refuses)
    assert error is not None and error.startswith("ValueError: " + expected), error
MPI.Finalize()
tell(told_by(lambda: hvd.init(MPI.COMM_WORLD)))
hvd.init()
tell(told_by(hvd.mpi_threads_supported))
""",
    )
    inter = "ValueError: init: comm is an intercommunicator; its two groups have ranks of their own."
    finalized = "ValueError: init: MPI has been finalized; its communicators can't be used any more."
    assert told == [
        "0 None 1",
        "1 ValueError: init: comm is MPI.COMM_NULL: this process is in none of the communicators. ",
        *["ValueError: Horovod MPI is not enabled; this version runs without MPI."] * 2,
        *[finalized] * 2,
        *[inter] * 2,
    ]


def test_nothing_else_has_to_say_who_the_ranks_are() -> None:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = call(2, "hvd.init(world)\ntell(hvd.rank(), total())", **dict.fromkeys(variables, "unknown"))
    assert told == ["0 1", "1 1"]


def test_mpi_has_to_be_initialized() -> None:
    told = call(
        2,
        """
before = told_by(lambda: hvd.init(world))
MPI.Init()
hvd.init(world)
tell(hvd.rank(), total(), before)
MPI.Finalize()
""",
        MPI4PY_RC_INITIALIZE="0",
    )
    needed = "ValueError: init: MPI has not been initialized, which is needed for its communicators: MPI.Init()."
    assert told == [f"{rank} 1 {needed}" for rank in range(2)]


def test_a_rank_that_does_not_come_is_told_in_time_and_all_may_try_again(tmp_path: Path) -> None:
    told = call(
        2,
        f"""
def first_init(turn):
    while not os.path.exists({str(tmp_path)!r} + f"/{{turn}}"):
        time.sleep(0.05)
    start = time.monotonic()
    error = told_by(lambda: hvd.init(world))
    assert time.monotonic() - start < 20
    open({str(tmp_path)!r} + f"/{{turn + 1}}", "w").close()
    return error
if world.rank == 0:
    open({str(tmp_path)!r} + "/0", "w").close()
error = first_init(world.rank)
while not os.path.exists({str(tmp_path)!r} + "/2"):
    time.sleep(0.05)
hvd.init(world)
tell(total(), error)
hvd.shutdown()
""",
        HOROVOD_START_TIMEOUT="2",
    )
    waited = "of the communicator has waited 2 s for the others. Have all 2 called hvd.init with it?"
    assert told == [f"1 HorovodInternalError: init: rank {rank} {waited}" for rank in range(2)]


def test_ranks_that_have_tried_more_often_meet_those_that_come_late(tmp_path: Path) -> None:
    told = call(
        2,
        f"""
failed_three_times = {str(tmp_path / "failed three times")!r}
while world.rank == 1 and not os.path.exists(failed_three_times):
    time.sleep(0.05)
for attempt in range(8):
    error = told_by(lambda: hvd.init(world))
    if error is None:
        break
    if world.rank == 0 and attempt == 2:
        assert "of the communicator has waited 2 s for the others." in error, error
        open(failed_three_times, "w").close()
tell(world.rank, error, total())
""",
        HOROVOD_START_TIMEOUT="2",
    )
    assert told == ["0 None 1", "1 None 1"]


def test_horovodrun_starts_no_mpi() -> None:
    mpirun_program()  # comes with the library that mpi4py needs
    program = BEGIN + "tell(told_by(lambda: hvd.init(comm=world)))"
    _, out, _ = run("-np", "2", sys.executable, "-P", "-c", program)
    told = "ValueError: init(comm=...): 2 processes were started, but MPI knows of one, this. Start the script with"
    assert out.count(told) == 2


# ---- On machines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


WITH_MPI = "from mpi4py import MPI\n" + REPORT.replace("hvd.init()", "hvd.init(comm=MPI.COMM_WORLD)")


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("--host h1:2,h2:2", "1122"),
        ("--host h1:2,h2:2 --map-by node", "1212"),
        # Called on h1, which has no rank: nobody has to say where rank 0 is.
        ("--host h2:1,h3:3", "2333"),
        ("-np 3 --host h3:2,h1:1 -x HOROVOD_GLOO_IFACE=eth0", "331"),
    ],
)
def test_hosts_need_neither_a_key_nor_an_address(cluster: Machines, options: str, places: str) -> None:
    ended = call_mpirun(cluster, options, WITH_MPI, key="")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == found_out_by_meeting([f"h{number}" for number in places])


def test_what_rank_0_can_not_do_all_are_told(cluster: Machines) -> None:
    program = BEGIN + "tell(told_by(lambda: hvd.init(world)))"
    for name, value, told in (
        ("HOROVOD_GLOO_IFACE", "eth7", "the interface HOROVOD_GLOO_IFACE='eth7' has no address for others."),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "h3", "h3 port "),
    ):
        ended = call_mpirun(cluster, f"-np 2 --host h1:1,h2:1 -x {name}={value}", program, key="")
        lines = set(ended.stdout.splitlines())
        expected = f"HorovodInternalError: init: rank 0 can't listen for the other hosts: {told}"
        assert len(lines) == 1 and ended.stdout.startswith(expected), ended.stdout
    ended = call_mpirun(cluster, "-np 2 --host h1:1,h2:1 -x HOROVOD_SECRET_KEY_FILE=/nowhere", program, key="")
    told = "HorovodInternalError: HOROVOD_SECRET_KEY_FILE='/nowhere' can't be read: No such file or directory."
    assert ended.stdout.splitlines() == [told] * 2, ended.stdout


def test_a_key_of_ones_own_does_not_travel(cluster: Machines) -> None:
    """Who has none then is refused by itself; all others hear of it from the hosts' server."""
    program = f"""{BEGIN}
if world.rank == 1:
    os.environ.pop("HOROVOD_SECRET_KEY", None)
tell(world.rank, told_by(lambda: hvd.init(world)))
"""
    ended = call_mpirun(cluster, "-np 2 --host h1:1,h2:1 -x HOROVOD_START_TIMEOUT=3", program)
    first, second = sorted(ended.stdout.splitlines())
    assert first.startswith("0 HorovodInternalError: init: "), first
    assert "and there is no key by which they know each other" in second
