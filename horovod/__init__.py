"""Horovod: distributed training in a few lines. Import a binding, e.g. `import horovod.numpy as hvd`."""

__version__ = "1.0.0.dev0"

from horovod.runner import run

__all__ = ["__version__", "run"]
