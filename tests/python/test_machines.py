"""horovodrun on several machines, over real ssh: who is started where, with what, and how it ends."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import pickles
from launching import script
from machines import MachineLauncher, Machines, machines
from waiting import wait_until
from wire_tap import tapping

PLACE = script(
    """
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    print(*[os.environ["HOROVOD_" + name] for name in names], os.uname().nodename)
    """
)
ADD = script(
    """
    import horovod.numpy as hvd
    hvd.init()
    total = hvd.allreduce([float(hvd.rank())], op=hvd.Sum)[0]
    print(hvd.rank(), os.uname().nodename, os.environ.get("HOROVOD_HOST_ADDRESS"), total)
    """
)
WAIT = script("open(f'{os.environ[\"READY\"]}.{rank}', 'w').close()\ntime.sleep(100)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Four machines, h1 to h4, for tests that leave them as they are."""
    with machines(4, tmp_path_factory.mktemp("machines")) as made:
        yield made


def lines(out: str) -> list[str]:
    return sorted(re.sub(r"^\[\d+\]<stdout>:", "", line) for line in out.splitlines())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_ranks_on_each_of_some_hosts_meet_and_compute(cluster: Machines, count: int) -> None:
    hosts = ",".join(f"h{number}:2" for number in range(1, count + 1))
    code, out, err = cluster.horovodrun("-np", str(2 * count), "-H", hosts, *ADD)
    assert code == 0, err
    size = 2 * count
    total = float(sum(range(size)))
    assert lines(out) == [f"{rank} h{rank // 2 + 1} 10.77.0.{rank // 2 + 1} {total}" for rank in range(size)]
    assert err == ""


def test_ranks_are_given_out_host_by_host_and_no_more_hosts_are_used_than_needed(cluster: Machines) -> None:
    code, out, err = cluster.horovodrun("-np", "4", "-H", "h2,h1:2,h3:3,no-such-host:9", *PLACE)
    assert code == 0, err
    assert lines(out) == [
        "0 4 0 1 0 3 h2 h2",
        "1 4 0 2 1 3 h1 h1",
        "2 4 1 2 0 1 h1 h1",
        "3 4 0 1 2 3 h3 h3",
    ]


def test_a_machine_that_may_bind_to_addresses_of_others_knows_its_own(cluster: Machines) -> None:
    setting = "net.ipv4.ip_nonlocal_bind"  # As where a service moves from machine to machine with its address.
    cluster["h1"].run(f"sysctl -qw {setting}=1")
    try:
        code, out, err = cluster.horovodrun("-np", "2", "-H", "10.77.0.1,10.77.0.2", "uname", "-n")
    finally:
        cluster["h1"].run(f"sysctl -qw {setting}=0")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0]<stdout>:h1", "[1]<stdout>:h2"]


def test_a_job_of_one_other_machine_needs_no_server(cluster: Machines) -> None:
    code, out, err = cluster.horovodrun("-np", "2", "-H", "h3:2", *ADD)
    assert code == 0, err
    assert lines(out) == ["0 h3 None 1.0", "1 h3 None 1.0"]


