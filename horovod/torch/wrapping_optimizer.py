"""How an optimizer of the user's becomes one of ours: an object of a subclass of its class, which shares its state.

The wrapper and the original have the same parameter groups and the same state at all times, also after
load_state_dict: a learning rate scheduler that was made with the original works on.
"""

import functools
from typing import Any

import torch


class WrappingOptimizer(torch.optim.Optimizer):
    """What all our optimizers have in common; put before the class of the original."""

    _original: Any
    _given_names: dict[torch.Tensor, str]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state: see torch.optim.Optimizer."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        # It has put new objects there; the original has the old ones.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses copies: nothing would be reduced for them."""
        raise TypeError(
            "A DistributedOptimizer can't be copied or pickled. Save its state_dict(), and load that into a new one."
        )

    def _tell_schedulers(self) -> None:
        """A scheduler warns if its optimizer, which may be the original, has not made a step before its own."""
        self._original._opt_called = True


def wrap(optimizer: Any, behaviour: Any, **attributes: Any) -> Any:
    """Makes the wrapper.

    Args:
        optimizer: The original.
        behaviour: A subclass of WrappingOptimizer.
        **attributes: Of the wrapper.
    """
    base: Any = type(optimizer)
    cls = _class_with(behaviour, base)
    wrapper = cls.__new__(cls)
    # A scheduler that was made before has put a method `step` there, which would bypass ours.
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", "zero_grad")}
    wrapper.__dict__.update(own, _original=optimizer, **attributes)
    return wrapper


@functools.cache
def _class_with(behaviour: Any, base: Any) -> Any:
    # By this mark torch knows that a step runs the optimizer's hooks: that of the base does, and once is enough.
    vars(behaviour)["step"].hooked = True
    return type(base.__name__, (behaviour, base), {"__doc__": base.__doc__, "__module__": base.__module__})
