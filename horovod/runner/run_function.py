"""`horovod.run`: a function on many ranks, from a program or a notebook."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import platform
import signal
import site
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_SHOWN = 8
_ELASTIC = "elastic training is not available in this version"


def run(  # noqa: PLR0917  (they are those of the existing Horovod)
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Runs a function on every rank of a new job, as horovodrun runs a program.

    The function is sent by cloudpickle, so it may be defined in a notebook; modules that it imports must be installed
    on all hosts. Its output appears here, with the rank in front of each line.

    Args:
        func: What every rank calls; it calls hvd.init() itself.
        args: Its positional arguments.
        kwargs: Its named arguments.
        num_proc: The number of ranks.
        min_num_proc: Elastic training, which this version does not have; so are max_num_proc, slots, reset_limit,
            cooldown_range and host_discovery_script.
        max_num_proc: See min_num_proc.
        slots: See min_num_proc.
        reset_limit: See min_num_proc.
        cooldown_range: See min_num_proc.
        hosts: Hosts and their slots, such as "h1:2,h2:4"; this machine if neither this nor hostfile is given.
        hostfile: A file with lines "<host> slots=<n>".
        host_discovery_script: See min_num_proc.
        start_timeout: Seconds for all processes to have been started, and then to have called hvd.init() (30).
        ssh_port: Of all other hosts.
        ssh_identity_file: Private key for ssh.
        disable_cache: Without effect: nothing is cached.
        output_filename: A folder for the ranks' output, in addition.
        verbose: To tell what the launcher does.
        use_gloo: Without effect: the built-in engine takes Gloo's place.
        use_mpi: MPI as the starter, which this version does not have.
        mpi_args: See use_mpi.
        network_interface: Deprecated: use network_interfaces.
        network_interfaces: Interfaces to use, as a list or comma-separated.
        executable: The Python that runs the workers, with its packages (this one).
        np: Deprecated: use num_proc.
        min_np: Deprecated: use min_num_proc.
        max_np: Deprecated: use max_num_proc.

    Returns:
        What the function returned, by rank.

    Raises:
        ValueError: Arguments that contradict each other, or can't be used.
        NotImplementedError: An argument of a feature that this version does not have.
        RuntimeError: A rank failed; the text has its rank and traceback, `__cause__` is the exception itself if it
            could be sent.
    """
    num_proc = _renamed("np", np, "num_proc", num_proc)
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    network_interfaces = _renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    if hosts is not None and hostfile is not None:
        raise ValueError("horovod.run: give hosts or hostfile, not both.")
    if use_gloo and use_mpi:
        raise ValueError("horovod.run: give use_gloo or use_mpi, not both.")
    for name, value in (
        ("min_num_proc", min_num_proc),
        ("max_num_proc", max_num_proc),
        ("slots", slots),
        ("reset_limit", reset_limit),
        ("cooldown_range", cooldown_range),
        ("host_discovery_script", host_discovery_script),
    ):
        if value is not None:
            raise NotImplementedError(f"horovod.run({name}=...): {_ELASTIC}.")
    if use_mpi or mpi_args is not None:
        raise NotImplementedError("horovod.run(use_mpi, mpi_args): starting by MPI is not available in this version.")
    if network_interfaces is not None and not isinstance(network_interfaces, str):
        network_interfaces = ",".join(network_interfaces)

    options = ["--num-proc", str(num_proc)]
    for option, given in (
        ("--hosts", hosts),
        ("--hostfile", hostfile),
        ("--start-timeout", start_timeout),
        ("--ssh-port", ssh_port),
        ("--ssh-identity-file", ssh_identity_file),
        ("--output-filename", output_filename),
        ("--network-interfaces", network_interfaces),
    ):
        if given is not None:
            options += [option, str(given)]
    if verbose:
        options.append("--verbose")
    command = [executable or sys.executable, "-P", "-m", "horovod.runner.run_task"]
    return _run_job([*options, "--", *command], _pickled_call(func, args, kwargs or {}), num_proc)


def _renamed(old: str, old_value: Any, new: str, value: Any) -> Any:
    if old_value is None:
        return value
    warnings.warn(f"horovod.run: {old} is deprecated, use {new}.", DeprecationWarning, stacklevel=3)
    return old_value


