"""A rank that trains with `method="auto"` and reports after every step what gradients are sent as.

python -m tests.hosts.choosing STEPS
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.hosts.running import say

WIDTH = 300
#: By this step, a first choice was made.
SETTLED = 40


def main(steps: int) -> None:
    torch.set_num_threads(1)
    options = gflow.Options(method="auto", warmup_steps=2, audit_steps=40)
    dist.init_process_group("gflow", pg_options=options)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.Generator().manual_seed(rank + 1)
    for step in range(steps):
        batch = torch.randn(16, WIDTH, generator=data)
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        say(
            step=step,
            method=gflow.metrics().method,
            weights=hashlib.sha256(weights).hexdigest(),
        )
        if step == SETTLED:
            say(settled=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
