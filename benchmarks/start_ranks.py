"""Starts the ranks of a program on two hosts, as a scheduler would:

    start_ranks.py <ranks a host> <pid on h1> <pid on h2> <command> ...

A host is the namespaces of a process (hosts.py). Ends when all ranks have ended, or one of them has failed; the others
end with it.
"""

import os
import secrets
import subprocess
import sys

from hosts import ADDRESSES, INTERFACE, NAMES, die_with_parent, enter

_PORT = 7071


def _environments(per_host: int) -> list[dict[str, str]]:
    """What tells each rank of horovod who it is and where to meet."""
    job = {
        "HOROVOD_JOB_ID": secrets.token_hex(8),
        "HOROVOD_SECRET_KEY": secrets.token_hex(32),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESSES[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    return [
        job
        | {
            "HOROVOD_RANK": str(host * per_host + place),
            "HOROVOD_SIZE": str(len(NAMES) * per_host),
            "HOROVOD_LOCAL_RANK": str(place),
            "HOROVOD_LOCAL_SIZE": str(per_host),
            "HOROVOD_CROSS_RANK": str(host),
            "HOROVOD_CROSS_SIZE": str(len(NAMES)),
            "HOROVOD_HOSTNAME": NAMES[host],
        }
        for host in range(len(NAMES))
        for place in range(per_host)
    ]


def main() -> int:
    """The command."""
    per_host, pids, command = int(sys.argv[1]), [int(pid) for pid in sys.argv[2:4]], sys.argv[4:]
    running = {}
    for rank, environment in enumerate(_environments(per_host)):
        process = subprocess.Popen(
            enter(pids[rank // per_host], command),
            env=os.environ | environment,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        running[process.pid] = rank
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if status != 0:
            print(f"rank {rank} has failed: {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
