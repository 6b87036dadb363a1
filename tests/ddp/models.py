"""Small models and data for DDP tests, and the plain computation of what DDP must give.

No process group is used here: expected values don't depend on what is tested.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 12


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    """The batch that `rank` trains on in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator)


def perceptron(seed: int = 0) -> nn.Module:
    """Two layers, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))


class WithUnusedLayer(nn.Module):
    """A model with a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = perceptron()
        self.unused = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


class ComplexLayer(nn.Module):
    """A model with a complex parameter next to a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.real = nn.Linear(WIDTH, 8)
        self.complex = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.real(inputs).to(torch.complex64) @ self.complex).abs()


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The loss that all tests here use."""
    return model(inputs).square().mean()


def mean_gradients(
    model: nn.Module, inputs_of: Callable[[int], list[torch.Tensor]], world: int
) -> list[torch.Tensor | None]:
    """The gradients that DDP must produce: the mean over the ranks, each the sum over its batches.

    The sum is in double precision, so that a comparison sees only the backend's own rounding.
    """
    sums: list[torch.Tensor | None] = [None for _ in model.parameters()]
    for rank in range(world):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        for inputs in inputs_of(rank):
            loss_of(plain, inputs).backward()
        for index, parameter in enumerate(plain.parameters()):
            if parameter.grad is not None:
                wide = torch.complex128 if parameter.is_complex() else torch.float64
                gradient = parameter.grad.to(wide)
                sums[index] = gradient if sums[index] is None else sums[index] + gradient
    return [None if total is None else (total / world) for total in sums]


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients of real parameters, which is what buckets hold."""
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if parameter.requires_grad and not parameter.is_complex()
    )
