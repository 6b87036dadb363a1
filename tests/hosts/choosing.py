"""A rank that trains with `method="auto"` and reports after every step what gradients are sent as.

python -m tests.hosts.choosing STEPS [slow_rank | uneven]

slow_rank: rank 1 computes for much longer than the others. uneven: rank 1 runs out of data first.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gflow
from tests.hosts.running import say

#: Wide enough that a link is measured with any method.
WIDTH = 800
#: By this step, a first choice was made.
SETTLED = 40


def main(steps: int, how: str = "") -> None:
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
    if how == "uneven" and rank == 1:
        steps = SETTLED + 10
    with Join([model], enable=how == "uneven"):
        for step in range(steps):
            batch = torch.randn(16, WIDTH, generator=data)
            if how == "slow_rank" and rank == 1:
                time.sleep(0.1)
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
    main(int(sys.argv[1]), *sys.argv[2:])
