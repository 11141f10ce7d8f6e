"""Several machines on this one: each has its own network, host name, processes and sshd, and they share a switch.

A machine is a set of namespaces (network, host name, mounts, processes) with a shell as its first process, and an
interface eth0 on a bridge, which is in a network namespace of its own. All of it lives as long as its first process:
nothing has a name on this machine, and nothing is left behind. The files are those of this machine, but for
/etc/hosts, /etc/resolv.conf (there are no name servers), /etc/ssh, and the home's .ssh and .bashrc: a login is not to
do what its user has there, and leave half of it behind when a machine is switched off.

    h1: 10.77.0.1, fd77::1    h2: 10.77.0.2, fd77::2    ...

They may have a second network too, eth1 with 10.78.0.1, ..., and then also an interface docker0, which leads nowhere
and has the same address on all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launching import HOROVODRUN, Launcher
from skipping import skip
from waiting import wait_until

_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "unshare": "util-linux"}
SHARED_ADDRESS = "172.17.0.1"  # Of docker0, on all machines.
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_FIRST_PROCESS = """
    read -r go
    hostname {name}
    mount --bind {folder}/hosts /etc/hosts
    mount --bind {folder}/no-name-servers /etc/resolv.conf
    mount -t tmpfs none /run && mkdir /run/sshd
    mount --bind {folder}/ssh /etc/ssh
    if [ -d {home}/.ssh ]; then mount --bind {folder}/empty {home}/.ssh; fi
    if [ -e {home}/.bashrc ]; then mount --bind {folder}/no-settings {home}/.bashrc; fi
    ip link set lo up
    echo ready
    while :; do
        if [ ! -e {folder}/{name}.no-sshd ]; then {sshd} -D -e -f {folder}/{name}.sshd 2>>{folder}/{name}.log; fi
        sleep 0.1
    done
"""
_SSHD = """
    Port 22
    HostKey {folder}/{name}.key
    AuthorizedKeysFile {folder}/user.key.pub
    PermitRootLogin prohibit-password
    PasswordAuthentication no
    KbdInteractiveAuthentication no
    StrictModes no
    UsePAM no
    PidFile none
    MaxStartups 100
"""
_SSH = """
    IdentityFile {folder}/user.key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    HashKnownHosts no
"""


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    missing = [package for program, package in _PROGRAMS.items() if not _which(program)]
    if missing:
        return f"not installed: the Debian package {', '.join(missing)}"
    allowed = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "" if allowed.returncode == 0 else f"namespaces are not allowed here: {allowed.stderr.decode().strip()}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter_network(fd: int) -> None:
    """Has this thread be in a network."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _only_child(pid: int) -> int:
    def find() -> int:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    return wait_until(find, f"a child of {pid}")


def _ip(lines: Sequence[str], pid: int = 0) -> None:
    """Runs commands of ip, in the network of a process."""
    enter = ["nsenter", "-t", str(pid), "--net"] if pid else []
    subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)


