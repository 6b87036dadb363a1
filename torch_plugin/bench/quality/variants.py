"""The variants of ``gflow bench quality``: how much of the gradients is sent.

Variants differ in nothing else: not in what is trained on, in which order, for how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gflow.bench.groups import compress_between

DENSE = "dense"


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        name: how it is shown.
        density: fraction of chunks sent; None sends all gradients exactly.
        takes_momentum: whether gflow takes over the optimizer's momentum.
    """

    name: str
    density: float | None = None
    takes_momentum: bool = False

    def options(self, steps: int, chunk: int, hosts: int) -> dict[str, Any]:
        """The options of its process group, for a training of ``steps`` steps.

        A tenth of the steps is dense, and the density is reached after another tenth.
        """
        if self.density is None:
            return {"compress": "off"}
        return {
            "compress": compress_between(hosts),
            "density": self.density,
            "chunk": chunk,
            "warmup_steps": max(2, steps // 10),
            "ramp_steps": steps // 10,
        }


def of_densities(densities: Sequence[float], *, has_momentum: bool) -> list[Variant]:
    """All variants of a task, the dense one first."""
    variants = [Variant(DENSE)]
    for density in densities:
        variants.append(Variant(f"density {density:g}", density))
        if has_momentum:
            name = f"density {density:g}, momentum taken"
            variants.append(Variant(name, density, takes_momentum=True))
    return variants


def obstacle(variant: Variant) -> str | None:
    """Why this version of gflow cannot train it, or None."""
    import gflow

    if variant.takes_momentum and not hasattr(gflow, "take_momentum"):
        return "this version has no gflow.take_momentum"
    return None
