"""Loss scaling (mixed_float16) with ranks that must decide alike.

Keras' LossScaleOptimizer skips a step if a gradient is not finite. Around a distributed optimizer it would look at
this rank's gradients, before they are reduced: one rank might skip a step that another waits to reduce. So it asks all
ranks. (If the LossScaleOptimizer itself is the distributed one, it looks at reduced gradients, and nothing is to be
done.) model.compile() puts one around an optimizer by itself, so its class is changed when the first optimizer becomes
distributed.
"""

import sys
from typing import Any

import tensorflow as tf

from horovod.common.reduce_ops import Min
from horovod.tensorflow.naming import operation_name
from horovod.tensorflow.reductions import reduce_tensors


def agree_on_finite_gradients(optimizer: Any) -> None:
    """Changes Keras' LossScaleOptimizer, of the Keras that the optimizer is of, if it has not been changed before."""
    package = type(optimizer).__module__.partition(".")[0]
    keras = sys.modules.get(package)
    if package == "keras" and keras is not None:
        _change_keras3(keras)


def _change_keras3(keras: Any) -> None:
    scaler = getattr(keras.optimizers, "LossScaleOptimizer", None)
    if scaler is None or getattr(scaler, "_hvd_agrees", False):
        return
    own_check = scaler.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite = own_check(self, grads)
        reducer = getattr(self.inner_optimizer, "_hvd_reducer", None)
        if reducer is None or not reducer.process_set.included() or reducer.process_set.size() == 1:
            return finite
        name = operation_name("allreduce", f"{reducer.name}/finite", ignore_name_scope=True)
        agreed = reduce_tensors([tf.cast(finite, tf.int32)], name, Min, reducer.process_set)[0]
        return tf.cast(agreed, tf.bool)

    scaler.check_finite = check_finite
    scaler._hvd_agrees = True
