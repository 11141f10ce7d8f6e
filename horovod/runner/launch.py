"""horovodrun: options -> checks -> job -> exit code.

Exit codes: 0 all workers ended with 0; otherwise that of the first worker to fail, 128+n if signal n ended it or was
sent to the launcher; 2 for input that can't be used.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from horovod.runner import options, tunables
from horovod.runner.errors import UsageError
from horovod.runner.hosts import Host, assign_slots, host_names, is_local, parse_hostfile, parse_hosts

if TYPE_CHECKING:  # What --help and --version need not load.
    from horovod.common.rendezvous.loop import Loop
    from horovod.runner.crew import Crew, CrewEvents
    from horovod.runner.job import JobPlan

    MakeCrew = Callable[[Loop, CrewEvents], Crew]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse horovodrun's command line and configuration file and check everything that can be checked early.

    Args:
        argv: The arguments; those of this process if None.

    Raises:
        UsageError: They can't be used.
    """
    args = options.make_parser().parse_args(argv)
    if args.version or args.check_build:
        return args
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.config_file is not None:
        from horovod.runner.config_file import read_config_file

        settings, controller = read_config_file(args.config_file)
        tunables.apply_settings(args, settings)
        if controller == "mpi" and not (args.use_gloo or args.use_jsrun):
            args.use_mpi = True
    tunables.check_tunables(args)
    options.check_available(args)
    if args.num_proc is None and args.hosts is None and args.hostfile is None:
        args.num_proc = sum(host.slots for host in _allocated_hosts()) or None
    if args.num_proc is None:
        raise UsageError("the number of processes is missing: -np N (see horovodrun --help)")
    if not args.command:
        raise UsageError("the command to start is missing: horovodrun -np N COMMAND [ARG...]")
    return args


def check_build(verbose: bool = False) -> None:
    """Print which frameworks, controllers and tensor operations there are."""
    from horovod.runner.check_build import build_report

    print(build_report())
    if verbose:
        print(f"\nInstalled in {Path(__file__).parent.parent}, Python {sys.version.split()[0]}")


def _open_copies(directory: str, size: int) -> list[tuple[BinaryIO, BinaryIO]]:
    """The files of --output-filename, by rank."""
    width = len(str(size - 1))
    copies: list[tuple[BinaryIO, BinaryIO]] = []
    try:
        for rank in range(size):
            folder = Path(directory) / f"rank.{rank:0{width}}"
            folder.mkdir(parents=True, exist_ok=True)
            stdout, stderr = (open(folder / name, "wb", buffering=0) for name in ("stdout", "stderr"))  # noqa: SIM115
            copies.append((stdout, stderr))
    except OSError as error:
        raise UsageError(f"--output-filename: can't write {error.filename}: {error.strerror}") from None
    return copies


