"""The engine's C interface (src/api/horovod.h), for the bindings. Arguments of hot functions are positional.

Buffers are typed Any: NumPy's arrays have the buffer protocol, but say so to type checkers only from Python 3.12 on.
"""

from collections.abc import Sequence
from typing import Any

ALLREDUCE: int
ALLGATHER: int
BROADCAST: int
ALLTOALL: int
REDUCESCATTER: int
BARRIER: int
JOIN: int
ADD_PROCESS_SET: int
REMOVE_PROCESS_SET: int

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
UINT32: int
UINT64: int
COMPLEX64: int
COMPLEX128: int
FLOAT8_E4M3FN: int
FLOAT8_E5M2: int

class SharedMemory:
    def __new__(cls, bytes: int, /) -> SharedMemory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class TlsSession:
    def __new__(cls, library: str, listening: bool, key: bytes, /) -> TlsSession: ...
    def handshake(self, fd: int, /) -> bool: ...
    def read(self, fd: int, most: int, /) -> bytes | None: ...
    def write(self, fd: int, data: bytes, /) -> int: ...
    def flush(self, fd: int, /) -> bool: ...
    def has_output(self) -> bool: ...

class Rows:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def received(self) -> tuple[int, ...]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# The short way (src/api/python_plain.h): each does what submit or run would do, for plain tensors; otherwise it returns
# NotImplemented, and nothing has happened. Names get the operation's kind in front; detail is the reduction of
# ALLREDUCE (None: the average) and REDUCESCATTER, and the root of BROADCAST.
class Plain:
    def run_in_place(
        self,
        op: int,
        tensor: Any,
        name: str | None,
        process_set: object,
        detail: int | None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
    ) -> Any: ...
    def submit_in_place(
        self,
        op: int,
        tensor: Any,
        name: str | None,
        process_set: object,
        detail: int | None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
    ) -> Any: ...
    def run_into_new(
        self,
        op: int,
        tensor: Any,
        name: str | None,
        process_set: object,
        detail: int | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
    ) -> Any: ...
    def submit_into_new(
        self,
        op: int,
        tensor: Any,
        name: str | None,
        process_set: object,
        detail: int | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
    ) -> Any: ...
    def submit_group_in_place(
        self,
        op: int,
        tensors: Any,
        name: str | None,
        process_set: object,
        detail: int | None,
        prescale: float,
        postscale: float,
        /,
    ) -> Any: ...
    def submit_each_in_place(
        self,
        op: int,
        tensors: Any,
        names: Any,
        process_set: object,
        detail: int | None,
        prescale: float,
        postscale: float,
        /,
    ) -> Any: ...
    def submit_group_into_new(
        self,
        op: int,
        tensors: Any,
        name: str | None,
        process_set: object,
        detail: int | None,
        prescale: float,
        postscale: float,
        /,
    ) -> Any: ...

def plain_arrays(
    dense: Any, other: Any, array_api: object, codes: dict[Any, int], global_process_set: object, /
) -> Plain: ...
def plain_tensors(
    exchange_api: object,
    type: type,
    parameter_type: type,
    empty_like: Any,
    increment_version: Any,
    compiler: dict[str, Any],
    global_process_set: object,
    /,
) -> Plain: ...

# What an operation returns: `result` (or `output`) itself, or what `result` returns if it is a function; for ALLGATHER
# and ALLTOALL what that function makes of the Rows, or the Rows if it is None; for JOIN and ADD_PROCESS_SET a number.
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
    splits: Sequence[int] | None = None,
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
    result: object,
    keep_alive: object,
    splits: Sequence[int] | None = None,
    /,
) -> Any: ...
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
    splits: Sequence[int] | None = None,
    /,
) -> int: ...
def run_buffers(
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
    splits: Sequence[int] | None = None,
    /,
) -> Any: ...
def submit_all(requests: list[Any], /) -> list[int]: ...
def submit_all_buffers(requests: list[Any], /) -> list[int]: ...
def poll(handle: int, /) -> bool: ...
def wait(handle: int, /) -> Any: ...
def wait_all(handles: list[int], results: list[Any], errors: list[Exception], /) -> None: ...
def forget(handle: int, /) -> None: ...
def init(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
    segment_fd: int,
    hosts: Sequence[str],
    host_of: Sequence[int],
    pids: Sequence[int],
    links: Sequence[int],
    controls: Sequence[int],
    link_sessions: Sequence[TlsSession | None],
    control_sessions: Sequence[TlsSession | None],
    alive_fds: Sequence[int],
    doorbells: Sequence[int],
    arena_fds: Sequence[int],
    process_sets: Sequence[Sequence[int]],
    allreduce_ring: bool,
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
def segment_create(local_size: int, size: int, cache_capacity: int, generation: int, nonce: int, /) -> int: ...
def segment_probe(fd: int, /) -> tuple[int, int]: ...
def tls_load(library: str, /) -> str: ...
def arena_fd() -> int: ...
def counters() -> dict[str, int]: ...
