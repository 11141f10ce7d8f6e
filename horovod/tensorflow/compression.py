"""Compression: tensors travel as a smaller dtype.

Any object with the two static methods of Compressor can be given wherever a compression is asked for.
"""

from typing import Any

import tensorflow as tf


class Compressor:
    """What is done to a tensor before it is sent, and undone afterwards."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and a context for decompress."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undoes compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor itself."""
        return tensor


def _narrowed(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    if tensor.dtype.is_floating and tensor.dtype.size > dtype.size:
        return tf.cast(tensor, dtype), tensor.dtype
    return tensor, None


def _widened(tensor: Any, dtype: Any) -> Any:
    return tensor if dtype is None else tf.cast(tensor, dtype)


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16: ten bits of fraction, but nothing above 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor as float16, and the dtype that it had."""
        return _narrowed(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor with the dtype that it had."""
        return _widened(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: the range of float32, seven bits of fraction."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor as bfloat16, and the dtype that it had."""
        return _narrowed(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor with the dtype that it had."""
        return _widened(tensor, ctx)


class Compression:
    """The compressions that there are; float16 and bfloat16 are summed in float32."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