def _grace_seconds(default: float) -> float:
    text = os.environ.get("HOROVOD_GRACE_SECONDS", "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"HOROVOD_GRACE_SECONDS must be a number of seconds, not '{text}'")
    return seconds


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hostfile is not None:
        return parse_hostfile(args.hostfile)
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    return _allocated_hosts() or [Host("localhost", args.num_proc)]


def _allocated_hosts() -> list[Host]:
    """The hosts of the LSF job that horovodrun was called in, if it was."""
    from horovod.common.schedulers import lsf_hosts

    if not os.environ.get("LSB_JOBID"):
        return []
    try:
        return [Host(name, slots) for name, slots in lsf_hosts(os.environ)]
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_local(args: argparse.Namespace, is_alone: bool, takes_part: bool) -> None:
    """Check what can be checked before anything is started, as far as it concerns this machine."""
    if takes_part and shutil.which(args.command[0]) is None:
        raise UsageError(f"command not found, or not executable: {args.command[0]}")
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in args.nics or ():
        if is_alone and name not in interfaces:
            raise UsageError(f"--network-interfaces: there is no {name} here (there are: {', '.join(interfaces)})")
    if not is_alone:
        from horovod.runner.ssh import find_ssh

        if find_ssh() is None:
            raise UsageError("there is no ssh on this machine, which leads to other hosts: install OpenSSH's client")
        # A shell leaves the ~ of --ssh-identity-file=~/key as it is, and so does horovod.run; ssh knows what it means.
        key = args.ssh_identity_file
        if key is not None and not os.access(os.path.expanduser(key), os.R_OK):
            raise UsageError(f"-i: can't read {key}")
        try:
            os.getcwd()
        except OSError as error:
            raise UsageError(f"the current directory, which the workers are to have too: {error.strerror}") from None


def _local_crew(plan: JobPlan, exported: Mapping[str, str], payload: bytes | None) -> MakeCrew:
    """Workers on this machine, whose names may count as several hosts."""
    from horovod.runner.crew import Task, Work
    from horovod.runner.environment import Credentials, shared_variables, worker_environments
    from horovod.runner.local_crew import LocalCrew
    from horovod.runner.rendezvous import serve_on_loopback

    def make_crew(loop: Loop, events: CrewEvents) -> Crew:
        """In the supervisor, which is to hold the server alone."""
        credentials = Credentials()
        variables = serve_on_loopback(loop, credentials, [slot.hostname for slot in plan.slots], events.on_word)
        environments = worker_environments(plan.slots, shared_variables(exported, credentials, variables))
        tasks = [Task(rank, environment) for rank, environment in enumerate(environments)]
        return LocalCrew(loop, events, Work(plan.command, tasks, plan.grace_seconds, payload))

    return make_crew


def _cluster_crew(
    args: argparse.Namespace,
    plan: JobPlan,
    exported: Mapping[str, str],
    remote: Sequence[str],
    payload: bytes | None,
) -> MakeCrew:
    """Workers on other machines, and maybe on this one too."""
    from horovod.common.environment import read
    from horovod.runner.cluster import ClusterCrew, ClusterPlan
    from horovod.runner.ssh import SshOptions

    try:
        start_seconds = args.start_timeout or read("HOROVOD_START_TIMEOUT") or 30.0
        silence_seconds = read("HOROVOD_HEARTBEAT_TIMEOUT_SECONDS")
    except ValueError as error:
        raise UsageError(str(error)) from None

    def make_crew(loop: Loop, events: CrewEvents) -> Crew:
        cluster = ClusterPlan(
            command=plan.command,
            slots=plan.slots,
            remote=frozenset(remote),
            # A little less than all of it: what ssh says then tells more than that nothing came.
            ssh=SshOptions(args.ssh_port, args.ssh_identity_file, max(1, int(0.8 * start_seconds))),
            exported=exported,
            interfaces=args.nics or (),
            start_seconds=start_seconds,
            silence_seconds=silence_seconds,
            grace_seconds=plan.grace_seconds,
            payload=payload,
            tell=events.on_word if plan.verbose else lambda _text: None,
        )
        return ClusterCrew(loop, events, cluster)

    return make_crew


def run_job(args: argparse.Namespace, payload: bytes | None = None, results_fd: int | None = None) -> int:
    """Run the job that the arguments describe.

    Args:
        args: From `parse_args`.
        payload: What every worker is to find on standard input.
        results_fd: Where what workers return is to go.

    Returns:
        The launcher's exit code.

    Raises:
        UsageError: It can't be started as described.
    """
    from horovod.runner import job, open_files
    from horovod.runner.supervisor import run_supervised

    def tell(text: str) -> None:
        if args.verbose:
            print(text, file=sys.stderr)

    tell("Filtering local host names.")
    hosts = _hosts(args)
    slots = assign_slots(hosts, args.num_proc)
    remote = [name for name in host_names(slots) if not is_local(name)]
    for name in remote:
        tell(f"Remote host found: {name}")
    if not remote:
        tell(f"All hosts are local, starting {args.num_proc} of {sum(host.slots for host in hosts)} slots.")
    _check_local(args, is_alone=not remote, takes_part=len(remote) < len(host_names(slots)))
    exported = options.exported_variables(args)
    for variable, value in exported.items():
        tell(f"Setting {variable}={value}.")
    open_files.allow_many()
    plan = job.JobPlan(
        command=args.command,
        slots=slots,
        copies=[] if args.output_filename is None else _open_copies(args.output_filename, args.num_proc),
        timestamps=args.prefix_output_with_timestamp,
        verbose=args.verbose,
        grace_seconds=_grace_seconds(job.GRACE_SECONDS),
        results_fd=results_fd,
    )
    on_this_machine = _local_crew(plan, exported, payload)
    make_crew = _cluster_crew(args, plan, exported, remote, payload) if remote else on_this_machine
    return run_supervised(lambda pidfd, mask: job.Job(plan, make_crew, pidfd, mask).run())


def begin_process() -> None:
    """What a launcher does before anything else."""
    _open_closed_streams()
    # Until the supervisor takes signals over, Ctrl-C just ends us: no traceback, and no waiting for a slow name server.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed: other files would take its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, so this one.


def run_commandline() -> None:
    """Be `horovodrun`; ends the process."""
    begin_process()
    try:
        args = parse_args()
        if args.version:
            from horovod.runner.check_build import version

            print(version())
            code = 0
        elif args.check_build:
            check_build(args.verbose)
            code = 0
        else:
            code = run_job(args)
    except UsageError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        code = 2
    except OSError as error:
        print(f"horovodrun: the job could not be run: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    run_commandline()
