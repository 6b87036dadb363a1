"""Train a small CNN on scikit-learn's handwritten digits with plain DistributedDataParallel.

The script is what a user would write without knowing gflow: the backend's name is all that
changes the exchange of gradients. Start it with torchrun:

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --backend gflow
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOOPBACK_BYTES = Path("/sys/class/net/lo/statistics/tx_bytes")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on handwritten digits with DDP (start it with torchrun).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--backend", default="gflow", choices=["gloo", "gflow"], help="torch.distributed backend"
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order")
    # Not "--log": torchrun takes that for an abbreviation of its own options and stops.
    parser.add_argument("--log-file", type=Path, help="rank 0 writes JSON lines here")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels, which come with scikit-learn: nothing is downloaded."""
    try:
        from sklearn.datasets import load_digits as sklearn_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise SystemExit(
            "This example needs scikit-learn for its data: pip install scikit-learn"
        ) from error

    digits = sklearn_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    # The split has a seed of its own, so that every --seed is scored on the same images.
    train, test = train_test_split(
        range(len(labels)), test_size=360, random_state=0, stratify=digits.target
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    """About 2.2 million parameters: enough for DDP to have gradients worth exchanging."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def batches(data: TensorDataset, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the data, epoch after epoch, each in a new order."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise SystemExit(f"--batch {batch} is larger than one rank's share: {len(sampler)} images")
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Mean loss and accuracy over a whole data set."""
    model.eval()
    images, labels = data.tensors
    outputs = model(images)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return loss, accuracy


def loopback_bytes() -> int | None:
    """Bytes that this host has sent to itself so far; None where Linux does not count them."""
    try:
        return int(LOOPBACK_BYTES.read_text())
    except (OSError, ValueError):
        return None


def backend_metrics(backend: str) -> dict[str, object] | None:
    """What gflow itself counted; other backends have nothing to report."""
    if backend != "gflow":
        return None
    import gflow

    return asdict(gflow.metrics(dist.group.WORLD))


def write_line(log: TextIO | None, record: dict[str, object]) -> None:
    """Add one line to the log, if there is one."""
    if log is not None:
        log.write(json.dumps(record) + "\n")
        log.flush()  # whoever follows the file sees each step as it happens


def main() -> None:
    """Train, evaluate, and report on rank 0."""
    args = parse_args()
    dist.init_process_group(backend=args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    train_data, test_data = load_digits()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    log = args.log_file.open("w") if args.log_file is not None and rank == 0 else None

    # Both barriers make the loopback counter cover the steps of all ranks, and nothing else.
    dist.barrier()
    loopback_before = loopback_bytes()
    start = time.perf_counter()
    stream = batches(train_data, args.batch, args.seed)
    for step in range(1, args.steps + 1):
        images, labels = next(stream)
        step_start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - step_start
        if rank == 0:
            record = {"step": step, "seconds": seconds, "loss": loss.item()}
            write_line(log, record | {"loopback_bytes_total": loopback_bytes()})
            if step % 25 == 0 or step in (1, args.steps):
                print(
                    f"{args.backend}: step {step}/{args.steps}, loss {loss.item():.4f}, "
                    f"{seconds * 1e3:.1f} ms",
                    flush=True,
                )
    dist.barrier()
    total_seconds = time.perf_counter() - start
    loopback_after = loopback_bytes()

    if rank == 0:
        train_loss, train_accuracy = evaluate(model.module, train_data)
        test_loss, test_accuracy = evaluate(model.module, test_data)
        loopback = None
        if loopback_before is not None and loopback_after is not None:
            loopback = loopback_after - loopback_before
        parameters = [p for p in model.parameters() if p.requires_grad]
        summary: dict[str, object] = {
            "summary": True,
            "backend": args.backend,
            "ranks": ranks,
            "steps": args.steps,
            "seed": args.seed,
            "total_seconds": total_seconds,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "loopback_bytes": loopback,
            "parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "metrics": backend_metrics(args.backend),
        }
        write_line(log, summary)
        print(
            f"{args.backend}: {args.steps} steps in {total_seconds:.1f} s, "
            f"test accuracy {test_accuracy:.1%}, train loss {train_loss:.4f}",
            flush=True,
        )
    if log is not None:
        log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
