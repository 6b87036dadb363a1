"""Measures how long it takes to create a group of two ranks, alternating Gloo and gflow.

torchrun --nproc-per-node 2 benches/startup.py
"""

import statistics
import time

import torch.distributed as dist

import gflow

ROUNDS = 15


def main() -> None:
    """Create groups in turn, and print the median time of each backend."""
    gflow.register()
    dist.init_process_group("gloo")
    seconds: dict[str, list[float]] = {"gloo": [], "gflow": []}
    for _ in range(ROUNDS):
        for backend, samples in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            group = dist.new_group(backend=backend)
            samples.append(time.perf_counter() - start)
            dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        for backend, samples in seconds.items():
            print(f"{backend:6} {statistics.median(samples) * 1e3:6.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
