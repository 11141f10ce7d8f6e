"""A forked child (a data loader's worker) can't use the engine, says so, and does its parent no harm."""

import atexit
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

import horovod.numpy as hvd


def in_child(function: Callable[[], Any], leave: Callable[[int], Any]) -> Any:
    """Calls the function in a forked child, which then leaves in the given way; returns what it returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(function(), pipe)
        leave(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pickle.load(pipe)
    assert os.waitpid(pid, 0)[1] == 0
    return result


def error_of(function: Callable[[], Any]) -> str:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        function()
    return str(caught.value)


def use_everything() -> list[Any]:
    return [
        hvd.is_initialized(),
        hvd.rank(),
        error_of(lambda: hvd.allreduce(np.ones(3))),
        error_of(lambda: hvd.allreduce_async_(np.ones(3))),
        error_of(hvd.barrier),
        error_of(hvd.init),
        hvd.shutdown(),
    ]


def parent() -> list[Any]:
    hvd.init()
    hvd.allreduce(np.ones(3), name="before")
    result = in_child(use_everything, os._exit)
    assert float(hvd.allreduce(np.ones(3), name="between", op=hvd.Sum)[0]) == hvd.size()
    # An ordinary exit runs the interpreter's exit functions, ours among them.
    in_child(lambda: None, exit_like_a_script)
    assert float(hvd.allreduce(np.ones(3), name="after", op=hvd.Sum)[0]) == hvd.size()
    assert hvd.is_initialized()
    return result  # type: ignore[no-any-return]


def exit_like_a_script(_status: int) -> None:
    """Leaves the child as a script that has come to its end, exit functions included, but not this test's code."""
    atexit._run_exitfuncs()
    os._exit(0)


def test_a_forked_child_is_told_and_harms_nobody() -> None:
    for rank, result in enumerate(run_ranks(2, parent)):
        initialized, own_rank, *errors, nothing = result
        assert initialized is False
        assert own_rank == rank
        assert nothing is None
        for text in errors:
            assert "fork" in text


def fork_with_pending() -> float:
    """A child made while an operation is pending and another thread waits for it."""
    hvd.init()
    array = np.ones(1000)
    if hvd.rank() == 1:
        in_child(lambda: None, os._exit)
        return float(hvd.allreduce_(array, name="x", op=hvd.Sum)[0])
    results: list[float] = []
    waiter = threading.Thread(target=lambda: results.append(float(hvd.allreduce(array, name="x", op=hvd.Sum)[0])))
    waiter.start()
    in_child(hvd.is_initialized, os._exit)
    waiter.join(30)
    return results[0]


def test_fork_while_an_operation_is_pending() -> None:
    assert run_ranks(2, fork_with_pending) == [2.0, 2.0]


def init_in_children_of_an_idle_parent() -> bool:
    """Importing alone does not forbid anything: the child of a process that never called init may."""

    def child() -> bool:
        hvd.init()
        return hvd.is_initialized()

    return bool(in_child(child, os._exit))


def test_a_child_may_init_if_the_parent_did_not() -> None:
    assert run_ranks(1, init_in_children_of_an_idle_parent) == [True]
