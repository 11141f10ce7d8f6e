"""The framework that Keras runs on: TensorFlow or PyTorch.

on_tensorflow.py and on_torch.py have the same names: what the rest of the Keras binding needs of a framework.
"""

from types import ModuleType
from typing import Any

from horovod._keras.messages import other_backend


def framework_of(keras: Any) -> ModuleType:
    """What the Keras binding needs of the framework that this Keras runs on.

    Raises:
        ImportError: Keras runs on something else, or the framework is not installed.
    """
    backend = keras.backend.backend()
    if backend == "torch":
        from horovod._keras import on_torch

        return on_torch
    if backend == "tensorflow":
        from horovod._keras import on_tensorflow

        return on_tensorflow
    raise ImportError(other_backend("horovod.keras", backend, "TensorFlow or PyTorch", "tensorflow or torch"))