class Machine:
    """One machine."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"h{number}"
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self._folder = folder
        script = _FIRST_PROCESS.format(name=self.name, folder=folder, home=Path.home(), sshd=_which("sshd"))
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
        self.pid = _only_child(self._holder.pid)
        self._processes = os.readlink(f"/proc/{self.pid}/ns/pid")  # Its namespace of processes.

    def boot(self) -> None:
        """Lets its first process go on; its network must be there."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(b"go\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == b"ready\n"

    def power_off(self) -> None:
        """Ends it with all its processes, at once."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()

    def command(self, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """A command that runs a command there."""
        # The shell is between: nsenter itself would stop together with its child, and only both could go on.
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--no-fork"]
        enter = ["nsenter", "-t", str(self.pid), *namespaces, "--"]
        return [*enter, "sh", "-c", 'cd "$0" && "$@"; exit $?', str(folder or self._folder), *command]

    def run(self, command: str) -> str:
        """Runs a shell command there and returns what it writes."""
        done = subprocess.run(self.command(["sh", "-c", command]), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}"
        return done.stdout

    def processes(self, text: str) -> dict[int, str]:
        """The command lines of its processes that hold a text, by the pids that they have outside of it."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # It has just ended.
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == self._processes:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if text in line:
                        found[int(folder.name)] = line
        return found

    def signal(self, text: str, signum: int) -> None:
        """Sends a signal to the one process whose command line holds a text."""
        found = self.processes(text)
        assert len(found) == 1, f"{self.name}: {len(found)} processes with '{text}': {found}"
        os.kill(next(iter(found)), signum)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Has this thread be in its network for the time of a block; a socket stays in the one that it was made in."""
        with open("/proc/thread-self/ns/net") as here, open(f"/proc/{self.pid}/ns/net") as there:
            _enter_network(there.fileno())
            try:
                yield
            finally:
                _enter_network(here.fileno())

    def is_connected(self) -> bool:
        """Whether all its interfaces are up, which the kernel takes note of a moment after they were made."""
        return "DOWN" not in self.run("ip -brief link")

    def is_sshd_there(self) -> bool:
        """Whether somebody listens for ssh there."""
        return bool(self.processes("[listener]"))

    @contextlib.contextmanager
    def without_sshd(self) -> Iterator[None]:
        """Has nobody listen for ssh there for the time of a block."""
        stop = self._folder / f"{self.name}.no-sshd"
        stop.touch()
        try:
            self._end_sshd()
            wait_until(lambda: not self.is_sshd_there(), "sshd has ended")
            yield
        finally:
            stop.unlink()
            wait_until(self.is_sshd_there, "sshd is there again")

    @contextlib.contextmanager
    def with_sshd_options(self, *options: str) -> Iterator[None]:
        """Has its sshd run with other options for the time of a block."""
        path = self._folder / f"{self.name}.sshd"
        before = path.read_text()
        path.write_text("\n".join(options) + before)
        try:
            with self.without_sshd():
                pass
            yield
        finally:
            path.write_text(before)
            with self.without_sshd():
                pass

    @contextlib.contextmanager
    def mounted(self, source: str, at: str) -> Iterator[None]:
        """Has a file or folder in place of another, on this machine only; "tmpfs": an empty folder."""
        self.run(f"mount -t tmpfs none {at}" if source == "tmpfs" else f"mount --bind {source} {at}")
        try:
            yield
        finally:
            self.run(f"umount --lazy {at}")  # Something may still use it, after a failure.

    @contextlib.contextmanager
    def filtered(self, *rules: str) -> Iterator[None]:
        """Has rules of nftables for what comes in at eth0, for the time of a block; see `counted`."""
        if not _which("nft"):
            skip("not installed: the Debian package nftables")
        self.run("nft add table inet t")
        try:
            self.run("nft add chain inet t c '{ type filter hook input priority 0; }'")
            for rule in rules:
                self.run(f"nft add rule inet t c iif eth0 {rule}")
            yield
        finally:
            self.run("nft delete table inet t")

    def counted(self) -> int:
        """How many packets have come to the `counter` in the rules of `filtered`."""
        return int(re.findall(r"counter packets (\d+)", self.run("nft list table inet t"))[0])

    def _end_sshd(self) -> None:
        for pid in self.processes("[listener]"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class MachineLauncher(Launcher):
    """A running horovodrun on a machine."""

    def __init__(self, machine: Machine, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._start(machine.command([*HOROVODRUN, *arguments], folder), environment)

    @property
    def pid(self) -> int:
        return _only_child(self.process.pid)  # The shell's.

    def signal(self, signum: int) -> None:
        """Sends a signal to horovodrun itself."""
        os.kill(self.pid, signum)


class Machines:
    """Some machines and the switch between them."""

    def __init__(self, count: int, folder: Path, delays: Mapping[str, float], two_networks: bool) -> None:
        self.folder = folder
        self._delays, self._two_networks = delays, two_networks
        self._cables: list[subprocess.Popen[bytes]] = []
        self._switch = subprocess.Popen(
            ["unshare", "--net", "--kill-child", "--fork", "sleep", "infinity"],
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
        self._switch_pid = _only_child(self._switch.pid)
        self.all: list[Machine] = []
        try:
            self._write_files(count)
            self.all = [Machine(number, folder) for number in range(1, count + 1)]
            self._connect()
            for machine in self.all:
                machine.boot()
            for machine in self.all:
                wait_until(machine.is_sshd_there, f"sshd of {machine.name} listens")
                wait_until(machine.is_connected, f"the cables of {machine.name} are plugged in")
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Machine:
        return next(machine for machine in self.all if machine.name == name)

    def close(self) -> None:
        """Ends all of them."""
        for machine in self.all:
            machine.power_off()
        for process in (self._switch, *self._cables):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def launch(self, *arguments: str, on: str = "h1", **environment: str) -> MachineLauncher:
        """Starts horovodrun on a machine."""
        return MachineLauncher(self[on], self.folder, arguments, environment)

    def horovodrun(
        self, *arguments: str, on: str = "h1", seconds: float = 60.0, **environment: str
    ) -> tuple[int, str, str]:
        """Runs horovodrun on a machine: exit code, stdout, stderr. Nothing may be left of the job on any machine."""
        with self.launch(*arguments, on=on, **environment) as launcher:
            outcome = launcher.finish(seconds)
        self.wait_until_nothing_is_left()
        return outcome

    def wait_until_nothing_is_left(self, seconds: float = 20.0) -> None:
        """Waits until no machine has an agent, or what leads to one."""
        wait_until(
            lambda: not [line for machine in self.all for line in machine.processes("horovod.runner")],
            "no agent is left",
            seconds,
        )

    def cut(self, machine: Machine) -> None:
        """Pulls its cable."""
        _ip([f"link set {machine.name} down"], self._switch_pid)

    def mend(self, machine: Machine) -> None:
        """Plugs it in again."""
        _ip([f"link set {machine.name} up"], self._switch_pid)

    def _connect(self) -> None:
        _ip(["link add br0 type bridge", "link set br0 up"], self._switch_pid)
        if self._two_networks:
            self._connect_to_second_network()
        for machine in self.all:
            if machine.name in self._delays:
                self._connect_slowly(machine, self._delays[machine.name])
            else:
                mine = f"name {machine.name} netns {self._switch_pid}"
                _ip([f"link add {mine} type veth peer name eth0 netns {machine.pid}"])
            _ip([f"link set {machine.name} master br0 up"], self._switch_pid)
            _ip(
                [
                    f"addr add {machine.address}/24 dev eth0",
                    f"addr add {machine.address6}/64 dev eth0 nodad",
                    "link set eth0 up",
                ],
                machine.pid,
            )

    def _connect_to_second_network(self) -> None:
        """Before the first: what is made first is listed first, and so would be chosen first."""
        _ip(["link add br1 type bridge", "link set br1 up"], self._switch_pid)
        for number, machine in enumerate(self.all, 1):
            _ip(
                [
                    "link add docker0 type bridge",
                    "link add container type veth peer name inside",  # A bridge with nothing at it is down.
                    "link set container master docker0 up",
                    "link set inside up",
                    f"addr add {SHARED_ADDRESS}/16 dev docker0",
                    "link set docker0 up",
                ],
                machine.pid,
            )
            mine = f"name {machine.name}-1 netns {self._switch_pid}"
            _ip([f"link add {mine} type veth peer name eth1 netns {machine.pid}"])
            _ip([f"link set {machine.name}-1 master br1 up"], self._switch_pid)
            _ip([f"addr add 10.78.0.{number}/24 dev eth1", "link set eth1 up"], machine.pid)

    def _connect_slowly(self, machine: Machine, delay: float) -> None:
        program = Path(__file__).with_name("slow_cable.py")
        arguments = [str(self._switch_pid), str(machine.pid), machine.name, str(delay)]
        cable = subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE)
        self._cables.append(cable)
        assert cable.stdout is not None and cable.stdout.readline() == b"ready\n"

    def _write_files(self, count: int) -> None:
        for name in ("ssh", "empty"):
            (self.folder / name).mkdir()
        for name in ("no-name-servers", "no-settings"):
            (self.folder / name).touch()
        names = [f"h{number}" for number in range(1, count + 1)]
        for name in ("user", *names):
            key = str(self.folder / f"{name}.key")
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
        for name in names:
            (self.folder / f"{name}.sshd").write_text(_SSHD.format(folder=self.folder, name=name))
        (self.folder / "ssh/ssh_config").write_text(_SSH.format(folder=self.folder))
        lines = [f"10.77.0.{number} h{number}\nfd77::{number} h{number}-6" for number in range(1, count + 1)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + "\n".join(lines) + "\n")
        with open(self.folder / "known_hosts", "w") as known:
            for number, name in enumerate(names, 1):
                kind, key = (self.folder / f"{name}.key.pub").read_text().split()[:2]
                known.write(f"{name},{name}-6,10.77.0.{number},fd77::{number} {kind} {key}\n")


@contextlib.contextmanager
def machines(
    count: int, folder: Path, delays: Mapping[str, float] | None = None, *, two_networks: bool = False
) -> Iterator[Machines]:
    """Some machines for the time of a block; without them, as `skip`.

    Args:
        count: How many.
        folder: For their files.
        delays: The seconds that a frame takes on its way to or from a machine, by name.
        two_networks: Whether they also have eth1 and docker0.
    """
    reason = why_not()
    if reason:
        skip(reason)
    made = Machines(count, folder, delays or {}, two_networks)
    try:
        yield made
    finally:
        made.close()
