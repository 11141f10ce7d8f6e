"""Tensors with the values of the sweeps, which are NumPy's: what NumPy says of results holds for TensorFlow too."""

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sweeps import check, values

# For groups of ranks: little is logged, and threads of TensorFlow don't fight for two cores.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # What hangs says so within the time of a test.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
}

LIMIT = 500.0  # seconds for a group: far more than it needs, on a busy machine too


def tensor_of(dtype: Any, shape: int | tuple[int, ...], rank: int, seed: int = 0) -> Any:
    """A rank's input: any rank can make any other's."""
    return tf.constant(values(dtype, shape, rank, seed))


def same(result: Any, want: NDArray[Any], what: str) -> None:
    """Fails unless the tensor has the array's bits."""
    check(np.asarray(result.numpy()), want, what)
