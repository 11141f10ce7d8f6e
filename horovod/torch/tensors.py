"""Tensors as the engine takes them: a code for the dtype, a shape, a pointer.

The engine knows nothing of strides, and ranks can't see each other's. A dense tensor in one of these memory orders is
handed over as it is, without a copy, with its extents in the order of memory:

    contiguous           as it is                   (a, b, c, d)
    channels_last        (n, c, h, w) goes as       (n, h, w, c, 1)
    channels_last_3d     (n, c, d, h, w) goes as    (n, d, h, w, c, 1)
    a transposed matrix  (a, b) goes as             (b, a, 1)

The ranks compare shapes, and the one at the end says that this is not the order of the dimensions: if a tensor is
channels_last on one rank and contiguous on another, the operation fails on all of them instead of adding elements that
don't belong together. Any other layout, and memory of another device, goes through a contiguous copy in CPU memory: of
an operation in place it is copied back at the end.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from horovod import _core
from horovod.common.process_sets import global_process_set

# dtype: its code in the engine.
CODES: dict[torch.dtype, int] = {
    torch.uint8: _core.UINT8,
    torch.int8: _core.INT8,
    torch.int16: _core.INT16,
    torch.int32: _core.INT32,
    torch.int64: _core.INT64,
    torch.float16: _core.FLOAT16,
    torch.bfloat16: _core.BFLOAT16,
    torch.float32: _core.FLOAT32,
    torch.float64: _core.FLOAT64,
    torch.bool: _core.BOOL,
    torch.complex64: _core.COMPLEX64,
    torch.complex128: _core.COMPLEX128,
}
# Those that older releases don't have: float8 came with 2.1, the unsigned integers with 2.3.
for _name, _code in (
    ("uint16", _core.UINT16),
    ("uint32", _core.UINT32),
    ("uint64", _core.UINT64),
    ("float8_e4m3fn", _core.FLOAT8_E4M3FN),
    ("float8_e5m2", _core.FLOAT8_E5M2),
):
    if hasattr(torch, _name):
        CODES[getattr(torch, _name)] = _code

# Bound once: these are on the way of every small operation.
_known_code = CODES.get
_Tensor = Tensor
_strided = torch.strided
_empty_like = torch.empty_like
_frombuffer = torch.frombuffer
# From 2.2 on; before it autograd can't be told.
_increment_version = getattr(torch.autograd.graph, "increment_version", lambda tensor: None)

# The short way of small operations (src/api/python_plain.h).
plain = _core.plain_tensors(
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    Tensor,
    torch.nn.Parameter,
    torch.empty_like,
    getattr(torch._C, "_increment_version", None),
    vars(torch.compiler),
    global_process_set,
)

# What an operation needs to know of its tensor: code, shape, input, output, result, keep_alive, as _core takes them.
Memory = tuple[int, tuple[int, ...], int, int, Any, Any]


def code_of(tensor: Tensor) -> int:
    """The engine's code for the tensor's dtype.

    Raises:
        ValueError: There is none, or this is no dense tensor.
    """
    if isinstance(tensor, _Tensor) and tensor.layout is _strided and (known := _known_code(tensor.dtype)) is not None:
        return known
    if not isinstance(tensor, Tensor):
        raise ValueError(f"Expected a torch.Tensor, got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"Tensor layout {tensor.layout} is not supported. (Dense tensors only; for the sum or average of sparse "
            "ones there is sparse_allreduce_async, or use to_dense().)"
        )
    supported = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in CODES))
    raise ValueError(f"Tensor type {tensor.dtype} is not supported. (Tensors may have the types {supported}.)")


def for_result(tensor: Tensor) -> Memory:
    """For an operation whose result is a new tensor of the same shape and layout."""
    if (
        isinstance(tensor, _Tensor)
        and (code := _known_code(tensor.dtype)) is not None
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not _is_lazy(tensor, code)
    ):
        output = _empty_like(tensor)
        return code, tensor.shape, tensor.data_ptr(), output.data_ptr(), output, tensor
    code = code_of(tensor)
    shape = memory_shape(tensor)
    if shape is not None:
        output = torch.empty_like(tensor)
        if memory_shape(output) == shape:
            return code, shape, tensor.data_ptr(), output.data_ptr(), output, tensor
    dense = contiguous(tensor)
    output = torch.empty_like(dense)
    result: Any = output if tensor.is_cpu else functools.partial(output.to, tensor.device)
    return code, dense.shape, dense.data_ptr(), output.data_ptr(), result, (dense, output)


def in_place(tensor: Tensor) -> Memory:
    """For an operation that writes its result into the tensor itself.

    Raises:
        ValueError: The tensor can't be handed over, or elements of it share memory.
    """
    if (
        isinstance(tensor, _Tensor)
        and (code := _known_code(tensor.dtype)) is not None
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not _is_lazy(tensor, code)
    ):
        _increment_version(tensor)  # autograd finds out if it was needed as it was
        pointer = tensor.data_ptr()
        return code, tensor.shape, pointer, pointer, tensor, tensor
    code = code_of(tensor)
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"Tensor of shape {tuple(tensor.shape)} was expanded: its elements share memory, and the result can't be "
            "written into it. Use clone()."
        )
    shape = memory_shape(tensor)
    if shape is not None:
        _increment_version(tensor)
        pointer = tensor.data_ptr()
        return code, shape, pointer, pointer, tensor, tensor
    copy = contiguous(tensor)
    pointer = copy.data_ptr()
    return code, copy.shape, pointer, pointer, functools.partial(_copy_back, copy, tensor), copy


def rows_of(tensor: Tensor) -> int:
    """The extent of the first dimension; of a scalar, which the engine will refuse where rows are needed, 0."""
    return tensor.shape[0] if tensor.dim() else 0


def for_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The code, and the tensor with its rows one after the other in CPU memory: itself if they are."""
    code = code_of(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not _is_lazy(tensor, code):
        return code, tensor
    return code, contiguous(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """The values in CPU memory in the order of the dimensions: the tensor itself, without its history, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def from_rows(dtype: torch.dtype, device: torch.device | None, rows: _core.Rows) -> Tensor:
    """The tensor over memory that the engine has made, which it keeps alive; or its copy on a device."""
    shape = rows.shape
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device or "cpu")
    memory: Any = rows
    tensor = _frombuffer(memory, dtype=dtype)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    return tensor if device is None else tensor.to(device)


def _is_lazy(tensor: Tensor, code: int) -> bool:
    """Whether the memory does not hold the values themselves: conj() and imag only set a flag."""
    return tensor.is_neg() or (code in (_core.COMPLEX64, _core.COMPLEX128) and tensor.is_conj())


def memory_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """The extents in the order of memory; None if the tensor needs a copy."""
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return None
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return shape
    dimensions = len(shape)
    if (
        (dimensions == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (dimensions == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
        or (dimensions == 2 and tensor.t().is_contiguous())
    ):
        first, second, *others = shape
        return (second, first, 1) if dimensions == 2 else (first, *others, second, 1)
    return None


def _copy_back(copy: Tensor, tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.copy_(copy)
