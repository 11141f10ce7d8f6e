"""Machines that can't be used: one screen says which, why, and what to do."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import script
from machines import Machines, machines

import horovod

HELLO = ["echo", "hello"]
ONE_SCREEN = 24  # Lines.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three machines, h1 to h3; every test leaves them as they were."""
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


def refused(cluster: Machines, *arguments: str, hosts: str = "h1,h2,h3") -> str:
    """Runs a job that must not start, and returns what is said."""
    code, out, err = cluster.horovodrun("-np", str(hosts.count(",") + 1), "-H", hosts, *arguments, *HELLO)
    assert code == 1, err
    assert out == ""
    assert len(err.splitlines()) <= ONE_SCREEN
    assert "Traceback" not in err
    return err


def test_a_host_that_does_not_let_ssh_in(cluster: Machines) -> None:
    with cluster["h2"].with_sshd_options("AuthorizedKeysFile none"):
        err = refused(cluster, "-p", "22")
    assert "horovodrun: 1 of 3 hosts can't be used:\n  h2: ssh was not let in: it needs a key" in err
    assert "Try: ssh -p 22 h2 true" in err
    assert "Permission denied" in err


def test_a_host_without_sshd_and_one_whose_name_is_unknown_are_told_together(cluster: Machines) -> None:
    with cluster["h2"].without_sshd():
        err = refused(cluster, hosts="h1,h2,no-such-host,h3")
    assert "2 of 4 hosts can't be used:" in err
    assert "  h2: nobody listens for ssh there. Does sshd run, at this port (-p)?" in err
    assert "  no-such-host: its name is not known." in err


def test_a_host_whose_key_nobody_knows_is_not_trusted(cluster: Machines) -> None:
    known = cluster.folder / "known_hosts"
    before = known.read_text()
    known.write_text("".join(line + "\n" for line in before.splitlines() if not line.startswith("h3")))
    try:
        err = refused(cluster)
    finally:
        known.write_text(before)
    assert "  h3: its host key is not the one that ssh knows, or ssh knows none." in err


def test_a_host_that_does_not_answer(cluster: Machines) -> None:
    started = time.monotonic()
    with cluster["h3"].filtered("drop"):
        err = refused(cluster, "--start-timeout", "4")
    assert time.monotonic() - started < 20, "without the option ssh would try for 24 s"
    assert "1 of 3 hosts can't be used:\n  h3: it can't be reached by ssh. Is it up" in err
    assert "Try: ssh h3 true" in err


def test_a_host_whose_login_never_comes_to_an_end(cluster: Machines) -> None:
    started = time.monotonic()
    with cluster["h3"].with_sshd_options("ForceCommand echo 'One moment.'; exec sleep 100"):
        err = refused(cluster, "--start-timeout", "3")
    assert time.monotonic() - started < 20
    late = "nothing came within 3 s (--start-timeout): ssh got no answer from it. Try: ssh h3 true. So far: One moment."
    assert f"1 of 3 hosts can't be used:\n  h3: {late}" in err


def test_an_agent_that_stops_answering(cluster: Machines, tmp_path: Path) -> None:
    """It has said hello and is stopped before the others have: the login of h3 waits for that."""
    wait = f'ForceCommand until [ -e {tmp_path}/go ]; do sleep 0.05; done; eval "$SSH_ORIGINAL_COMMAND"'
    arguments = ["-np", "2", "-H", "h2,h3", "--start-timeout", "4", "--verbose", *HELLO]
    agent = f"{sys.executable} -P -m horovod.runner.agent"
    with cluster["h3"].with_sshd_options(wait), cluster.launch(*arguments) as launcher:
        launcher.read_stderr_until("Host h2 is there")
        cluster["h2"].signal(agent, signal.SIGSTOP)
        (tmp_path / "go").touch()
        late = "nothing came within 4 s (--start-timeout): it stopped answering while listening.\n"
        told = launcher.read_stderr_until(late)
        cluster["h2"].signal(agent, signal.SIGCONT)  # Now it hears that all is over.
        code, out, _ = launcher.finish()
    assert (code, out) == (1, "")
    assert "horovodrun: 1 of 2 hosts can't be used:\n  h2: " + late in told
    cluster.wait_until_nothing_is_left()


def test_a_host_without_the_package(cluster: Machines) -> None:
    packages = sysconfig.get_path("purelib")
    with cluster["h2"].mounted("tmpfs", packages):
        err = refused(cluster)
    assert f"  h2: Horovod is not installed for {sys.executable} there." in err
    assert f"-m pip install horovod=={horovod.__version__}" in err


