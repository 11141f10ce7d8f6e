"""A rank that has just been started: how long import and init take, and what memory Horovod needs.

    horovodrun -np 2 python start_up.py <an empty directory>

Prints one line of JSON. Memory is what this process has more than before init, apart from the tensors of the user, who
has written to all of them before: private memory and its share of what it shares with other processes, as the kernel
counts them (Pss), and its share of the segment and of other shared pages, also of those that nobody has touched yet.
"""

import contextlib
import gc
import json
import os
import re
import sys
import time
from pathlib import Path

_TENSOR_BYTES = 1 << 16


def _memory(ranks: int) -> int:
    """Bytes of this process; of the segment its share of all that is reserved, touched or not."""
    gc.collect()
    pss = 0
    for name, fields in re.findall(r"^[0-9a-f]+-[0-9a-f]+ [^\n]*?(\S*)\n((?:[A-Z]\w+:.*\n)+)", _smaps(), re.M):
        if "memfd:horovod" not in name:
            pss += sum(int(size) for size in re.findall(r"^Pss:\s+(\d+) kB", fields, re.M))
    reserved = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:horovod" in os.readlink(descriptor):
                reserved += descriptor.stat().st_blocks * 512
    return pss * 1024 + reserved // ranks


def _smaps() -> str:
    """Mappings by the last word of their lines, without the note that their file has no name."""
    return Path("/proc/self/smaps").read_text().replace(" (deleted)", "")


def main() -> None:
    """Measures."""
    import torch

    torch.set_num_threads(1)
    begin = time.perf_counter()
    import horovod.torch as hvd

    imported = time.perf_counter() - begin
    import torch.distributed as dist

    # All tensors are there before the first look at the memory.
    tensors = [torch.ones(_TENSOR_BYTES // 4) for _ in range(1600)]
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    meeting = Path(sys.argv[1])
    _meet(meeting, rank, size)
    before = _memory(size)
    begin = time.perf_counter()
    hvd.init()
    initialized = time.perf_counter() - begin
    memory = {"memory_init": _memory(size) - before}
    for count, name in ((16, "memory_few"), (1600, "memory_many")):
        for _ in range(3):
            handles = [hvd.allreduce_async_(tensor, name=f"t.{i}") for i, tensor in enumerate(tensors[:count])]
            for handle in handles:
                hvd.synchronize(handle)
        memory[name] = _memory(size) - before
    hvd.barrier()
    begin = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{meeting}/gloo", rank=rank, world_size=size)
    gloo = time.perf_counter() - begin
    hvd.barrier()  # gloo fails where a peer leaves before both are connected
    print(json.dumps({"import": imported, "init": initialized, "gloo_init": gloo, **memory}), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


def _meet(meeting: Path, rank: int, size: int) -> None:
    """Waits until all ranks are here, so that init does not wait for a late one."""
    (meeting / str(rank)).touch()
    deadline = time.monotonic() + 60
    while not all((meeting / str(other)).exists() for other in range(size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: the other ranks of this job did not come within 60 s")
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
