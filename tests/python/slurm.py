"""A small Slurm on the machines of machines.py: munged and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Sequence

from machines import Machines
from skipping import skip
from waiting import wait_until

_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge", "srun": "slurm-client"}
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# Nothing of the kernel that a container may lack. All files are in /run, which each machine has for itself.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={names} CPUs=2 State=UNKNOWN
PartitionName=all Nodes={names} Default=YES MaxTime=10 State=UP
"""
_PROMPT = "next, please> "
_START = """
mkdir -p /run/munge /run/slurmctld /run/slurmd
munged --force --key-file={folder}/munge.key --seed-file=/run/munge/seed --pid-file=/run/munge/pid \
    --log-file=/run/munge/log </dev/null >/dev/null 2>&1
export SLURM_CONF={folder}/slurm.conf
{controller}
slurmd -N $(hostname) </dev/null >/dev/null 2>&1
"""


class Slurm:
    """A running Slurm; it ends with its machines."""

    def __init__(self, cluster: Machines) -> None:
        missing = [package for program, package in _PROGRAMS.items() if not shutil.which(program, path=_PATH)]
        if missing:
            skip(f"not installed: the Debian package {', '.join(missing)}")
        self._cluster, self._first = cluster, cluster.all[0]
        folder = cluster.folder
        names = ",".join(machine.name for machine in cluster.all)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(first=self._first.name, folder=folder, names=names))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        for machine in cluster.all:
            controller = "slurmctld </dev/null >/dev/null 2>&1" if machine is self._first else ""
            machine.run(f"PATH={_PATH}:$PATH\n" + _START.format(folder=folder, controller=controller))
        wait_until(self._is_up, "all nodes of Slurm are idle", 60)

    def _is_up(self) -> bool:
        told = self.run("sinfo", "-h", "-o", "%T %D", check=False).stdout.split()
        return told == ["idle", str(len(self._cluster.all))]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first machine."""
        words = ["env", f"SLURM_CONF={self._cluster.folder}/slurm.conf", *command]
        ended = subprocess.run(self._first.command(words), capture_output=True, text=True, timeout=120, check=False)
        assert not check or ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended

    def run_on_terminal(self, command: Sequence[str], typed: Sequence[str] = (), seconds: float = 60.0) -> str:
        """Runs a command on a terminal of the first machine; each line is typed at the next prompt of its shell.

        Returns:
            What the terminal shows, with the prompts taken out.
        """
        words = ["env", f"SLURM_CONF={self._cluster.folder}/slurm.conf", f"PS1={_PROMPT}", "TERM=dumb", *command]
        ours, theirs = pty.openpty()
        try:
            process = subprocess.Popen(
                self._first.command(words), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
            )
            os.close(theirs)
            shown, deadline = "", time.monotonic() + seconds
            waiting = list(typed)
            while True:
                left = deadline - time.monotonic()
                if left < 0 or not select.select([ours], [], [], left)[0]:
                    process.kill()
                    raise AssertionError(f"{command} did not end within {seconds:g} s. The terminal shows:\n{shown}")
                try:
                    shown += os.read(ours, 1 << 16).decode(errors="replace")
                except OSError:  # The last one who had the other end open has closed it.
                    break
                if waiting and shown.count(_PROMPT) > len(typed) - len(waiting):
                    os.write(ours, waiting.pop(0).encode() + b"\n")
            process.wait()
            return shown.replace("\r", "").replace(_PROMPT, "")
        finally:
            os.close(ours)
