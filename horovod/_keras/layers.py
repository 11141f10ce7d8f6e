"""Layers of a model."""

from typing import Any


def variables_of_layers(layers: Any) -> list[Any]:
    """The trainable variables of a layer, of a list of layers, or of None."""
    if layers is None:
        return []
    several = layers if isinstance(layers, (list, tuple, set)) else [layers]
    return [variable for layer in several for variable in layer.trainable_weights]
