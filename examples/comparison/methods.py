"""The methods of exchanging gradients that the demo compares."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One way of exchanging gradients.

    Attributes:
        key: its word on the command line.
        label: its name in text.
        backend: the argument of ``init_process_group``.
        fp16_hook: whether DDP gets PyTorch's ``fp16_compress_hook``.
        colour: of its lines and bars.
    """

    key: str
    label: str
    backend: str
    fp16_hook: bool
    colour: str


METHODS: dict[str, Method] = {
    method.key: method
    for method in (
        Method("gloo", "Gloo", "gloo", False, "#3182bd"),
        Method("gloo-fp16", "Gloo + fp16 hook", "gloo", True, "#756bb1"),
        Method("gflow", "gflow", "gflow", False, "#e6550d"),
    )
}


def read_methods(text: str) -> list[Method]:
    """Return the methods of ``gloo,gflow``; the others are measured against the first."""
    keys = dict.fromkeys(part.strip() for part in text.split(","))
    unknown = [key for key in keys if key not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose from {', '.join(METHODS)}")
    return [METHODS[key] for key in keys]
