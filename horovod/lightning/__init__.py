"""Horovod for Lightning 2: `Trainer(strategy=horovod.lightning.HorovodStrategy())`, or strategy="horovod"."""

from horovod.lightning.environment import HorovodEnvironment
from horovod.lightning.strategy import HorovodStrategy

__all__ = ["HorovodEnvironment", "HorovodStrategy"]
