"""Ranks find out who they are and where the others are by the variables that other launchers set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from documents import PAGES, blocks
from launchers import (
    LAUNCHERS,
    PAGE,
    Environment,
    found_out_by_meeting,
    jsrun,
    kubernetes,
    mpiexec,
    mpirun,
    srun,
    start_all,
    torchrun,
)
from machines import Machines, machines

from horovod.common.environment import read_identity, read_network
from horovod.common.schedulers import complete, expand_counts, first_host, lsf_hosts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(4, tmp_path_factory.mktemp("machines")) as made:
        yield made


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


@pytest.mark.parametrize("local_ranks", ["0123", "0213", "0132"], ids=lambda text: f"counted as {text}")
def test_a_launcher_may_count_the_ranks_of_a_host_in_another_order(cluster: Machines, local_ranks: str) -> None:
    """As Open MPI does where it binds several ranks to a core; rank 1 is on another host."""

    def placed(rank: int) -> Environment:
        position = max(rank - 1, 0)
        here = ("0", "1") if rank == 1 else (local_ranks[position], "4")
        return {
            **mpirun(rank),
            "OMPI_COMM_WORLD_SIZE": "5",
            "OMPI_COMM_WORLD_LOCAL_RANK": here[0],
            "OMPI_COMM_WORLD_LOCAL_SIZE": here[1],
        }

    hosts = ["h1", "h2", "h1", "h1", "h1"]
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
