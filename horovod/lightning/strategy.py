"""Lightning's training loop on Horovod: a strategy for Trainer.

Lightning calls optimizer.step(closure); the closure runs forward and backward pass. Before the step it clips gradients,
unscales those of mixed precision and calls hooks of the user; all of these must see the gradients of all ranks. So

- with automatic optimization the gradients are synchronized when the closure has ended, before anything else;
- with manual optimization they are synchronized at the end of every manual_backward: only the user knows what is next;

and the optimizers' own synchronization is skipped. Batches whose gradients are accumulated come in
block_backward_sync(), and are not counted by the optimizers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp

import horovod.torch as hvd
from horovod.lightning.environment import HorovodEnvironment

_OPS: dict[Any, int] = {
    None: hvd.Average,
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}
_TORCH_OPS = {"AVG": "avg", "SUM": "sum", "MIN": "min", "MAX": "max", "PRODUCT": "product"}


class HorovodStrategy(ParallelStrategy):
    """Trains on the processes that horovodrun has started, one device each.

    Args:
        accelerator: Lightning's, chosen by the Trainer if None.
        parallel_devices: The devices of this host, one for each of its processes; chosen by the Trainer if None.
        checkpoint_io: Lightning's.
        precision_plugin: Lightning's.
        **optimizer_arguments: For hvd.DistributedOptimizer: compression, op, groups, gradient_predivide_factor,
            sparse_as_dense.
    """

    strategy_name = "horovod"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **optimizer_arguments: Any,
    ) -> None:
        """Initializes Horovod."""
        hvd.init()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HorovodEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._optimizer_arguments = optimizer_arguments
        self.set_world_ranks()

    # ---- Who this process is -----------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether data has to be shared out: Lightning then sets a DistributedSampler."""
        return hvd.size() > 1

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[hvd.local_rank() % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For the DistributedSampler."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def set_world_ranks(self) -> None:
        """Has Lightning print, draw and log on rank 0 only."""
        marked: Any = rank_zero_only
        marked.rank = hvd.rank()

    # ---- Model and optimizers ----------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """Moves the model to this process's device, and gives it the weights of rank 0."""
        assert self.model is not None
        self.model.to(self.root_device)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        assert self.lightning_module is not None
        if self._layer_sync and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            return hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers and schedulers of the module, and has the optimizers reduce their gradients."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        names = list(self.lightning_module.named_parameters())
        self.optimizers = [
            hvd.DistributedOptimizer(optimizer, named_parameters=names, **self._optimizer_arguments)
            for optimizer in self.optimizers
        ]

    @property
    def _combines_steps(self) -> bool:
        return bool(self._optimizer_arguments.get("op") == hvd.Adasum)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Makes a step with the gradients of all ranks."""
        assert self.lightning_module is not None
        if self._combines_steps and hvd.size() > 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def synchronized() -> Any:
            result = closure()
            optimizer.synchronize()
            return result

        automatic = self.lightning_module.automatic_optimization
        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, synchronized if automatic else closure, model, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """With manual optimization, waits for the gradients of all ranks."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            for optimizer in self.optimizers:
                distributed: Any = optimizer
                distributed.synchronize()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate gradients."""
        with ExitStack() as stack:
            if not self._combines_steps:
                for optimizer in self.optimizers:
                    distributed: Any = optimizer
                    stack.enter_context(distributed.no_sync())
            yield

    # ---- Collectives -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of one process on all."""
        return hvd.broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all processes; whatever else it is given stays as it is.

        Args:
            tensor: This process's values.
            group: Must be None.
            reduce_op: "mean", "sum", "min", "max", "product", or torch.distributed's.

        Raises:
            ValueError: There is a group, or no such operation.
        """
        _check_no_group(group)
        if not isinstance(tensor, Tensor):
            return tensor
        return hvd.allreduce(tensor.detach(), op=_reduce_op(reduce_op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all processes, stacked.

        Args:
            tensor: This process's values, of the same shape on all.
            group: Must be None.
            sync_grads: Whether gradients go back to the processes, added up as by torch.distributed.

        Raises:
            ValueError: There is a group.
        """
        _check_no_group(group)
        own = tensor if sync_grads else tensor.detach()
        if own.requires_grad:
            own = own.view_as(own)
            own.register_hook(lambda gradient: gradient * hvd.size())  # hvd.allgather averages them
        return hvd.allgather(own.unsqueeze(0))


def _check_no_group(group: Any) -> None:
    if group is not None:
        raise ValueError(f"HorovodStrategy: there are no groups of torch.distributed here; group is {group!r}.")


def _reduce_op(reduce_op: Any) -> int:
    name = _TORCH_OPS.get(reduce_op.name) if isinstance(reduce_op, ReduceOp.RedOpType) else reduce_op
    if isinstance(name, str):
        name = name.lower()
    if name not in _OPS:
        raise ValueError(f"HorovodStrategy: expected one of {[op for op in _OPS if op]}, got {reduce_op!r}.")
    return _OPS[name]


if HorovodStrategy.strategy_name not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(
        HorovodStrategy.strategy_name, HorovodStrategy, description="Training on the processes of horovodrun"
    )
