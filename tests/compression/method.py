"""A plain reference of the method: what a bucket must deliver, computed for all hosts in one place.

It uses nothing of gflow. It sums in another order than the engine, and keeps what is rounded off a
sum on the wire on another host. So it sends the same chunks as the engine, and its numbers agree up
to the rounding of the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Chunks whose weights differ by less than this may be ranked either way: the engine and this file
# may differ by that much.
TIE = 2e-3


def density_at(step: int, density: float, warmup: int, ramp: int) -> float | None:
    """The fraction of chunks sent; None while all is exact."""
    if step < warmup:
        return None
    return density ** min(1.0, (step - warmup + 1) / ramp) if ramp else density


def count(chunks: int, density: float) -> int:
    """The number of chunks sent."""
    return min(chunks, max(1, math.ceil(density * chunks - 1e-7)))


def scale_for(total: float, wire: str) -> float:
    """The largest power of two with which the sum of the norms is at most 32768."""
    if wire != "fp16" or total == 0.0:
        return 1.0
    mantissa, exponent = math.frexp(total)
    return 2.0 ** (15 - (exponent - (mantissa == 0.5)))


@dataclass
class Delivered:
    """The expected values of a step, and by how much they may be off."""

    gradient: torch.Tensor
    tolerance: torch.Tensor
    chosen: list[int]


class Bucket:
    """One bucket on all hosts."""

    def __init__(
        self,
        hosts: int,
        numel: int,
        *,
        chunk: int,
        density: float,
        warmup: int,
        ramp: int = 0,
        wire: str = "fp16",
        momentum: float = 0.0,
        nesterov: bool = False,
        clears_velocity: bool = True,
    ) -> None:
        self.residual = torch.zeros(hosts, numel)
        self.velocity = torch.zeros(hosts, numel)
        # How far what the engine keeps may be from this: the rounding of the last send.
        self.slack = torch.zeros(numel)
        self.chunks = [slice(i, min(i + chunk, numel)) for i in range(0, numel, chunk)]
        self.schedule = (density, warmup, ramp)
        self.wire = wire
        self.momentum, self.nesterov = momentum, nesterov
        self.clears_velocity = clears_velocity
        self.step = 0

    def exchange(self, given: list[torch.Tensor], seen: torch.Tensor) -> Delivered:
        """One step with the hosts' gradients. `seen` is what the engine has delivered: where two
        chunks weigh the same, its choice is followed."""
        added = torch.stack(given).float()
        if self.momentum:
            self.velocity = self.momentum * self.velocity + added
            added = added + self.momentum * self.velocity if self.nesterov else self.velocity
        density = density_at(self.step, *self.schedule)
        self.step += 1
        if density is None:
            exact = added.double().sum(0).float()
            tolerance = 4e-7 * len(given) * added.abs().sum(0)
            return Delivered(exact, tolerance, list(range(len(self.chunks))))
        self.residual = self.residual + added
        weights = [self.residual[:, c].double().abs().sum().item() for c in self.chunks]
        chosen = self._choose(weights, count(len(self.chunks), density), seen)
        result = torch.zeros(self.residual.shape[1])
        tolerance = torch.zeros_like(result)
        dtype = WIRES[self.wire]
        for index in chosen:
            c, scale = self.chunks[index], scale_for(weights[index], self.wire)
            sent = (self.residual[:, c] * scale).to(dtype)
            total = sent.double().sum(0)
            rounded = total.to(dtype).double()
            self.residual[:, c] -= sent.float() / scale
            if self.wire != "fp32":
                self.residual[0, c] += ((total - rounded) / scale).float()
            if self.clears_velocity:
                self.velocity[:, c] = 0.0
            result[c] = (rounded / scale).float()
            epsilon = torch.finfo(dtype).eps
            least = torch.finfo(dtype).smallest_normal * epsilon
            rounding = len(sent) * (epsilon * sent.double().abs().sum(0) + least) / scale
            tolerance[c] = self.slack[c] + rounding.float()
            self.slack[c] = rounding.float()
        return Delivered(result, tolerance, chosen)

    def _choose(self, weights: list[float], wanted: int, seen: torch.Tensor) -> list[int]:
        order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
        chosen = sorted(order[:wanted])
        theirs = [index for index, c in enumerate(self.chunks) if seen[c].any()]
        if theirs == chosen:
            return chosen
        least = weights[order[wanted - 1]]
        doubtful = set(theirs) ^ set(chosen)
        near = all(abs(weights[index] - least) <= TIE * least for index in doubtful)
        return theirs if near and len(theirs) == wanted else chosen
