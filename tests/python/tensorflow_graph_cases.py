"""Operations in graphs, and their gradients: cases of test_tensorflow_ops.py, for three ranks."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from cases import Cases, raises

import horovod.tensorflow as hvd
from horovod import _core

graph_cases = Cases()


# ---- Graphs ----------------------------------------------------------------------------------------------------------


@graph_cases.add
def all_operations_of_a_function_are_under_way_at_once_in_any_order() -> None:
    # Each rank's graph has them in another order, and one operation a thread would not do for forty.
    order = np.random.default_rng(hvd.rank()).permutation(40)

    @tf.function
    def step(x: Any) -> Any:
        results: Any = [None] * 40
        for i in order:
            results[i] = hvd.allreduce(x * float(i), op=hvd.Sum, name=f"number{i}")
        return results

    for _ in range(3):
        for i, result in enumerate(step(tf.ones([10]) * (hvd.rank() + 1))):
            assert result.numpy().tolist() == [6.0 * i] * 10


@graph_cases.add
def graphs_of_tensorflow_1_are_built_in_any_order() -> None:
    order = np.random.default_rng(hvd.rank()).permutation(12)
    kinds: list[Callable[[Any, str], Any]] = [
        lambda x, name: hvd.allreduce(x, op=hvd.Sum, name=name),
        lambda x, name: hvd.allgather(x, name=name)[:1],
        lambda x, name: hvd.broadcast(x, 1, name=name),
    ]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        results: Any = [None] * 12
        for i in order:
            results[i] = kinds[i % 3](tf.constant([hvd.rank() + 1.0]), f"operation{i}")
        for _ in range(2):
            assert session.run(results) == [6.0, 1.0, 2.0] * 4


@graph_cases.add
def autograph_leaves_our_functions_as_they_are() -> None:
    callers: list[str] = []

    class Watched:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, None]:
            callers[:] = [Path(frame.filename).name for frame in inspect.stack()]
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, _context: None) -> Any:
            return tensor

    def of_operation(x: Any) -> Any:
        return hvd.allreduce(x, compression=Watched, name="watched")

    def of_tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return hvd.DistributedGradientTape(tape, compression=Watched).gradient(y, x)

    for function, ours in ((of_operation, {"reductions.py"}), (of_tape, {"reductions.py", "gradient_tape.py"})):
        tf.function(function)(tf.constant([1.0]))
        assert ours <= set(callers), callers


@graph_cases.add
def nothing_is_folded_merged_or_dropped() -> None:
    @tf.function
    def step() -> Any:
        hvd.allreduce(tf.constant([1.0]), name="unused")
        twice = [hvd.allreduce(tf.constant([2.0]), op=hvd.Sum, name="twice") for _ in range(2)]
        return twice[0] + twice[1] + tf.cast(hvd.size_op(), tf.float32)

    before = _core.counters()["requests_submitted"]
    for _ in range(4):
        assert step().numpy().tolist() == [15.0]
    assert _core.counters()["requests_submitted"] - before == 12


@graph_cases.add
def names_in_graphs_have_their_scopes() -> None:
    @tf.function
    def step(x: Any) -> Any:
        # The ranks' scopes differ, and are left out.
        with tf.name_scope(f"rank{hvd.rank()}"):
            return hvd.allreduce(x, op=hvd.Sum, name="scoped", ignore_name_scope=True)

    assert step(tf.constant([1.0])).numpy().tolist() == [3.0]


@graph_cases.add
def loops_and_branches_hold_operations() -> None:
    @tf.function
    def step(x: Any) -> Any:
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Average, name="loop") + 1.0
        return tf.cond(x[0] > 0, lambda: hvd.allreduce(x, op=hvd.Sum, name="branch"), lambda: x)

    assert step(tf.constant([float(hvd.rank())])).numpy().tolist() == [12.0]


@graph_cases.add
def sessions_of_tensorflow_1_run_operations() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [2])
        total = hvd.allreduce(x, op=hvd.Sum)
        rows = hvd.allgather(x)
        assert rows.shape.as_list() == [None]
        assert total.shape.as_list() == [2]
        place = [hvd.rank_op(), hvd.local_rank_op(), hvd.size_op(), hvd.local_size_op(), hvd.process_set_included_op()]
        for factor in (1.0, 2.0):
            got = session.run([total, rows, *place], {x: [factor, hvd.rank()]})
            assert got[0].tolist() == [3 * factor, 3.0]
            assert got[1].tolist() == [factor, 0.0, factor, 1.0, factor, 2.0]
            assert got[2:] == [hvd.rank(), hvd.local_rank(), 3, 3, 1]


@graph_cases.add
def shapes_are_known_in_graphs() -> None:
    @tf.function
    def step(x: Any) -> Any:
        assert hvd.allreduce(x).shape.as_list() == [4, 2]
        assert hvd.broadcast(x, 0).shape.as_list() == [4, 2]
        assert hvd.allgather(x).shape.as_list() == [None, 2]
        assert hvd.reducescatter(x).shape.as_list() == [None, 2]
        rows, received = hvd.alltoall(x, tf.constant([1, 1, 1]))
        assert rows.shape.as_list() == [None, 2]
        assert received.shape.as_list() == [None]
        return x

    step(tf.zeros([4, 2]))


@graph_cases.add
def xla_is_refused_clearly() -> None:
    with raises(NotImplementedError, "compiled by XLA", "jit_compile"):
        tf.function(hvd.allreduce, jit_compile=True)(tf.constant([1.0]))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def gradient_of(function: Any, x: Any, weights: Any = None) -> Any:
    """Of sum(function(x) * weights), computed eagerly and in a graph."""
    results = []
    for run in (lambda f: f, tf.function):

        def compute() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
                total = tf.reduce_sum(y if weights is None else y * weights)
            return tape.gradient(total, x)

        results.append(run(compute)().numpy())
    np.testing.assert_array_equal(*results)
    return results[0]


@graph_cases.add
def gradients_are_those_of_the_existing_horovod() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = tf.constant([[1.0], [2.0], [3.0]]) * (rank + 1)
    own = tf.constant([[1.0], [2.0], [4.0]]) * (rank + 1)  # sums up to 6, 12, 24
    want = np.array([[6.0], [12.0], [24.0]])
    np.testing.assert_allclose(gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum), x, own), want)
    np.testing.assert_allclose(gradient_of(hvd.allreduce, x, own), want / size)
    scaled = gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), x, own)
    np.testing.assert_allclose(scaled, want * 1.5)
    grouped = gradient_of(lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)[1], x, own)
    np.testing.assert_allclose(grouped, 2 * want)
    zero = gradient_of(lambda t: hvd.broadcast(t, 1), x, own)
    np.testing.assert_allclose(zero, want / size if rank == 1 else 0 * want)
    # Rank r has r + 1 rows; row k of all weighs k.
    rows = tf.ones([rank + 1, 1])
    index = tf.reshape(tf.range(6.0), [6, 1])
    first = rank * (rank + 1) // 2
    np.testing.assert_allclose(gradient_of(hvd.allgather, rows, index), index.numpy()[first : first + rank + 1])
    # Rank r sends one row to each and keeps one; what came from rank s weighs s + 1 on every rank.
    four = tf.ones([4, 1])
    came = tf.reshape(tf.range(1.0, 4.0), [3, 1])
    exchanged = gradient_of(lambda t: hvd.alltoall(t, [1, 1, 1])[0], four, came)
    np.testing.assert_allclose(exchanged, np.array([[rank + 1.0]] * 3 + [[0.0]]))
    three = tf.ones([3, 1])
    part = tf.constant([[rank + 1.0]])
    np.testing.assert_allclose(gradient_of(hvd.reducescatter, three, part), [[1.0], [2.0], [3.0]])
    summed = gradient_of(lambda t: hvd.reducescatter(t, op=hvd.Sum), three, part)
    np.testing.assert_allclose(summed, [[3.0], [6.0], [9.0]])


@graph_cases.add
def gradients_can_be_differentiated_again() -> None:
    x = tf.Variable([2.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = hvd.allreduce(x * x, op=hvd.Average)
        first = inner.gradient(y, x)
    assert first.numpy().tolist() == [4.0]
    assert outer.gradient(first, x).numpy().tolist() == [2.0]


@graph_cases.add
def unused_gradients_of_ranks_without_the_root_still_take_part_in_graphs_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [1])
        (gradient,) = tf.gradients(hvd.broadcast(x, 2), x)
        assert session.run(gradient, {x: [1.0]}).tolist() == ([1.0] if hvd.rank() == 2 else [0.0])
