"""How good a network is on what is held out; each rank looks at a part of it."""

from __future__ import annotations

from typing import Any

from gflow.launch.rank import Rank

_BATCH = 128


def mean_loss(outputs: Any, expected: Any) -> Any:
    """The cross entropy: of one answer for each input, or of one at each position of a text."""
    from torch.nn import functional

    return functional.cross_entropy(outputs.flatten(0, -2), expected.flatten())


def evaluate(rank: Rank, network: Any, held_out: Any) -> tuple[float, float]:
    """Mean loss and accuracy, the same on all ranks. No rank goes on before all are done."""
    import torch
    import torch.distributed as dist

    # What layers count while they train, only the first rank has for all.
    for buffer in network.buffers():
        dist.broadcast(buffer, 0)
    inputs, expected = (part.tensor_split(rank.world)[rank.number] for part in held_out)
    sums = torch.zeros(3, dtype=torch.float64)
    network.eval()
    with torch.no_grad():
        for some, wanted in zip(inputs.split(_BATCH), expected.split(_BATCH), strict=True):
            outputs = network(some)
            right = outputs.argmax(dim=-1) == wanted
            loss = mean_loss(outputs, wanted) * wanted.numel()
            sums += torch.tensor([float(loss), float(right.sum()), wanted.numel()])
    network.train()
    dist.all_reduce(sums)
    total, right, count = sums.tolist()
    return total / count, right / count