def _pickled_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    import cloudpickle

    from horovod.runner.run_task import Call

    own = [Path(place) for place in (sys.prefix, sys.base_prefix, site.getusersitepackages())]
    return pickle.dumps(
        Call(
            python=platform.python_version(),
            prefix=sys.prefix,
            path=list(sys.path),  # "" stands for the current directory, which is that of the workers too.
            users_path=[entry for entry in sys.path if not any(Path(entry).is_relative_to(place) for place in own)],
            function=cloudpickle.dumps((func, tuple(args), dict(kwargs))),
        )
    )


def _run_job(arguments: Sequence[str], payload: bytes, size: int) -> list[Any]:
    """Runs the launcher and collects what the ranks say."""
    results, write_end = _pipe()
    pumps: list[threading.Thread] = []
    try:
        # A notebook's standard streams are no files: what comes is written to them here.
        own = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "horovod.runner.run_job", str(write_end), *arguments],
            stdin=subprocess.PIPE,
            stdout=None if own else subprocess.PIPE,
            stderr=None if own else subprocess.PIPE,
            pass_fds=[write_end],
            # Ctrl-C is for us, and we hand it on.
            start_new_session=True,
        )
    except BaseException:
        os.close(results)
        raise
    finally:
        os.close(write_end)
    records: dict[int, bytearray] = {}
    pumps.append(threading.Thread(target=_collect, args=(results, records), daemon=True))
    for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if pipe is not None:
            pumps.append(threading.Thread(target=_pump, args=(pipe, stream), daemon=True))
    for pump in pumps:
        pump.start()
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # It has ended; its exit code tells.
            process.stdin.write(payload)
            process.stdin.close()
        code = process.wait()
    except BaseException as error:
        _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        for pump in pumps:
            pump.join()
    return _values(records, code, size)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are no standard streams, also where those are closed."""
    low = os.pipe2(os.O_CLOEXEC)
    try:
        read_end, write_end = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in low)
    finally:
        for fd in low:
            os.close(fd)
    return read_end, write_end


def _end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Has the launcher end the job, and waits for that; each further Ctrl-C is handed on: the second kills at once."""
    while True:
        try:
            process.send_signal(signum)
            process.wait()
            return
        except KeyboardInterrupt:
            signum = signal.SIGINT


def _pump(pipe: IO[bytes], stream: IO[str]) -> None:
    """Writes what comes from the launcher to a stream of this program."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with pipe:
        while data := os.read(pipe.fileno(), 64 << 10):
            with contextlib.suppress(OSError, ValueError):  # Nobody reads it any more.
                stream.write(decoder.decode(data))
                stream.flush()


def _collect(fd: int, records: dict[int, bytearray]) -> None:
    """Reads the pieces of the ranks' results, in the order of their arrival."""
    from horovod.runner.run_job import PIECE

    with open(fd, "rb") as pipe:
        while len(header := pipe.read(PIECE.size)) == PIECE.size:
            rank, length = PIECE.unpack(header)
            records.setdefault(rank, bytearray()).extend(pipe.read(length))


def _values(records: Mapping[int, bytearray], code: int, size: int) -> list[Any]:
    """The values by rank, or the first error that is not another's consequence."""
    from horovod.runner.run_job import OF_NO_RANK
    from horovod.runner.run_task import Outcome

    if OF_NO_RANK in records:
        raise ValueError(f"horovod.run: {records[OF_NO_RANK].decode()}")
    outcomes: dict[int, Outcome] = {}
    for rank, record in records.items():
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # It was killed in the middle.
            outcomes[rank] = pickle.loads(record)
    failed = [(rank, outcome) for rank, outcome in outcomes.items() if outcome.value is None]
    failed.sort(key=lambda each: "HorovodInternalError" in each[1].error)
    if failed:
        rank, outcome = failed[0]
        cause = None
        if outcome.exception is not None:
            with contextlib.suppress(Exception):  # Its class may be known only there.
                cause = pickle.loads(outcome.exception)
        raise RuntimeError(
            f"horovod.run: rank {rank} of {size} failed: {outcome.error}\n\nOn rank {rank}:\n{outcome.traceback}"
        ) from cause
    if code != 0:
        raise RuntimeError(f"horovod.run: the job ended with exit code {code}; what it wrote says more.")
    missing = [str(rank) for rank in range(size) if rank not in outcomes]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise RuntimeError(
            f"horovod.run: no value came from {len(missing)} of {size} ranks ({shown}): their processes ended with "
            "exit code 0 before the function had returned. Does it call os._exit?"
        )
    return [pickle.loads(outcomes[rank].value or b"") for rank in range(size)]