def test_a_host_without_this_python(cluster: Machines) -> None:
    with cluster["h2"].mounted("tmpfs", str(Path(sys.executable).parent)):
        err = refused(cluster)
    assert f"  h2: there is no {sys.executable}, the Python that runs horovodrun here." in err


def test_a_host_whose_python_can_not_be_run(cluster: Machines, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    with cluster["h2"].mounted(str(tmp_path / "python"), str(Path(sys.executable).resolve())):
        err = refused(cluster)
    assert f"  h2: {sys.executable}, the Python that runs horovodrun here, can't be run there." in err
    assert "Permission denied" in err


def test_a_banner_is_not_taken_for_the_reason(cluster: Machines, tmp_path: Path) -> None:
    (tmp_path / "banner").write_text("Idle sessions are timed out. Others get: Permission denied.\n")
    packages = sysconfig.get_path("purelib")
    with cluster["h2"].with_sshd_options(f"Banner {tmp_path}/banner"), cluster["h2"].mounted("tmpfs", packages):
        err = refused(cluster)
    assert "Idle sessions" in err
    assert f"  h2: Horovod is not installed for {sys.executable} there." in err


def older_python() -> str:
    names = [f"python3.{minor}" for minor in range(10, 5, -1)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [*pyenv.glob("versions/*/bin"), Path("/usr/bin"), Path("/usr/local/bin")]
    for name in names:
        found = shutil.which(name, path=":".join(map(str, places)))
        if found:
            return found
    pytest.skip("there is no Python before 3.11 here")


def test_a_host_with_an_older_python(cluster: Machines) -> None:
    with cluster["h2"].mounted(older_python(), str(Path(sys.executable).resolve())):
        err = refused(cluster)
    assert f"  h2: its {sys.executable} is older than 3.11, which Horovod needs." in err


def test_a_host_with_another_version_of_the_package(cluster: Machines, tmp_path: Path) -> None:
    original = Path(horovod.__file__)
    other = tmp_path / "other.py"
    other.write_text(original.read_text().replace(horovod.__version__, "0.99"))
    with cluster["h3"].mounted(str(other), str(original)):
        err = refused(cluster)
    assert f"  h3: it has Horovod 0.99, this machine {horovod.__version__}. All hosts need the same version." in err


def test_a_host_with_a_firewall(cluster: Machines) -> None:
    started = time.monotonic()
    with cluster["h2"].filtered("tcp dport 22 accept", "ct state established accept", "meta l4proto tcp drop"):
        err = refused(cluster)
    assert time.monotonic() - started < 30
    assert "not all hosts can reach each other" in err
    assert "  h2 can't be reached by all others:\n" in err
    assert "    at 10.77.0.2 (eth0) from h1, h3: no answer within 5 s" in err
    assert "    at fd77::2 (eth0) from h1, h3: no answer within 5 s" in err
    assert "h3 can't" not in err
    assert "--network-interfaces" in err


def test_a_firewall_for_one_family_is_gone_around(cluster: Machines) -> None:
    show = script("import horovod.numpy as hvd; hvd.init(); print(os.environ['HOROVOD_HOST_ADDRESS'])")
    rules = ["tcp dport 22 accept", "ct state established accept", "meta nfproto ipv4 meta l4proto tcp reject"]
    with cluster["h2"].filtered(*rules):
        code, out, err = cluster.horovodrun("-np", "2", "-H", "h1,h2", *show)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0]<stdout>:10.77.0.1", "[1]<stdout>:fd77::2"]


def test_what_a_login_shell_says_is_no_trouble(cluster: Machines) -> None:
    noise = "ForceCommand echo 'Welcome to this machine'; printf 'no newline'; eval \"$SSH_ORIGINAL_COMMAND\""
    with cluster["h2"].with_sshd_options(noise):
        code, out, err = cluster.horovodrun("-np", "1", "-H", "h2", *HELLO)
    assert (code, out, err) == (0, "[0]<stdout>:hello\n", "")


def test_what_a_login_shell_leaves_behind_does_not_delay_the_end(cluster: Machines) -> None:
    left_behind = 'ForceCommand sleep 12 & eval "$SSH_ORIGINAL_COMMAND"'
    with cluster["h2"].with_sshd_options(left_behind):
        started = time.monotonic()
        code, out, err = cluster.horovodrun("-np", "1", "-H", "h2", *HELLO)
    assert (code, out, err) == (0, "[0]<stdout>:hello\n", "")
    assert time.monotonic() - started < 8


def test_a_login_shell_that_does_something_else(cluster: Machines) -> None:
    with cluster["h2"].with_sshd_options("ForceCommand echo 'This account is currently not available.'; exit 1"):
        err = refused(cluster, hosts="h2")
    assert "the host can't be used:\n  h2: the agent there ended at once, with exit code 1." in err
    assert "This account is currently not available." in err
