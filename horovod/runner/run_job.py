"""The launcher of `horovod.run`: `python -m horovod.runner.run_job <descriptor> <options of horovodrun> <command>`.

A process of its own, since the caller may have threads, as a notebook has. The function comes on standard input, opaque
to it, and the workers' results go to the descriptor: pieces, each a rank, a length and that many bytes. Why arguments
can't be used goes there too, as that of no rank.
"""

from __future__ import annotations

import os
import struct
import sys

PIECE = struct.Struct(">II")
OF_NO_RANK = 0xFFFFFFFF


def main() -> None:
    """Be the launcher; ends the process."""
    from horovod.runner.errors import UsageError
    from horovod.runner.launch import begin_process, parse_args, run_job

    begin_process()
    results_fd = int(sys.argv[1])
    payload = sys.stdin.buffer.read()
    try:
        code = run_job(parse_args(sys.argv[2:]), payload, results_fd)
    except UsageError as error:
        text = str(error).encode("utf-8", "replace")
        os.write(results_fd, PIECE.pack(OF_NO_RANK, len(text)) + text)
        code = 2
    except OSError as error:
        print(f"horovod.run: the job could not be run: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
