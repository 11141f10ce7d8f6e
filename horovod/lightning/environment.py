"""What Lightning asks about the processes: who they are. horovodrun has started them."""

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

import horovod.torch as hvd


class HorovodEnvironment(ClusterEnvironment):
    """The ranks of Horovod as Lightning's."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether somebody else starts the processes: horovodrun does."""
        return True

    @property
    def main_address(self) -> str:
        """Of the host that processes would connect to; Horovod's ranks have met already."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port that processes would connect to: none."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether this process was started by horovodrun."""
        return "HOROVOD_RANK" in os.environ

    def world_size(self) -> int:
        """The number of processes."""
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: it is Horovod's."""

    def global_rank(self) -> int:
        """This process's number among all."""
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: it is Horovod's."""

    def local_rank(self) -> int:
        """This process's number among those of its host."""
        return hvd.local_rank()

    def node_rank(self) -> int:
        """The number of this host."""
        return hvd.cross_rank()
