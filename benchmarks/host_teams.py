"""The teams of ranks on two hosts: this project and gloo, Open MPI, and a plain socket program as the limit."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hosts import ADDRESSES, INTERFACE, NAMES, TwoHosts
from mpi_environments import Mpi
from subject import GLOO, HOROVOD, LIMIT, OPEN_MPI
from teams import LimitTeam, Stadium, told

_HERE = Path(__file__).resolve().parent
HOST_WAYS = (HOROVOD, GLOO, OPEN_MPI, LIMIT)


class HostStadium(Stadium):
    """All teams with so many ranks on each of two hosts."""

    def __init__(self, per_host: int, mpis: Sequence[Mpi], limit: Path, hosts: TwoHosts) -> None:
        """Starts them when entered. Of the MPIs Open MPI alone is used."""
        super().__init__(per_host * len(NAMES), [mpi for mpi in mpis if mpi.name == OPEN_MPI], limit)
        self.hosts = hosts
        self._per_host = per_host

    def _start_teams(self) -> None:
        pids = [str(pid) for pid in self.hosts.pids]
        start = [sys.executable, str(_HERE / "start_ranks.py"), str(self._per_host), *pids, sys.executable]
        self._start("torch", "torch", (HOROVOD, GLOO), start, {})
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
