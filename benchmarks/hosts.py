"""Two hosts on this machine: network namespaces with host names of their own and one cable between them.

    h1: 10.78.0.1    h2: 10.78.0.2    (interface eth0)

They live as long as this object: nothing has a name outside of them, and nothing is left behind. Files are those of
this machine, so the gate and the director's socket are in reach of all ranks, and nothing of them goes over the cable.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

NAMES = ("h1", "h2")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
NETWORK = "10.78.0.0/24"
INTERFACE = "eth0"
# Links: as the machine has it, and as tc shapes it (both ends alike).
UNSHAPED, GIGABIT = "unshaped", "1 Gbit/s"
ALL_LINKS = (UNSHAPED, GIGABIT)
_RATES = {GIGABIT: "1gbit"}
BYTES_PER_SECOND = {GIGABIT: 1e9 / 8}
# What the shaper lets pass at once after a pause. With less it falls short of its rate when its timers are late.
_BURST = 256 << 10

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PR_SET_PDEATHSIG = 1


def pause(link: str, size: int) -> float:
    """The seconds that the shaper needs before another iteration of so many bytes, to let as much pass at once.

    Without, who takes longer between two iterations would find the cable faster.
    """
    return 1.1 * min(size, _BURST) / BYTES_PER_SECOND[link] if link in BYTES_PER_SECOND else 0.0


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts of network namespaces need root"
    missing = {package for program, package in _PROGRAMS.items() if not shutil.which(program, path=_PATH)}
    if missing:
        return f"not installed: the Debian package {', '.join(sorted(missing))}"
    allowed = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if allowed.returncode == 0 else f"namespaces are not allowed here: {allowed.stderr.decode().strip()}"


def die_with_parent() -> None:
    """In a child before its program begins: it does not outlive the thread that has started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(pid: int, command: Sequence[str]) -> list[str]:
    """A command that runs a command on the host of a process."""
    return ["nsenter", "-t", str(pid), "--net", "--uts", "--", *command]


class TwoHosts(contextlib.ExitStack):
    """The hosts, for the time of a block."""

    def __init__(self) -> None:
        """Makes them."""
        super().__init__()
        try:
            self.pids = [self._boot(name) for name in NAMES]
            first, second = self.pids
            self._ip(f"link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}")
            for host, address in enumerate(ADDRESSES):
                lines = [f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"]
                self._ip(*lines, host=host)
                # The one that every namespace may use. (bbr, the default of some machines, paces by its estimate of
                # the cable's speed, which is wrong for a long while where the cable is memory.)
                self._run(self.command(host, ["sh", "-c", "echo reno >/proc/sys/net/ipv4/tcp_congestion_control"]))
        except BaseException:
            self.close()
            raise
        self.link = UNSHAPED

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """A command that runs a command there."""
        return enter(self.pids[host], command)

    def network(self, host: int) -> str:
        """The file that stands for a host's network."""
        return f"/proc/{self.pids[host]}/ns/net"

    def shape(self, link: str) -> None:
        """Gives the cable a speed, in both directions."""
        if link == self.link:
            return
        for host in range(len(NAMES)):
            # The latency is a queue like that of a usual switch.
            qdisc = ["tc", "qdisc", "replace" if link in _RATES else "del", "dev", INTERFACE, "root"]
            shaper = ["tbf", "rate", _RATES[link], "burst", str(_BURST), "latency", "20ms"] if link in _RATES else []
            self._run(self.command(host, [*qdisc, *shaper]))
        self.link = link

    def _boot(self, name: str) -> int:
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name}; echo ready; exec sleep infinity"],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        self.callback(self._end, holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {name} does not start")
        return holder.pid

    @staticmethod
    def _end(holder: "subprocess.Popen[bytes]") -> None:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()

    def _ip(self, *lines: str, host: int | None = None) -> None:
        command = ["ip", "-batch", "-"]
        self._run(command if host is None else self.command(host, command), "\n".join(lines))

    @staticmethod
    def _run(command: Sequence[str], text: str = "") -> None:
        subprocess.run(command, input=text.encode(), env=os.environ | {"PATH": _PATH}, check=True)
