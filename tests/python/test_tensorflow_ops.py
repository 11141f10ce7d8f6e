"""The operations of horovod.tensorflow: eagerly, in tf.function, in sessions of TensorFlow 1, with their gradients.

What the engine computes is swept with NumPy's arrays: here it is that tensors get there and back, from every place
where TensorFlow can run an operation.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from cases import Cases, Outcomes, raises
from ranks import run_ranks
from sweeps import MOVED, REDUCED, expected, make_sets, ops_for, own_rows, values
from tensorflow_arrays import ENVIRONMENT, LIMIT, same, tensor_of
from tensorflow_graph_cases import graph_cases

import horovod.numpy
import horovod.tensorflow as hvd
from horovod.common.process_sets import ProcessSet

SIZE = 3
cases = Cases()
sets: list[ProcessSet] = []


def start() -> None:
    made = make_sets(SIZE)
    hvd.init(process_sets=made)
    sets.extend([hvd.global_process_set, *(one for one in made if one.included())])


def every_rank() -> range:
    return range(hvd.size())


# ---- Values ----------------------------------------------------------------------------------------------------------


@cases.add
def allreduce_of_every_dtype_set_and_op() -> None:
    for members in sets:
        for dtype in REDUCED if members is hvd.global_process_set else (np.float32, ml_dtypes.bfloat16):
            own = tensor_of(dtype, 101, hvd.rank())
            inputs = [values(dtype, 101, rank) for rank in members.ranks or []]
            for op in ops_for(dtype):
                what = f"allreduce {np.dtype(dtype).name} op {op} of {members.ranks}"
                result = hvd.allreduce(own, op=op, name="sweep", process_set=members)
                same(result, expected(inputs, op, ranks=members.ranks), what)
            same(own, values(dtype, 101, hvd.rank()), "the input was changed")


@cases.add
def allreduce_of_every_shape() -> None:
    for shape in [(), (0,), (1,), (3, 0, 2), (3, 4, 5), (70_000,), (1000, 1000)]:
        inputs = [values(np.float32, shape, rank) for rank in every_rank()]
        same(hvd.allreduce(tensor_of(np.float32, shape, hvd.rank()), op=hvd.Sum), expected(inputs, hvd.Sum), f"{shape}")


@cases.add
def factors_are_doubles() -> None:
    inputs = [values(np.float64, 100, rank) for rank in every_rank()]
    own = tensor_of(np.float64, 100, hvd.rank())
    scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.3, postscale_factor=7.1)
    same(scaled, expected(inputs, hvd.Sum, 0.3, 7.1), "scaled")


@cases.add
def groups_hold_tensors_of_several_dtypes() -> None:
    dtypes = [np.float32, np.int64, ml_dtypes.bfloat16]
    tensors = [tensor_of(dtype, 20 + i, hvd.rank()) for i, dtype in enumerate(dtypes)]
    for i, result in enumerate(hvd.grouped_allreduce(tensors, op=hvd.Sum)):
        same(result, expected([values(dtypes[i], 20 + i, rank) for rank in every_rank()], hvd.Sum), f"member {i}")
    for i, result in enumerate(hvd.grouped_allgather(tensors)):
        same(result, np.concatenate([values(dtypes[i], 20 + i, rank) for rank in every_rank()]), f"member {i}")
    for i, result in enumerate(hvd.grouped_reducescatter(tensors, op=hvd.Sum)):
        total = expected([values(dtypes[i], 20 + i, rank) for rank in every_rank()], hvd.Sum)
        same(result, own_rows(total, hvd.rank(), hvd.size()), f"member {i}")
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


@cases.add
def compression_makes_tensors_smaller_on_their_way() -> None:
    for compression, dtype in ((hvd.Compression.fp16, np.float16), (hvd.Compression.bf16, ml_dtypes.bfloat16)):
        inputs = [values(np.float32, 50, rank).astype(dtype) for rank in every_rank()]
        own = tensor_of(np.float32, 50, hvd.rank())
        want = expected(inputs, hvd.Sum).astype(np.float32)
        same(hvd.allreduce(own, op=hvd.Sum, compression=compression), want, "compressed")
    whole = hvd.allreduce(tf.constant([70_000]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert whole.numpy().tolist() == [70_000 * hvd.size()]


@cases.add
def rows_of_every_dtype_are_moved() -> None:
    for members in sets:
        ranks = members.ranks or []
        position = ranks.index(hvd.rank())
        for dtype in MOVED if members is hvd.global_process_set else (np.float32,):
            what = f"{np.dtype(dtype).name} of {ranks}"
            root = ranks[-1]
            own = tensor_of(dtype, (4, 3), hvd.rank())
            same(hvd.broadcast(own, root, process_set=members), values(dtype, (4, 3), root), f"broadcast {what}")
            parts = [values(dtype, (rank, 2), rank) for rank in ranks]
            gathered = hvd.allgather(tf.constant(parts[position]), process_set=members)
            same(gathered, np.concatenate(parts), f"allgather {what}")
            # Rank r sends r + p rows to the p-th member, and keeps one.
            splits = {rank: [rank + p for p in range(len(ranks))] for rank in ranks}
            inputs = {rank: values(dtype, (sum(splits[rank]) + 1, 2), rank) for rank in ranks}
            first = {rank: sum(splits[rank][:position]) for rank in ranks}
            want = np.concatenate([inputs[rank][first[rank] : first[rank] + splits[rank][position]] for rank in ranks])
            rows, received = hvd.alltoall(tf.constant(inputs[hvd.rank()]), splits[hvd.rank()], process_set=members)
            same(rows, want, f"alltoall {what}")
            assert received.numpy().tolist() == [splits[rank][position] for rank in ranks]
            assert received.dtype == tf.int32
        even = [values(np.float32, (2 * len(ranks), 2), rank) for rank in ranks]
        want = np.concatenate([array[2 * position : 2 * position + 2] for array in even])
        same(hvd.alltoall(tf.constant(even[position]), process_set=members), want, "alltoall without splits")
        for rows_each in (0, 1, 7):
            inputs_list = [values(np.float32, (rows_each, 2), rank) for rank in ranks]
            own = tf.constant(inputs_list[position])
            scattered = hvd.reducescatter(own, op=hvd.Sum, process_set=members)
            want = own_rows(expected(inputs_list, hvd.Sum, ranks=ranks), position, len(ranks))
            same(scattered, want, f"reducescatter of {rows_each} rows")


@cases.add
def variables_and_slices_are_reduced() -> None:
    variable = tf.Variable([1.0, 2.0])
    keras_variable = tf.keras.Variable([1.0, 2.0])
    for one in (variable, keras_variable, [1.0, 2.0]):
        assert hvd.allreduce(one, op=hvd.Sum).numpy().tolist() == [3.0, 6.0]
    slices = tf.IndexedSlices(tf.ones([2, 3]) * (hvd.rank() + 1), tf.constant([hvd.rank(), 5]), tf.constant([6, 3]))
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / 3)):
        both = [hvd.allreduce(slices, op=op), hvd.grouped_allreduce([tf.constant(1.0), slices], op=op)[1]]
        for reduced in both:
            assert isinstance(reduced, tf.IndexedSlices)
            assert reduced.indices.numpy().tolist() == [0, 5, 1, 5, 2, 5]
            np.testing.assert_allclose(reduced.values.numpy()[:, 0], np.array([1, 1, 2, 2, 3, 3]) * factor, rtol=1e-6)
    with raises(NotImplementedError, "only the average and the sum"):
        hvd.allreduce(slices, op=hvd.Min)
    with raises(NotImplementedError, "prescale_factor"):
        hvd.allreduce(slices, prescale_factor=2.0)


# ---- Graphs and gradients (tensorflow_graph_cases.py) ----------------------------------------------------------------

cases.include(graph_cases)

# ---- Errors ----------------------------------------------------------------------------------------------------------


@cases.add
def errors_have_the_types_of_tensorflow_and_the_job_goes_on() -> None:
    rank = hvd.rank()
    x = tf.constant([1.0, 2.0])
    kinds: list[Any] = [hvd.allreduce, hvd.allgather]
    different: list[tuple[str, Any]] = [
        ("Mismatched data types", lambda: hvd.allreduce(tf.cast(x, [tf.float32, tf.float64][rank % 2]), name="e1")),
        ("tensor shapes", lambda: hvd.allreduce(tf.ones([2 + rank]), name="e2")),
        ("Mismatched operations", lambda: kinds[rank % 2](x, name="e3")),
        ("root ranks", lambda: hvd.broadcast(x, rank % 2, name="e4")),
        ("factors", lambda: hvd.allreduce(x, prescale_factor=1.0 + rank, name="e5")),
        ("reduction operation", lambda: hvd.allreduce(x, op=[hvd.Sum, hvd.Max][rank % 2], name="e6")),
    ]
    for text, run in different:
        with raises(tf.errors.FailedPreconditionError, text):
            run()
        with raises(tf.errors.FailedPreconditionError, text):
            tf.function(run)()
        assert hvd.allreduce(x, op=hvd.Sum, name="after").numpy().tolist() == [3.0, 6.0]
    assert x.numpy().tolist() == [1.0, 2.0]


@cases.add
def mistakes_of_one_rank_are_told_where_they_are_made() -> None:
    x = tf.constant([1.0, 2.0])
    with raises(tf.errors.InvalidArgumentError, "invalid root rank 7"):
        hvd.broadcast(x, 7)
    with raises(tf.errors.InvalidArgumentError, "splits"):
        hvd.alltoall(x, [1, 1, 1])
    with raises(tf.errors.InvalidArgumentError, "divisible"):
        hvd.alltoall(x)
    with raises(tf.errors.InvalidArgumentError, "scalar"):
        hvd.reducescatter(tf.constant(1.0))
    with raises(tf.errors.AbortedError, "AVERAGE and SUM"):
        hvd.reducescatter(x, op=hvd.Max)
    with raises(tf.errors.FailedPreconditionError, "rank-zero"):
        hvd.allgather(tf.constant(1.0))
    with raises(ValueError, "string is not supported"):
        hvd.allgather(tf.constant(["a"]))
    with raises(ValueError, "unknown op"):
        hvd.allreduce(x, op=17)
    other = hvd.ProcessSet([0, 1])
    with raises(ValueError, "not registered"):
        hvd.allreduce(x, process_set=other)
    with raises(tf.errors.InvalidArgumentError, "no process set with id 99"):
        hvd.size_op(99)


@cases.add
def the_same_name_twice_at_once_is_refused() -> None:
    # The first one, by another binding, is pending until the others have heard that the second was refused.
    if hvd.rank() == 0:
        handle = horovod.numpy.allreduce_async([1.0], name="same", op=hvd.Sum)
        with raises(tf.errors.InvalidArgumentError, "same name"):
            hvd.allreduce(tf.constant([1.0]), name="allreduce.same")  # the other binding's name, in full
        hvd.broadcast_object("refused")
        total = horovod.numpy.synchronize(handle)
    else:
        assert hvd.broadcast_object(None) == "refused"
        total = horovod.numpy.allreduce([1.0], name="same", op=hvd.Sum)
    assert total.tolist() == [3.0]


# ---- The rest --------------------------------------------------------------------------------------------------------


@cases.add
def broadcast_changes_variables() -> None:
    variables = [tf.Variable([1.0 * hvd.rank()]), tf.keras.Variable([[10 * hvd.rank()]], dtype="int32")]
    assert hvd.broadcast_(variables, 2) == variables
    assert variables[0].numpy().tolist() == [2.0]
    assert variables[1].numpy().tolist() == [[20]]
    variables[0].assign([1.0 * hvd.rank()])
    hvd.broadcast_variables(variables, 1)
    assert variables[0].numpy().tolist() == [1.0]

    @tf.function
    def again() -> None:
        hvd.broadcast_variables(variables, 0)

    variables[0].assign([5.0 + hvd.rank()])
    again()
    assert variables[0].numpy().tolist() == [5.0]
    with raises(ValueError, "different models", "int32 (1, 1)"):
        hvd.broadcast_variables(variables[: 1 + hvd.rank() % 2], 0)
    with raises(RuntimeError, "broadcast_variables"):
        hvd.broadcast_global_variables(0)


@cases.add
def objects_are_sent() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.broadcast_object_fn(2)(hvd.rank()) == 2
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]


@cases.add
def variables_have_references() -> None:
    variables = [tf.Variable(1.0), [tf.Variable(2.0), tf.keras.Variable(3.0)]]
    refs = hvd.vars_to_refs(variables)
    assert len({refs}) == 1
    assert [variable.numpy() for variable in tf.nest.flatten(hvd.refs_to_vars(refs))] == [1.0, 2.0, 3.0]


@cases.add
def dynamic_process_sets_are_used() -> None:
    pair = hvd.add_process_set([0, 1])
    pair_id = pair.process_set_id or 0
    included = 1 if hvd.rank() < 2 else 0
    assert int(hvd.process_set_included_op(pair_id)) == included
    assert int(hvd.size_op(pair_id)) == 2
    if included:
        assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=pair).numpy() == 2.0
    else:
        with raises(tf.errors.InvalidArgumentError, "not a member"):
            hvd.allreduce(tf.constant(1.0), process_set=pair)
    hvd.remove_process_set(pair)


@cases.add
def a_rank_that_has_joined_takes_part_without_data() -> None:
    if hvd.rank() == 0:
        assert int(hvd.join()) in (1, 2)
        return
    assert hvd.allreduce(tf.constant([3.0]), op=hvd.Sum, name="joined").numpy().tolist() == [6.0]
    assert int(hvd.join()) in (1, 2)


@cases.add
def shutdown_and_init_again() -> None:
    hvd.shutdown()
    with raises(tf.errors.FailedPreconditionError, "hvd.init()"):
        hvd.allreduce(tf.constant([1.0]))
    hvd.init()
    assert hvd.allreduce(tf.constant([1.0]), op=hvd.Sum).numpy().tolist() == [3.0]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return cases.run(SIZE, start, LIMIT, ENVIRONMENT)


@pytest.mark.parametrize("case", cases.names())
def test_cases(outcomes: Outcomes, case: str) -> None:
    outcomes.check(case)


def lose_a_peer() -> str:
    hvd.init()
    tf.constant(1.0)
    if hvd.rank() == 1:
        return "left"

    @tf.function
    def step(x: Any) -> Any:
        return [hvd.allreduce(x * float(i)) for i in range(10)]

    with raises(tf.errors.UnknownError):
        step(tf.constant([1.0]))
    return "told"


def test_a_lost_peer_is_an_unknown_error() -> None:
    assert run_ranks(2, lose_a_peer, env=ENVIRONMENT, timeout=120) == ["told", "left"]
