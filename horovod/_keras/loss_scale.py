"""Loss scaling (mixed_float16) with ranks that must decide alike.

Keras' LossScaleOptimizer skips a step if a gradient is not finite. Around a distributed optimizer it would look at
this rank's gradients, before they are reduced: one rank might skip a step that another waits to reduce. So it asks all
ranks. (If the LossScaleOptimizer itself is the distributed one, it looks at reduced gradients, and nothing is to be
done.) model.compile() puts one around an optimizer by itself, so its class is changed when the first optimizer becomes
distributed.
"""

import sys
from types import ModuleType
from typing import Any


def agree_on_finite_gradients(framework: ModuleType, optimizer: Any) -> None:
    """Changes Keras' LossScaleOptimizer, of the Keras that the optimizer is of, if it has not been changed before."""
    packages = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    if "keras" in packages:
        _change(sys.modules["keras"].optimizers.LossScaleOptimizer, _change_keras3, framework)
    if "tf_keras" in packages:
        # One for each generation of optimizers.
        for scaler in sys.modules["tf_keras"].mixed_precision.LossScaleOptimizer.__subclasses__():
            _change(scaler, _change_keras2, framework)


def scale_variables(optimizer: Any) -> list[Any]:
    """The variables of a LossScaleOptimizer of Keras 2, which it does not count among those of the optimizer."""
    state: Any = getattr(optimizer, "_loss_scale", None)
    return [state.current_loss_scale, state.counter] if hasattr(state, "current_loss_scale") else []


def _change(scaler: Any, change: Any, framework: ModuleType) -> None:
    if not scaler.__dict__.get("_hvd_agrees", False):
        change(scaler, framework)
        scaler._hvd_agrees = True


def _change_keras3(scaler: Any, framework: ModuleType) -> None:
    own_check = scaler.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite = own_check(self, grads)
        reducer = getattr(self.inner_optimizer, "_hvd_reducer", None)
        return finite if reducer is None else framework.agree(reducer, finite)

    scaler.check_finite = check_finite


def _change_keras2(scaler: Any, framework: ModuleType) -> None:
    own_apply = scaler.apply_gradients

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        reducer = getattr(self.inner_optimizer, "_hvd_reducer", None)
        if reducer is None or not self.dynamic:
            return own_apply(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        gradients = [gradient for gradient, _ in pairs]
        agreed = framework.agree(reducer, framework.all_finite(gradients))
        # It has no question of its own that could be answered: where a rank has a gradient that is not finite, all get
        # one.
        variables = [variable for _, variable in pairs]
        marked = framework.infinite_unless(agreed, gradients)
        return own_apply(self, list(zip(marked, variables, strict=True)), *args, **kwargs)

    scaler.apply_gradients = apply_gradients
