"""The framework that Keras runs on: TensorFlow or PyTorch.

on_tensorflow.py and on_torch.py have the same names: what the rest of the Keras binding needs of a framework.
"""

from types import ModuleType
from typing import Any


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


def other_backend(what: str, backend: str, needed: str, choices: str) -> str:
    """The text of the error for users whose Keras runs on another framework than they have asked Horovod for.

    Args:
        what: The function or module that was used.
        backend: What Keras runs on.
        needed: What it would have to run on.
        choices: Values of KERAS_BACKEND for that.
    """
    advice = " With PyTorch use horovod.keras: import horovod.keras as hvd." if backend == "torch" else ""
    return (
        f"{what}: Keras runs on {backend}, and this needs {needed}.{advice} Otherwise set KERAS_BACKEND to {choices} "
        "before Keras is imported."
    )
