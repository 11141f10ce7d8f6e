"""Measures how many images a second a network learns from random data: with one process, and with many.

    python examples/pytorch_synthetic_benchmark.py                        one process
    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py       two

The networks are those of resnet.py and, where torchvision is installed, all of its models.
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from resnet import NAMES, make_resnet
from torch import nn
from tqdm import tqdm

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="PyTorch Synthetic Benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--bf16-allreduce", action="store_true", help="send gradients as bfloat16")
    parser.add_argument("--model", default="resnet50", help=f"{', '.join(NAMES)}, or a model of torchvision")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a step for each process")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches of one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU though there is a GPU")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--threads", type=int, help="of each process on the CPU; the cores shared out if not given")
    return parser.parse_args()


def make_model(name: str) -> nn.Module:
    """Return a network by its name.

    Raises:
        SystemExit: There is none of this name.
    """
    if name in NAMES:
        return make_resnet(name)
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError:
        raise SystemExit(
            f"--model {name}: expected one of {', '.join(NAMES)}; for others install torchvision."
        ) from None
    if not hasattr(models, name):
        raise SystemExit(f"--model {name}: torchvision has no such model.")
    model: nn.Module = getattr(models, name)()
    return model


def make_step(args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Return a function that makes one step of training."""
    model = make_model(args.model).to(device)
    # With Average a step is over as many more images as there are processes; Adasum needs no larger steps.
    scale = 1 if args.use_adasum else hvd.size()
    compression: Any = hvd.Compression.none
    if args.fp16_allreduce:
        compression = hvd.Compression.fp16
    elif args.bf16_allreduce:
        compression = hvd.Compression.bf16
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * scale),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    """Warm up, measure, report."""
    args = parse_arguments()
    hvd.init()
    cuda = not args.no_cuda and torch.cuda.is_available()
    kind = "GPU" if cuda else "CPU"
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    torch.set_num_threads(args.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    torch.manual_seed(hvd.rank())
    step = make_step(args, device)

    def say(text: str) -> None:
        if hvd.rank() == 0:
            tqdm.write(text)

    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of {kind}s: {hvd.size()}")
    say("Running warmup...")
    for _ in range(args.num_warmup_batches):
        step()
    say("Running benchmark...")
    rates = []
    iterations: Any = range(args.num_iters)
    if hvd.rank() == 0:
        iterations = tqdm(iterations, desc="measuring", ncols=80)
    for number in iterations:
        start = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            step()
        if cuda:
            torch.cuda.synchronize()
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - start))
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per {kind}")
    mean, deviation = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {kind}: {mean:.1f} +-{deviation:.1f}")
    say(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * deviation:.1f}")


if __name__ == "__main__":
    main()
