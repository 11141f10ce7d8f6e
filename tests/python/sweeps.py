"""What the sweeps run over, and what NumPy says the results are. A new dtype or size is one entry here."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import horovod.numpy as hvd

Array = NDArray[Any]

# A payload of 112 bytes rides in the flag's line: 28 float32. A chunk has 256 KiB.
INLINE_BYTES = 112
CHUNK_BYTES = 256 * 1024


def sizes_for(dtype: Any) -> list[int]:
    """Numbers of elements around every threshold for a dtype."""
    width = np.dtype(dtype).itemsize
    inline, chunk = INLINE_BYTES // width, CHUNK_BYTES // width
    return [0, 1, 3, inline - 1, inline, inline + 1, 1000, chunk - 1, chunk, chunk + 1]


# More than a few ranks on a small machine move these slowly, so they are run for fewer operations.
LARGE_BYTES = [1024 * 1024, 5 * CHUNK_BYTES + 4 * 13]

REDUCED = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, np.int64]
BROADCAST_ONLY = [np.uint8, np.int8, np.uint16, np.int16, np.bool_]
OPS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max]


def values(dtype: Any, shape: int | tuple[int, ...], rank: int, seed: int = 0) -> Array:
    """A rank's input: any rank can make any other's."""
    generator = np.random.default_rng([seed, rank, int(np.prod(shape))])
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.asarray(generator.integers(0, 2, shape), dtype=dtype)
    if kind.kind in "iu":
        return np.asarray(generator.integers(0 if kind.kind == "u" else -100, 100, shape), dtype=dtype)
    return np.asarray(generator.standard_normal(shape), dtype=dtype)


def expected(inputs: list[Array], op: int, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """The reduction of the inputs, folded from the left; half types are summed in float32 and rounded once."""
    dtype = inputs[0].dtype
    half = dtype.itemsize == 2
    wide = [_scaled(array.astype(np.float32) if half else array, prescale) for array in inputs]
    total = wide[0]
    for array in wide[1:]:
        total = {hvd.Min: np.minimum, hvd.Max: np.maximum}.get(op, np.add)(total, array)
    total = _scaled(total, postscale / len(inputs) if op == hvd.Average else postscale)
    return total.astype(dtype)


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    if array.dtype.kind == "i":
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    return np.asarray(array * array.dtype.type(factor))


def check(result: Array, want: Array, what: str, exact: bool) -> None:
    """Fails with the case's description. Scaling may differ in the last place; a fold may not."""
    assert result.shape == want.shape, f"{what}: shape {result.shape}, expected {want.shape}"
    assert result.dtype == want.dtype, f"{what}: {result.dtype}, expected {want.dtype}"
    if exact or want.dtype.kind in "iub":
        good = np.array_equal(result, want)
    else:
        epsilon = float(ml_dtypes.finfo(want.dtype).eps)  # type: ignore[no-untyped-call]
        good = np.allclose(result.astype(np.float64), want.astype(np.float64), rtol=2 * epsilon, atol=epsilon)
    if not good:
        wrong = np.flatnonzero(result.ravel() != want.ravel())
        index = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {want.size} elements differ, the first at {index}: "
            f"{result.ravel()[index]!r}, expected {want.ravel()[index]!r}"
        )
