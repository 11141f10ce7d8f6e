"""The engine's C interface (src/api/horovod.h), for the bindings. Arguments of hot functions are positional.

Buffers are typed Any: NumPy's arrays have the buffer protocol, but say so to type checkers only from Python 3.12 on.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

ALLREDUCE: int
BROADCAST: int
BARRIER: int

AVERAGE: int
SUM: int
ADASUM: int
MIN: int
MAX: int
PRODUCT: int

UINT8: int
INT8: int
UINT16: int
INT16: int
INT32: int
INT64: int
FLOAT16: int
FLOAT32: int
FLOAT64: int
BOOL: int
BFLOAT16: int

_Result = TypeVar("_Result")
_Output = TypeVar("_Output")

def submit(
    op: int,
    name: str,
    dtype: int,
    shape: tuple[int, ...],
    in_ptr: int,
    out_ptr: int,
    reduce_op: int,
    root: int,
    process_set: int,
    prescale: float,
    postscale: float,
    result: object,
    keep_alive: object,
    /,
) -> int: ...
def run(
    op: int,
    name: str,
    dtype: int,
    shape: tuple[int, ...],
    in_ptr: int,
    out_ptr: int,
    reduce_op: int,
    root: int,
    process_set: int,
    prescale: float,
    postscale: float,
    result: _Result,
    keep_alive: object,
    /,
) -> _Result: ...
def submit_buffers(
    op: int,
    name: str,
    dtype: int,
    input: Any,
    output: Any,
    reduce_op: int,
    root: int,
    process_set: int,
    prescale: float,
    postscale: float,
    /,
) -> int: ...
def run_buffers(
    op: int,
    name: str,
    dtype: int,
    input: Any,
    output: _Output,
    reduce_op: int,
    root: int,
    process_set: int,
    prescale: float,
    postscale: float,
    /,
) -> _Output: ...
def poll(handle: int, /) -> bool: ...
def wait(handle: int, /) -> object: ...
def init(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
    host: str,
    segment_fd: int,
    pids: Sequence[int],
    alive_fds: Sequence[int],
    doorbells: Sequence[int],
    arena_fds: Sequence[int],
    process_sets: Sequence[Sequence[int]],
    fusion_threshold: int,
    cache_capacity: int,
    heartbeat_timeout: float,
    stall_warning: float,
    stall_shutdown: float,
    log_level: int,
    log_hide_time: bool,
) -> None: ...
def shutdown() -> None: ...
def is_initialized() -> bool: ...
def version() -> str: ...
def segment_create(local_size: int, cache_capacity: int, generation: int, nonce: int, /) -> int: ...
def segment_probe(fd: int, /) -> tuple[int, int]: ...
def arena_fd() -> int: ...
def counters() -> dict[str, int]: ...

class SharedMemory:
    def __new__(cls, bytes: int, /) -> SharedMemory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