def test_a_hostfile_names_machines(cluster: Machines, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two of them\nh2 slots=1\nh4 slots=1\n")
    code, out, err = cluster.horovodrun("-np", "2", "--hostfile", str(path), *ADD)
    assert code == 0, err
    assert lines(out) == ["0 h2 10.77.0.2 1.0", "1 h4 10.77.0.4 1.0"]


@pytest.mark.parametrize("hosts", ["h1-6,h2-6", "[fd77::1],[fd77::2]:1"])
def test_hosts_may_be_reached_by_ipv6(cluster: Machines, hosts: str) -> None:
    code, out, err = cluster.horovodrun("-np", "2", "-H", hosts, *ADD, on="h3")
    assert code == 0, err
    assert lines(out) == ["0 h1 fd77::1 1.0", "1 h2 fd77::2 1.0"]


def test_the_machine_that_starts_a_job_need_not_be_reached_by_the_others(cluster: Machines) -> None:
    """As a laptop behind a firewall: only ssh leads from it to them."""
    with cluster["h4"].filtered("ct state new drop"):
        code, out, err = cluster.horovodrun("-np", "2", "-H", "h1,h2", *ADD, on="h4")
    assert code == 0, err
    assert lines(out) == ["0 h1 10.77.0.1 1.0", "1 h2 10.77.0.2 1.0"]


def test_interfaces_may_be_chosen(cluster: Machines) -> None:
    arguments = ["-np", "2", "-H", "h1,h2", "--network-interfaces"]
    code, out, err = cluster.horovodrun(*arguments, "ib0,eth0", *ADD)
    assert code == 0, err
    assert lines(out) == ["0 h1 10.77.0.1 1.0", "1 h2 10.77.0.2 1.0"]
    code, out, err = cluster.horovodrun(*arguments, "ib0", *ADD)
    assert (code, out) == (2, "")
    assert "h2: it has no network interface ib0 (there are: lo, eth0)" in err


def test_environment_and_directory_reach_the_workers_but_not_the_login(cluster: Machines, tmp_path: Path) -> None:
    show = script("print(os.getcwd(), os.environ['WORD'], *map(os.environ.get, ('HOME', 'DISPLAY', 'PWD')))")
    word = "with 'quotes', $HOME\nand a second line \udcff"
    arguments = ["-np", "2", "-H", "h2,h3", *show]
    environment = {"WORD": word, "HOME": "/elsewhere", "DISPLAY": ":0"}
    # A link that leads elsewhere on h3, as those to a host's own disk do.
    work, work_of_h3 = tmp_path / "work", tmp_path / "work-of-h3"
    for folder, disk in ((work, "disk1"), (work_of_h3, "disk2")):
        (folder / disk).mkdir(parents=True)
        (folder / "here").symlink_to(disk)
    with (
        cluster["h3"].mounted(str(work_of_h3), str(work)),
        MachineLauncher(cluster["h1"], work / "here", arguments, environment) as launcher,
    ):
        code, out, err = launcher.finish()
    assert code == 0, err
    assert out.count(f"[0]<stdout>:{work}/disk1 with 'quotes', $HOME") == 1
    assert out.count(f"[1]<stdout>:{work}/disk2 with 'quotes', $HOME") == 1
    assert out.count(f"second line \ufffd {Path.home()} None {work}/here\n") == 2


def test_a_port_and_a_key_may_be_given(cluster: Machines) -> None:
    configuration = cluster.folder / "ssh/ssh_config"
    before = configuration.read_text()
    configuration.write_text("".join(line + "\n" for line in before.splitlines() if "IdentityFile" not in line))
    try:
        with cluster["h2"].with_sshd_options("Port 2222"), cluster["h2"].filtered("tcp dport 22 reject"):
            options = ["-p", "2222", "-i", str(cluster.folder / "user.key")]
            code, out, err = cluster.horovodrun("-np", "1", "-H", "h2", *options, "echo", "hello")
            assert (code, out) == (0, "[0]<stdout>:hello\n"), err
            from_home = os.path.relpath(cluster.folder / "user.key", Path.home())
            code, out, err = cluster.horovodrun("-np", "1", "-H", "h2", *options[:3], f"~/{from_home}", "echo", "hello")
            assert (code, out) == (0, "[0]<stdout>:hello\n"), err
            code, _, err = cluster.horovodrun("-np", "1", "-H", "h2", *options[:2], "echo", "hello")
            assert code == 1
            assert "h2: ssh was not let in" in err
    finally:
        configuration.write_text(before)


def test_what_belongs_to_another_job_does_not_reach_the_workers(cluster: Machines, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of another job")
    other: dict[str, Any] = {"HOROVOD_SECRET_KEY_FILE": str(tmp_path / "key"), "HOROVOD_HOST_ADDRESS": "192.0.2.1"}
    code, out, err = cluster.horovodrun("-np", "2", "-H", "h1,h2", *ADD, **other)
    assert code == 0, err
    assert lines(out) == ["0 h1 10.77.0.1 1.0", "1 h2 10.77.0.2 1.0"]


SEND_SECRETS = script(
    """
    import numpy as np
    import horovod.numpy as hvd
    hvd.init()
    mine = np.frombuffer(b"what nobody else must see " * 10_000, np.uint8) if rank == 0 else np.zeros(260_000, np.uint8)
    print(hvd.broadcast(mine, root_rank=0, name="a-telling-name").tobytes() == b"what nobody else must see " * 10_000)
    """
)


@pytest.mark.parametrize("encrypt", [True, False])
def test_what_ranks_send_each_other_is_encrypted_if_the_command_line_says_so(cluster: Machines, encrypt: bool) -> None:
    with tapping(cluster["h1"].pid) as tap:
        options = ["--encrypt"] if encrypt else []
        code, out, err = cluster.horovodrun("-np", "2", "-H", "h1,h2", *options, *SEND_SECRETS)
        seen = tap.stop()
    assert (code, lines(out), err) == (0, ["True", "True"], "")
    assert len(seen) > 260_000
    # In clear it can be seen, so the tap is at the right place; names of tensors are control traffic.
    assert (b"what nobody else must see " * 20 in seen) == (not encrypt)
    assert b"a-telling-name" not in seen


def test_one_ssh_a_host_leads_to_the_others_with_settings_and_no_secrets_on_command_lines(
    cluster: Machines, tmp_path: Path
) -> None:
    show = script(
        """
        import horovod.numpy as hvd
        def command_line(pid):
            try: return open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError: return b""  # it has just ended
        hvd.init()
        everyone = [command_line(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        secrets = [os.environ[name].encode() for name in ("HOROVOD_SECRET_KEY", "PASSWORD")]
        told = [line for line in everyone if any(secret in line for secret in secrets)]
        ssh = [line for line in everyone if line.split(b"\\0")[0].endswith(b"ssh")]
        agent = open(f"/proc/{os.getppid()}/comm").read().strip()
        print(rank, os.uname().nodename, agent, *map(len, secrets), told, len(ssh), os.environ["HOROVOD_CYCLE_TIME"],
              hvd.allreduce([1.0], op=hvd.Sum)[0])
        """
    )
    settings = tmp_path / "settings.yaml"
    settings.write_text("params:\n  cycle_time_ms: 2.5\n")
    options = ["--verbose", "--config-file", str(settings)]
    code, out, err = cluster.horovodrun("-np", "4", "-H", "localhost,h2:2,h3", *options, *show, PASSWORD="pa55w0rd")
    assert code == 0, err
    places = [(0, "h1", 2), (1, "h2", 0), (2, "h2", 0), (3, "h3", 0)]
    assert lines(out) == [f"{rank} {host} horovod-agent 64 8 [] {ssh} 2.5 4.0" for rank, host, ssh in places]
    told = err.splitlines()
    for line in (
        "Remote host found: h2",
        "Remote host found: h3",
        "Setting HOROVOD_CYCLE_TIME=2.5.",
        "horovodrun: SSH was successful into all the remote hosts.",
        "horovodrun: Host localhost is reached at 10.77.0.1 (eth0).",
        "horovodrun: Host h3 is reached at 10.77.0.3 (eth0).",
    ):
        assert line in told, err
    assert "Remote host found: localhost" not in told
    python = platform.python_version()
    assert f"horovodrun: Host h2 is there: Python {python}, its own name is h2." in told
    assert re.search(r"^Process 2 started on h2: \d+\.$", err, re.MULTILINE)
    assert "pa55w0rd" not in err


def test_who_attacks_a_port_of_a_job_is_told_where_it_was_started(cluster: Machines, tmp_path: Path) -> None:
    """The only port during training is the server's, of the agent on the host of rank 0."""
    train = script(
        """
        import horovod.numpy as hvd
        hvd.init()
        open(os.environ["READY"], "w").close()
        while not hvd.allreduce([float(os.path.exists(os.environ["ATTACKED"]))], op=hvd.Max)[0]: pass
        print("content")
        """
    )
    bomb, letter, attacked = tmp_path / "executed", tmp_path / "letter", tmp_path / "attacked"
    settings = {"READY": str(tmp_path / "ready"), "ATTACKED": str(attacked)}
    with cluster.launch("-np", "2", "-H", "h1,h2", *train, on="h4", **settings) as launcher:
        wait_until((tmp_path / "ready").exists, "it trains", 40)
        ports = [re.findall(r" 10\.77\.0\.\d:(\d+) ", cluster[host].run("ss -Hltn")) for host in ("h1", "h2")]
        assert [len(some) for some in ports] == [1, 0]
        for data in pickles(bomb).values():
            letter.write_bytes(data + bytes(200))
            cluster["h3"].run(
                f"timeout 20 bash -c 'exec 3<>/dev/tcp/10.77.0.1/{ports[0][0]}; cat {letter} >&3; cat <&3 || true'"
            )
        attacked.touch()
        code, out, err = launcher.finish(60)
    assert (code, lines(out)) == (0, ["content"] * 2), err
    away = "horovodrun: rendezvous: turned a connection from 10.77.0.3 away: it does not speak this protocol\n"
    assert err == away * len(pickles(bomb))
    assert not bomb.exists()


def test_output_of_all_machines_is_forwarded_and_saved(cluster: Machines, tmp_path: Path) -> None:
    talk = script(
        """
        for i in range(20000): print(rank, i)
        print("end of", rank, file=sys.stderr)
        """
    )
    code, out, err = cluster.horovodrun("-np", "2", "-H", "h2,h3", "--output-filename", str(tmp_path / "logs"), *talk)
    assert code == 0
    for rank in (0, 1):
        numbers = [line for line in out.splitlines() if line.startswith(f"[{rank}]<stdout>:")]
        assert numbers == [f"[{rank}]<stdout>:{rank} {i}" for i in range(20000)]
        assert f"[{rank}]<stderr>:end of {rank}\n" in err
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_text().splitlines()[-1] == f"{rank} 19999"


def test_a_failure_is_told_even_if_nobody_reads_the_output(cluster: Machines, tmp_path: Path) -> None:
    talk = script(
        """
        full = os.environ["FULL"]
        if rank == 1:
            while not os.path.exists(full): time.sleep(0.01)
            sys.exit(5)
        os.set_blocking(1, False)
        last = time.monotonic()
        while True:
            try:
                os.write(1, b"x" * 99 + b"\\n")
                last = time.monotonic()
            except BlockingIOError:  # all pipes up to the launcher's are full when nothing goes on any more
                if time.monotonic() > last + 0.5: open(full, "w").close()
                time.sleep(0.01)
        """
    )
    settings = {"FULL": str(tmp_path / "full"), "HOROVOD_GRACE_SECONDS": "1"}
    with cluster.launch("-np", "2", "-H", "h2,h3", *talk, **settings) as launcher:
        assert launcher.process.stderr is not None
        assert launcher.process.stderr.readline() == b"Process 1 exit with status code 5.\n"
        code, _, err = launcher.finish(60)
    assert code == 5
    assert "the first process to fail was rank 1 of 2" in err


@pytest.mark.parametrize("victim", [0, 3])
def test_the_first_failure_is_reported_with_its_host_and_the_others_are_ended(cluster: Machines, victim: int) -> None:
    fail = script(
        f"""
        import horovod.numpy as hvd
        hvd.init()
        if rank == {victim}:
            print("out of luck", file=sys.stderr)
            os._exit(7)
        hvd.allreduce([1.0])
        """
    )
    code, _, err = cluster.horovodrun("-np", "4", "-H", "h1:2,h2:2", *fail, HOROVOD_GRACE_SECONDS="2")
    assert code == 7, err
    assert f"Process {victim} exit with status code 7." in err
    assert f"the first process to fail was rank {victim} of 4: it ended with status code 7." in err
    assert f"  host:    h{victim // 2 + 1}\n" in err
    assert "    out of luck" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_workers_on_all_machines(cluster: Machines, signum: signal.Signals, tmp_path: Path) -> None:
    worker = script(
        f"""
        signal.signal({signum.value}, lambda n, _: (print("got", n), os._exit(0)))
        ready = f"{{os.environ['READY']}}.{{rank}}"
        signal.signal(signal.SIGUSR1, lambda n, _: os.rename(ready, f"{{ready}}.heard"))
        open(ready, "w").close()
        while True: time.sleep(1)
        """
    )
    with cluster.launch("-np", "2", "-H", "h2,h3", *worker, READY=str(tmp_path / "ready")) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "all workers are ready")
        launcher.signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("ready.*.heard"))) == 2, "all workers have heard a user signal")
        launcher.signal(signum)
        code, out, err = launcher.finish()
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:got {signum.value}" for r in (0, 1)]
    assert f"{signum.name} ({signum.value}) received" in err
    cluster.wait_until_nothing_is_left()


