"""What the sweeps run over, and what NumPy says the results are. A new dtype or size is one entry here."""

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from ranks import host_of

import horovod.numpy as hvd
from horovod.common.process_sets import ProcessSet

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

# The dtypes of training are swept over all sizes, the others over some.
MAIN = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, np.int64]
OTHER = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.uint64, np.complex64, np.complex128, np.bool_]
REDUCED = [*MAIN, *OTHER]
MOVED = [*REDUCED, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SUMS = [hvd.Sum, hvd.Average]
OPS = [*SUMS, hvd.Min, hvd.Max, hvd.Product]


def ops_for(dtype: Any) -> list[int]:
    """The reductions that mean something for a dtype; Adasum has a test of its own."""
    kind = np.dtype(dtype).kind
    if kind == "c":
        return [hvd.Sum, hvd.Average, hvd.Product]
    return [op for op in OPS if op != hvd.Average] if kind == "b" else OPS


def make_sets(size: int) -> list[ProcessSet]:
    """Overlapping and disjoint sets, as far as there are ranks for them."""
    choices = [[0], [size - 1], list(range(0, size, 2)), list(range(1, size))]
    distinct: list[list[int]] = []
    for ranks in choices:
        if ranks and len(ranks) < size and ranks not in distinct:
            distinct.append(ranks)
    return [hvd.ProcessSet(ranks) for ranks in distinct]


def start(size: int) -> list[ProcessSet]:
    """Initializes with the sets of this size and returns those that this rank is in, the global one first."""
    sets = make_sets(size)
    hvd.init(process_sets=sets)
    return [hvd.global_process_set, *(one for one in sets if one.included())]


def values(dtype: Any, shape: int | tuple[int, ...], rank: int, seed: int = 0) -> Array:
    """A rank's input: any rank can make any other's."""
    return _drawn(dtype, shape, rank, seed).copy()


# Sweeps ask for the same ones with one operation after another.
@functools.lru_cache(maxsize=32)
def _drawn(dtype: Any, shape: int | tuple[int, ...], rank: int, seed: int) -> Array:
    generator = np.random.default_rng([seed, rank, int(np.prod(shape))])
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.asarray(generator.integers(0, 2, shape), dtype=dtype)
    if kind.kind in "iu":
        return np.asarray(generator.integers(0 if kind.kind == "u" else -100, 100, shape), dtype=dtype)
    if kind.kind == "c":
        return np.asarray(generator.standard_normal(shape) + 1j * generator.standard_normal(shape), dtype=dtype)
    return np.asarray(generator.standard_normal(shape), dtype=dtype)


# ---- What the results should be: by the words of docs/design.md, to the last bit -------------------------------------


def expected(
    inputs: list[Array],
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    ranks: Sequence[int] | None = None,
    count: int | None = None,
) -> Array:
    """The reduction of the inputs.

    It is folded from the left within each host, then over the hosts. Half types are folded in float32, and rounded on
    their way to other hosts and at the end.

    Args:
        inputs: One for each rank.
        op: The reduction.
        prescale: Of each input.
        postscale: Of the result.
        ranks: Whose inputs these are; by default those of 0, 1, ...
        count: What an average is divided by; by default the number of inputs.
    """
    dtype = inputs[0].dtype
    hosts: dict[int, list[Array]] = {}
    with np.errstate(all="ignore"):
        for rank, array in zip(range(len(inputs)) if ranks is None else ranks, inputs, strict=True):
            hosts.setdefault(host_of(rank), []).append(_widened(_scaled(array, prescale)))
        totals = [_folded(arrays, op) for arrays in hosts.values()]
        if len(totals) > 1:
            totals = [_folded([_widened(total.astype(dtype)) for total in totals], op)]
        divisor = len(inputs) if count is None else count
        return _finished(totals[0], postscale, divisor if op == hvd.Average else 1, dtype)


def _folded(arrays: list[Array], op: int) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = _combined(total, array, op)
    return total


def _is_half(dtype: "np.dtype[Any]") -> bool:
    return dtype == np.float16 or dtype.name == "bfloat16"


def _widened(array: Array) -> Array:
    return array.astype(np.float32) if _is_half(array.dtype) else array


def _scaled(array: Array, factor: float) -> Array:
    return array if factor == 1.0 else _finished(_widened(array), factor, 1, array.dtype)


def _combined(a: Array, b: Array, op: int) -> Array:
    if a.dtype == np.bool_:
        return a & b if op in (hvd.Min, hvd.Product) else a | b
    if op == hvd.Min:
        return np.where(b < a, b, a)
    if op == hvd.Max:
        return np.where(b > a, b, a)
    if op != hvd.Product:
        return np.asarray(a + b)
    if a.dtype.kind != "c":
        return np.asarray(a * b)
    product = np.empty_like(a)  # by its definition: NumPy may fuse multiplication and addition
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def _finished(total: Array, factor: float, divisor: int, dtype: "np.dtype[Any]") -> Array:
    """Scaled and divided; floating types by one factor, in the type of `total`, before they are rounded to `dtype`."""
    if dtype == np.bool_ or (factor == 1.0 and divisor == 1):
        return total.astype(dtype)
    if dtype.kind in "iu":
        if factor == 1.0:
            rounded_down = total // dtype.type(divisor)
            return np.asarray(rounded_down + ((total < 0) & (total % dtype.type(divisor) != 0))).astype(dtype)
        return _saturated(np.trunc(total.astype(np.float64) * factor / divisor), dtype)
    if dtype.kind == "c":
        result = np.empty_like(total)
        result.real = total.real * total.real.dtype.type(factor / divisor)
        result.imag = total.imag * total.real.dtype.type(factor / divisor)
        return result
    return np.asarray(total * total.dtype.type(factor / divisor)).astype(dtype)


def _saturated(numbers: Array, dtype: "np.dtype[Any]") -> Array:
    limits = np.iinfo(dtype)
    result = np.zeros(numbers.shape, dtype)
    inside = (numbers > float(limits.min)) & (numbers < float(limits.max))
    result[inside] = numbers[inside].astype(dtype)
    result[numbers <= float(limits.min)] = limits.min
    result[numbers >= float(limits.max)] = limits.max
    return result


def own_rows(array: Array, position: int, count: int) -> Array:
    """The part of a reduced array that a rank of a reducescatter gets."""
    rows, longer = divmod(len(array), count)
    first = position * rows + min(position, longer)
    return array[first : first + rows + (1 if position < longer else 0)]


def check(result: Array, want: Array, what: str) -> None:
    """Fails with the case's description unless the two are the same to the last bit."""
    assert result.shape == want.shape, f"{what}: shape {result.shape}, expected {want.shape}"
    assert result.dtype == want.dtype, f"{what}: {result.dtype}, expected {want.dtype}"
    if result.tobytes() != want.tobytes():
        width = want.dtype.itemsize
        got, right = (np.frombuffer(array.tobytes(), np.uint8).reshape(-1, width) for array in (result, want))
        wrong = np.flatnonzero((got != right).any(axis=1))
        index = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {want.size} elements differ, the first at {index}: "
            f"{result.ravel()[index]!r}, expected {want.ravel()[index]!r}"
        )
