"""Loading of saved models, whose optimizers become distributed."""

from types import ModuleType
from typing import Any

from horovod._keras.optimizers import distributed
from horovod.common.process_sets import global_process_set
from horovod.common.reduce_ops import Average


def load_model(
    framework: ModuleType, keras: Any, filepath: Any, *, custom_optimizers: Any, custom_objects: Any, compression: Any
) -> Any:
    """Loads a model with its optimizer, if it was saved with one, and makes that distributed.

    Args:
        framework: What Keras runs on: on_tensorflow or on_torch.
        keras: The Keras to load with.
        filepath: The file.
        custom_optimizers: Optimizer classes that Keras does not know.
        custom_objects: Whatever else Keras does not know, by name.
        compression: How gradients travel.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if getattr(optimizer, "_trainable_variables", None) == [] and model.trainable_variables:
            # Keras 3 has built it for no variables (.h5 files), and would refuse those of the model.
            optimizer.built = False
        arguments = {"op": Average, "compression": compression, "process_set": global_process_set}
        distributed(framework, optimizer, 1, False, name=None, **arguments)
    return model
