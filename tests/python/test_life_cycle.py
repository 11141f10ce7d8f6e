"""init and shutdown, again and again, leave nothing in the process."""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, wait_for_output

import horovod.numpy as hvd
from horovod.common.rendezvous import meeting


def resources() -> dict[str, int]:
    """What the process holds."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycle(number: int) -> None:
    hvd.init()
    result = hvd.allreduce(np.full(1000, float(number)), op=hvd.Sum, name="x")
    assert result[0] == number * hvd.size()
    hvd.barrier()
    hvd.shutdown()


def many_cycles(count: int) -> tuple[dict[str, int], dict[str, int], int]:
    for number in range(10):  # caches fill
        cycle(number)
    gc.collect()
    before, resident = resources(), resident_bytes()
    for number in range(count):
        cycle(number)
    gc.collect()
    return before, resources(), resident_bytes() - resident


@pytest.mark.parametrize(("hosts", "cycles"), [([1], 200), ([2], 200), ([1, 1], 50), ([2, 1], 50)], ids=str)
def test_init_and_shutdown_leave_nothing(hosts: list[int], cycles: int) -> None:
    for before, after, grown in run_ranks(sum(hosts), many_cycles, cycles, hosts=hosts, timeout=240):
        assert after["descriptors"] == before["descriptors"]
        assert after["threads"] == before["threads"]
        assert after["maps"] <= before["maps"] + 5
        assert grown < 8 * 1024 * 1024, f"{grown} bytes more after {cycles} cycles"


def repeated_calls() -> None:
    hvd.shutdown()  # before init: nothing
    for _ in range(3):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()


def test_init_and_shutdown_may_be_repeated() -> None:
    run_ranks(2, repeated_calls)


def init_in_threads() -> bool:
    errors: list[BaseException] = []

    def init() -> None:
        try:
            hvd.init()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=init) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hvd.barrier()
    return not errors and hvd.is_initialized()


def test_threads_may_init_at_the_same_time() -> None:
    assert run_ranks(2, init_in_threads) == [True, True]


def interrupted_at_the_end() -> bool:
    """Ctrl-C when the engine runs, and what the meeting needed is closed."""
    real = meeting.meet

    @contextlib.contextmanager
    def interrupted(*arguments: Any) -> Iterator[meeting.Meeting]:
        with real(*arguments) as met:
            yield met
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(meeting, "meet", interrupted)
        hvd.init()
    runs = hvd.is_initialized()
    hvd.init()
    hvd.barrier()
    return runs


def test_init_that_is_interrupted_at_its_end_leaves_no_engine_behind() -> None:
    assert run_ranks(2, interrupted_at_the_end) == [False, False]


def interrupt_after(warning: str) -> None:
    """Has Ctrl-C pressed when rank 0 has warned: what it warns about is certainly under way."""
    wait_for_output(0, warning)
    os.kill(os.getpid(), signal.SIGINT)


def memory_is_kept_and_let_go() -> None:
    hvd.init()
    rank = hvd.rank()

    class Tracked(np.ndarray):  # a plain ndarray takes no weak references on every version
        pass

    array = np.ones(1000).view(Tracked)
    gone = weakref.ref(array)
    handle = hvd.allreduce_async_(array, name="x")
    del array
    gc.collect()
    assert gone() is not None, "the array of a pending operation was freed"
    hvd.synchronize(handle)
    gc.collect()
    assert gone() is None, "the array of an ended operation is kept"

    # Interrupted while it waits: the operation is still under way, so its memory stays, until it has ended.
    array = np.ones(1000).view(Tracked)
    gone = weakref.ref(array)
    if rank == 0:
        threading.Thread(target=interrupt_after, args=("allreduce.interrupted' waits for rank 1",)).start()
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce_(array, name="interrupted")
        del array
        gc.collect()
        assert gone() is not None, "the array of an interrupted operation was freed while it was under way"
    hvd.barrier()
    if rank != 0:
        hvd.allreduce_(array, name="interrupted")
        del array
    hvd.barrier()
    hvd.allreduce([1.0], name="sweeps")
    hvd.shutdown()
    gc.collect()
    assert gone() is None, "the array of an interrupted operation is kept for ever"


def test_memory_is_kept_while_an_operation_runs_and_no_longer() -> None:
    run_ranks(2, memory_is_kept_and_let_go, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})


def memory_of_plain_arrays_is_kept_and_let_go() -> None:
    hvd.init()
    for kind, form in (("allreduce", hvd.allreduce_), ("allgather", hvd.allgather)):
        array = np.ones(1000)
        references = sys.getrefcount(array)
        if hvd.rank() == 0:
            threading.Thread(target=interrupt_after, args=(f"{kind}.plain' waits for rank 1",)).start()
            with pytest.raises(KeyboardInterrupt):
                form(array, name="plain")
            assert sys.getrefcount(array) == references + 1, f"{kind}: an array that is in use is not held"
        hvd.barrier()
        if hvd.rank() != 0:
            form(array, name="plain")
        hvd.barrier()
        hvd.allreduce(np.ones(1), name="sweeps")
        assert sys.getrefcount(array) == references, f"{kind}: an array that was in use is held for ever"


def test_the_memory_of_plain_arrays_is_kept_too() -> None:
    run_ranks(2, memory_of_plain_arrays_is_kept_and_let_go, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})


def interrupted_wait() -> float:
    hvd.init()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async([1.0], name="x", op=hvd.Sum)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            hvd.synchronize(handle)
        hvd.barrier()
        result = hvd.synchronize(handle)
    else:
        hvd.barrier()
        result = hvd.allreduce([1.0], name="x", op=hvd.Sum)
    assert result is not None
    return float(result[0])


def test_a_wait_can_be_interrupted_and_taken_up_again() -> None:
    assert run_ranks(2, interrupted_wait) == [2.0, 2.0]


def leave_pending() -> None:
    """Rank 0 ends without shutdown, with an operation under way and a daemon thread inside another."""
    hvd.init()
    rank_0 = os.pidfd_open(hvd.broadcast_object(os.getpid()))
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.allreduce_async(np.ones(10), name="never")
        threading.Thread(target=lambda: hvd.allreduce(np.ones(10), name="never either"), daemon=True).start()
    else:
        assert select.select([rank_0], [], [], 20)[0], "rank 0 has not ended"


def test_the_interpreter_ends_cleanly_with_operations_pending() -> None:
    run_ranks(2, leave_pending, timeout=30)
