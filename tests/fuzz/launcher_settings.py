"""What users write for horovodrun and init: any text is understood, or refused with the error that is made for it."""

import functools
import os
from collections.abc import Callable
from typing import Any

import atheris
import targets

with atheris.instrument_imports(include=["horovod"]):
    from horovod.common import environment, schedulers
    from horovod.runner.config_file import read_config_file
    from horovod.runner.errors import UsageError
    from horovod.runner.hosts import assign_slots, parse_hostfile, parse_hosts

# In memory: libFuzzer ends the process without a word, and would leave a file behind.
PATH = f"/proc/self/fd/{os.memfd_create('settings')}"


def check(parse: Callable[[], Any], refusal: type[Exception]) -> Any:
    """What the parser makes of it; None if it refuses."""
    try:
        return parse()
    except refusal as error:
        assert type(error) is refusal, f"{type(error).__name__} is an accident, not a refusal"
        assert str(error)
        return None


def target(data: bytes) -> None:
    """Gives the bytes to every parser."""
    text = data.decode("utf-8", "replace")
    for hosts in (check(lambda: parse_hosts(text), UsageError), check(lambda: parse_hostfile(PATH), UsageError)):
        if hosts is not None:
            assert all(host.slots >= 1 for host in hosts)
            assert check(functools.partial(assign_slots, hosts, 1), UsageError) is not None
    check(lambda: read_config_file(PATH), UsageError)
    check(lambda: schedulers.expand_counts(text), ValueError)
    check(lambda: schedulers.first_host(text), ValueError)
    check(lambda: schedulers.lsf_hosts({"LSB_MCPU_HOSTS": text}), ValueError)
    for name in environment.VARIABLES:
        check(functools.partial(environment.read, name, {name: text}), ValueError)


def with_file(data: bytes) -> None:
    """The same, with the bytes in the file too."""
    with open(PATH, "wb") as file:
        file.write(data)
    target(data)


SEEDS = (
    b"localhost:4,[::1]:2,host-1.example",
    b"host1 slots=2\n[::1] slots = 4 # a comment\n\nhost2\n",
    b"controller: gloo\nparams:\n  fusion_threshold_mb: 64\n  cycle_time_ms: 1.5\nlogging:\n  level: DEBUG\n",
    b"autotune:\n  enabled: false\n  gaussian_process_noise: 0.5\nlibrary_options: {thread_affinity: '0,1'}\n",
    b"timeline: ~\nstall_check:\n  warning_time_seconds: 0x10\n  shutdown_time_seconds: 1:30\n",
    b"params: {cycle_time_ms: 2001-12-14, cache_capacity: 0b11, hierarchical_allreduce: !!bool yes}\n",
    b"128",
    b"1.5e3",
    b"hierarchical",
    b"2(x3),1",
    b"gpu[01-03,7],login",
    b"batch1 1 h1 4 h2 4",
)

if __name__ == "__main__":
    targets.run(with_file, SEEDS)
