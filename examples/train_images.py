"""Train AlexNet or ResNet-50 on random images with plain DistributedDataParallel.

It shows the time of a step: AlexNet has 244 MB of gradients, ResNet-50 102 MB.

    torchrun --standalone --nproc-per-node 2 examples/train_images.py --model alexnet
    torchrun --standalone --nproc-per-node 2 examples/train_images.py --model resnet50

`--backend gloo` does the same without gflow.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gflow.models import AlexNet, ResNet50

MODELS = {"alexnet": AlexNet, "resnet50": ResNet50}
CLASSES = 10


def main() -> None:
    """Train, and report on rank 0."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="alexnet", choices=MODELS, help="which network")
    parser.add_argument("--backend", default="gflow", help="gflow or gloo")
    parser.add_argument("--steps", type=int, default=15, help="how many")
    parser.add_argument("--batch", type=int, default=4, help="images per rank and step")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image, each way")
    args = parser.parse_args()

    dist.init_process_group(backend=args.backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[args.model]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)

    # Each rank has its own images, the same in every step: the loss falls as they are learned.
    torch.manual_seed(rank)
    images = torch.randn(args.batch, 3, args.size, args.size)
    labels = torch.randint(CLASSES, (args.batch,))
    seconds = []
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {seconds[-1] * 1e3:.0f} ms", flush=True)

    if rank == 0:
        median = statistics.median(seconds)
        speed = args.batch * dist.get_world_size() / median
        print(f"{args.model}: {median * 1e3:.0f} ms per step (median), {speed:.1f} images/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