def test_nothing_is_left_on_any_machine_when_the_launcher_is_killed(cluster: Machines, tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    with cluster.launch("-np", "3", "-H", "h1,h2,h3", *WAIT, READY=ready, HOROVOD_GRACE_SECONDS="1") as launcher:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 3, "all workers are ready")
        launcher.signal(signal.SIGKILL)
        launcher.wait_until_nothing_is_left()
    cluster.wait_until_nothing_is_left()


@pytest.mark.parametrize(
    ("where", "command", "told"),
    [
        pytest.param("h1", " -- h3 ", "ssh was killed by SIGKILL (9) here. Was this machine out of", id="ssh"),
        pytest.param("h3", "sshd: root@notty", "ssh ended with exit code 255. Has h3 gone down, or was", id="sshd"),
        pytest.param("h3", f"{sys.executable} -P -m horovod.runner.agent", "ssh ended with exit code", id="agent"),
    ],
)
def test_whoever_of_those_that_lead_to_a_host_is_killed_its_workers_and_the_job_end(
    cluster: Machines, tmp_path: Path, where: str, command: str, told: str
) -> None:
    # No silence is long enough to end anything: that the connection has ended must be noticed as such.
    settings = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "1000", "HOROVOD_GRACE_SECONDS": "1"}
    with cluster.launch("-np", "2", "-H", "h2,h3", *WAIT, READY=str(tmp_path / "ready"), **settings) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "all workers are ready")
        cluster[where].signal(command, signal.SIGKILL)
        code, _, err = launcher.finish_here()
        launcher.wait_until_nothing_is_left()
        cluster.wait_until_nothing_is_left()
    assert code == 1
    assert f"horovodrun: lost host h3 (rank 1): the connection to it ended: {told}" in err


def test_a_command_or_a_directory_that_a_machine_does_not_have(cluster: Machines, tmp_path: Path) -> None:
    only_here = tmp_path / "here"
    only_here.mkdir()
    arguments = ["-np", "2", "-H", "h1,h2", *PLACE]
    with (
        cluster["h2"].mounted("tmpfs", str(tmp_path)),
        MachineLauncher(cluster["h1"], only_here, arguments, {}) as launcher,
    ):
        code, _, err = launcher.finish()
    assert code == 2
    assert f"host h2: the directory that horovodrun was started in, {only_here}, can't be used there" in err
    code, _, err = cluster.horovodrun("-np", "1", "-H", "h2", "no-such-program")
    assert code == 2
    assert "can't start rank 0 on host h2: no-such-program: No such file or directory" in err


def test_this_python_is_the_one_there(cluster: Machines) -> None:
    code, out, err = cluster.horovodrun("-np", "1", "-H", "h2", "sh", "-c", "tr '\\0' ' ' </proc/$PPID/cmdline")
    assert code == 0, err
    assert out == f"[0]<stdout>:{sys.executable} -P -m horovod.runner.agent \n"
