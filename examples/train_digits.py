"""Train a small CNN on scikit-learn's handwritten digits with plain DistributedDataParallel.

The name of the backend is the only difference to a script for Gloo:

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py
    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --backend gloo
"""

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits as sklearn_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEST_IMAGES = 360


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Images to train on and to test with, 8 x 8 pixels; they come with scikit-learn."""
    digits = sklearn_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    # A fixed seed of its own: the test images are always the same.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    """About 2.2 million parameters, so 8.8 MB of gradients."""
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


def batches(data: TensorDataset, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the data, endlessly, each epoch in a new order."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
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


def main() -> None:
    """Train, and report on rank 0."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="gflow", help="gflow or gloo")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    dist.init_process_group(backend=args.backend)
    torch.manual_seed(0)
    train_data, test_data = load_digits()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    data = batches(train_data, size=32)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        images, labels = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        seconds = time.perf_counter() - start
        _, accuracy = evaluate(model.module, test_data)
        print(f"{args.steps} steps in {seconds:.1f} s, test accuracy {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
