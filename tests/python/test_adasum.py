"""Adasum against its definition, in float64."""

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import run_ranks
from sweeps import CHUNK_BYTES, Array, start, values

import horovod.numpy as hvd

pytestmark = pytest.mark.usefixtures("transport")

# dtype: how far a result may be off, relative to the largest element. A vector is rounded after every round.
TOLERANCES: dict[Any, float] = {np.float64: 1e-13, np.float32: 2e-6, np.float16: 4e-3, ml_dtypes.bfloat16: 4e-2}


def pair(a: Array, b: Array) -> Array:
    """Orthogonal vectors are added, parallel ones averaged."""
    dot, aa, bb = float(a.ravel() @ b.ravel()), float(a.ravel() @ a.ravel()), float(b.ravel() @ b.ravel())
    least = float(np.sqrt(np.finfo(np.float64).tiny))
    from_a = 1.0 if aa < least else 1.0 - dot / (2 * aa)
    from_b = 1.0 if bb < least else 1.0 - dot / (2 * bb)
    return np.asarray(from_a * a + from_b * b)


def adasum(inputs: list[Array]) -> Array:
    """Ranks beyond the largest power of two fold into the first ones; then neighbours, and neighbours of those."""
    vectors = [array.astype(np.float64) for array in inputs]
    power = 1 << (len(vectors).bit_length() - 1)
    for extra in range(power, len(vectors)):
        vectors[extra - power] = pair(vectors[extra - power], vectors[extra])
    distance = 1
    while distance < power:
        vectors = [pair(vectors[min(r, r ^ distance)], vectors[max(r, r ^ distance)]) for r in range(power)]
        distance *= 2
    return vectors[0]


def close(result: Array, want: Array, dtype: Any, what: str) -> None:
    assert result.dtype == dtype, what
    assert result.shape == want.shape, what
    if not want.size:
        return
    scale = float(np.abs(want).max()) or 1.0
    error = float(np.abs(result.astype(np.float64) - want).max()) / scale
    assert error <= TOLERANCES[dtype], f"{what}: off by {error:.3g}"


def case(members: Any, dtype: Any, shape: int | tuple[int, ...], name: str, scale: float = 1.0) -> Array:
    inputs = [values(dtype, shape, rank) for rank in members.ranks]
    own = inputs[members.rank()].copy()
    result = hvd.allreduce(
        own, op=hvd.Adasum, name=name, process_set=members, prescale_factor=scale, postscale_factor=1 / scale
    )
    want = adasum([array.astype(np.float64) * scale for array in inputs]) / scale
    close(result, want, dtype, f"{np.dtype(dtype).name} {shape} scale {scale} of {members.ranks}")
    assert np.array_equal(own, inputs[members.rank()])
    return result


def sweep(size: int) -> str:
    digest = hashlib.sha256()
    for members in start(size):
        for dtype in TOLERANCES:
            chunk = CHUNK_BYTES // np.dtype(dtype).itemsize
            for shape in (0, 1, 3, 28, 1000, (4, 5, 6), chunk, 2 * chunk + 7):
                result = case(members, dtype, shape, f"{np.dtype(dtype).name}.{shape}")
                if members is hvd.global_process_set:
                    digest.update(result.tobytes())
            case(members, dtype, 50, "scaled", scale=0.5)
    hvd.barrier()
    return digest.hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_adasum(size: int) -> None:
    digests = run_ranks(size, sweep, size, timeout=240)
    assert len(set(digests)) == 1, "not the same bits on all ranks"


def properties(size: int) -> None:
    hvd.init()
    rank = hvd.rank()
    # Orthogonal vectors: the sum. Equal ones: themselves.
    basis = np.zeros(size)
    basis[rank] = 1.0 + rank
    assert hvd.allreduce(basis, op=hvd.Adasum).tolist() == [1.0 + other for other in range(size)]
    same = np.arange(10.0)
    np.testing.assert_allclose(hvd.allreduce(same, op=hvd.Adasum), same, rtol=1e-14)
    # Zeros do not disturb, and nothing becomes NaN.
    alone = same if rank == 0 else np.zeros(10)
    np.testing.assert_allclose(hvd.allreduce(alone, op=hvd.Adasum), same, rtol=1e-14)
    assert hvd.allreduce(np.zeros(10), op=hvd.Adasum).tolist() == [0.0] * 10
    # In place, and many at once: each tensor has its own coefficients, also those that run as one batch.
    handles = [
        hvd.allreduce_async(values(np.float32, 5 + i, rank, i), op=hvd.Adasum, name=f"many {i}") for i in range(20)
    ]
    for i, handle in enumerate(handles):
        want = adasum([values(np.float32, 5 + i, other, i) for other in range(size)])
        close(hvd.synchronize(handle), want, np.float32, f"many {i}")
    arrays = [values(np.float64, 5 + i, rank, i) for i in range(3)]
    hvd.grouped_allreduce_(arrays, op=hvd.Adasum)
    for i, array in enumerate(arrays):
        close(array, adasum([values(np.float64, 5 + i, other, i) for other in range(size)]), np.float64, f"group {i}")


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("variables", [{}, {"HOROVOD_FUSION_THRESHOLD": "0"}])
def test_properties(size: int, variables: dict[str, str]) -> None:
    run_ranks(size, properties, size, env=variables)
