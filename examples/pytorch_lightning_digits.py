"""Trains a small network on scikit-learn's handwritten digits with Lightning and Horovod.

    python examples/pytorch_lightning_digits.py                      one process
    horovodrun -np 2 python examples/pytorch_lightning_digits.py     two processes, which share the work of every step

The strategy is all that makes a program for one process one for many: Lightning shares out the data, and shows its
progress on rank 0.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from pytorch_digits import LEARNING_RATE, MOMENTUM, load_data, make_model
from torch import nn
from torch.utils.data import DataLoader

import horovod.torch as hvd
from horovod.lightning import HorovodStrategy


class Digits(pl.LightningModule):
    """The network, how it learns, and how it is tested."""

    def __init__(self) -> None:
        """Begin with random weights."""
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Any, _number: int) -> Any:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, _number: int) -> None:
        """Count the digits that are read correctly, on all processes."""
        right = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; with more processes a step averages over more samples and can be larger."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=MOMENTUM)


def main() -> None:
    """Train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step for each process")
    parser.add_argument("--report", type=Path, help="JSON file for the results")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")  # Lightning's own matter

    torch.set_num_threads(1)  # one core for each process
    trainer = pl.Trainer(
        strategy=HorovodStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=args.epochs,
        enable_progress_bar=not args.no_progress,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    train_data, test_data = load_data()
    module = Digits()
    start = time.perf_counter()
    trainer.fit(module, DataLoader(train_data, args.batch_size, shuffle=True))
    rate = args.epochs * len(train_data) / (time.perf_counter() - start)
    (results,) = trainer.test(module, DataLoader(test_data, args.batch_size), verbose=False)
    if trainer.is_global_zero:
        print(f"{hvd.size()} process(es): accuracy {results['accuracy']:.1%}, {rate:,.0f} samples/s")
        if args.report:
            report = {"processes": hvd.size(), "accuracy": results["accuracy"], "samples_per_s": rate}
            args.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
