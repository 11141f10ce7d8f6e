"""Variables of TensorFlow, tf-keras and Keras 3, which is the one without a ref()."""

from typing import Any

import tensorflow as tf


def tf_variable(variable: Any) -> Any:
    """The variable of TensorFlow that one of Keras 3 holds; any other as it is."""
    if isinstance(variable, (tf.Variable, tf.Tensor)) or not hasattr(variable, "value"):
        return variable
    value = variable.value
    return variable if callable(value) else value


def reference(variable: Any) -> Any:
    """What can be compared and hashed, and is the same for the same variable."""
    return tf_variable(variable).ref()


def description(variable: Any) -> str:
    """Dtype and shape: what ranks must have alike. (Names depend on what else a process has built.)"""
    return f"{tf.as_dtype(variable.dtype).name} {tuple(variable.shape)}"


def vars_to_refs(vars: Any) -> Any:
    """Nested lists or tuples of variables as tuples of references, which can be hashed."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in vars)
    return reference(vars)


def refs_to_vars(refs: Any) -> Any:
    """The inverse of vars_to_refs."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))
