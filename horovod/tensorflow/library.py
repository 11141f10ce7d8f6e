"""The library with our TensorFlow operations (src/shims/tensorflow), loaded into TensorFlow.

Their kernels are asynchronous: they hand their tensors to the engine and return, so that all operations of a step are
under way at once, in whatever order each rank's executor comes to them.
"""

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

_PATH = Path(__file__).with_name("libhorovod_tensorflow.so")
_OPERATIONS = (
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodJoin",
    "HorovodPlace",
    "HorovodReducescatter",
)


def _load() -> Any:
    # By TensorFlow first: what was registered while another loaded the library is not its own.
    loaded = tf.load_op_library(str(_PATH))
    reason = ctypes.CDLL(str(_PATH)).hvd_tensorflow_error
    reason.restype = ctypes.c_char_p
    if error := reason().decode():
        raise ImportError(f"horovod.tensorflow: TensorFlow {tf.__version__} can't get Horovod's operations: {error}.")
    # Stateful operations are run one after the other in a tf.function, in the order of the program, unless they are
    # listed here: then they are run as soon as their inputs are there, and still neither dropped nor merged.
    listed = auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = frozenset(listed) | frozenset(_OPERATIONS)
    return loaded


library = _load()
