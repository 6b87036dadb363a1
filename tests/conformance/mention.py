"""A mention of Gloo in PyTorch's test sources, and how one is recognised.

Syntax trees are only read here, not changed.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass

PEER = "gloo"


@dataclass(frozen=True)
class Mention:
    """One place where PyTorch's tests name Gloo, and what was done about it."""

    module: str
    line: int
    scope: str
    before: str
    after: str
    why: str

    @property
    def opened(self) -> bool:
        return self.before != self.after

    def __str__(self) -> str:
        where = f"{self.module.rpartition('.')[2]}:{self.line} {self.scope or '(module)'}"
        if self.opened:
            return f"opened {where}\n       {self.before}\n    -> {self.after}"
        return f"kept   {where}\n       {self.before}\n       because: {self.why}"


def names_peer(node: ast.AST) -> bool:
    """`"gloo"` or `Backend.GLOO`, however the class is reached."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.lower() == PEER
    return isinstance(node, ast.Attribute) and node.attr == PEER.upper()


def lists_peer(node: ast.AST) -> bool:
    """A literal list, set or tuple with Gloo in it."""
    collection = isinstance(node, ast.List | ast.Set | ast.Tuple)
    return collection and any(names_peer(element) for element in node.elts)


def reads_as_peer(text: str) -> bool:
    """The name itself, a device's backend (`cpu:gloo`) or a profiler's title (`gloo:send`).

    Longer text (`"Only gloo supports this"`) is for people and decides nothing.
    """
    return PEER in text.lower().replace(",", ":").split(":")


def read(module: str) -> tuple[str, str]:
    """The source of a module, and the path of its file."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"this build of PyTorch has no {module}")
    with open(spec.origin, encoding="utf-8") as file:
        return file.read(), spec.origin
