"""The teams of ranks on two hosts: this project and gloo, Open MPI, and a plain socket program as the limit.

And in a stadium of their own, this project three times, by what it encrypts.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hosts import ADDRESSES, INTERFACE, NAMES, TwoHosts
from mpi_environments import Mpi
from subject import ALL_ENCRYPTED, CONTROL_ENCRYPTED, GLOO, HOROVOD, IN_CLEAR, LIMIT, OPEN_MPI
from teams import LimitTeam, Stadium, told

_HERE = Path(__file__).resolve().parent
HOST_WAYS = (HOROVOD, GLOO, OPEN_MPI, LIMIT)
_ENCRYPTION = {
    IN_CLEAR: {"HOROVOD_TLS_LIBRARY": "none", "HOROVOD_ENCRYPT": "0"},
    CONTROL_ENCRYPTED: {"HOROVOD_ENCRYPT": "0"},
    ALL_ENCRYPTED: {"HOROVOD_ENCRYPT": "1"},
}


class HostStadium(Stadium):
    """All teams with so many ranks on each of two hosts."""

    def __init__(self, per_host: int, mpis: Sequence[Mpi], limit: Path, hosts: TwoHosts) -> None:
        """Starts them when entered. Of the MPIs Open MPI alone is used."""
        super().__init__(per_host * len(NAMES), [mpi for mpi in mpis if mpi.name == OPEN_MPI], limit)
        self.hosts = hosts
        self._per_host = per_host

    def _start_teams(self) -> None:
        self._start("torch", "torch", (HOROVOD, GLOO), _start_ranks(self._per_host, self.hosts), {})
        for mpi in self._mpis:
            with told():
                launch = self.hosts.command(0, mpi.launch(self.ranks, self._mpi_options()))
                self._start("mpi", mpi.name, (mpi.name,), launch, mpi.environment(self.ranks))
        networks = [self.hosts.network(host) for host in range(len(NAMES))]
        self._add(LimitTeam([str(self._limit), *networks, ADDRESSES[0]]))

    def _mpi_options(self) -> list[str]:
        """Open MPI's own TCP over the cable, shared memory on a host; nsenter instead of ssh."""
        agent = self._scratch / "enter-host"
        enter = " ".join(self.hosts.command(1, ["sh", "-c", '"$*"']))
        agent.write_text(f"#!/bin/sh\n# <name of the host> <command>\nshift\nexec {enter}\n")
        agent.chmod(0o755)
        places = ",".join(f"{address}:{self._per_host}" for address in ADDRESSES)
        components = {"pml": "ob1", "btl": "self,sm,tcp", "btl_tcp_if_include": INTERFACE}
        options = ["--host", places, "--prtemca", "plm_ssh_agent", str(agent)]
        return options + [text for name, value in components.items() for text in ("--mca", name, value)]


class EncryptionStadium(Stadium):
    """This project with so many ranks on each of two hosts, a team for each thing that it may encrypt."""

    def __init__(self, per_host: int, hosts: TwoHosts) -> None:
        """Starts them when entered."""
        super().__init__(per_host * len(NAMES), (), None)
        self.hosts = hosts
        self._per_host = per_host

    def _start_teams(self) -> None:
        for way, environment in _ENCRYPTION.items():
            self._start("numpy", way, (way,), _start_ranks(self._per_host, self.hosts), environment)


def _start_ranks(per_host: int, hosts: TwoHosts) -> list[str]:
    """How this project's ranks are started there, without a launcher."""
    pids = [str(pid) for pid in hosts.pids]
    return [sys.executable, str(_HERE / "start_ranks.py"), str(per_host), *pids, sys.executable]
