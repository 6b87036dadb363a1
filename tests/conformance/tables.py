"""PyTorch's tables of what each backend can and cannot do, with a row for the one under test.

Must never give the backend under test anything that Gloo does not have.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from .mention import PEER, Mention, names_peer, read, reads_as_peer

MODULE = "torch.testing._internal.common_distributed"
CLASS = "DistTestCases"

# The rest of that module's mentions of Gloo belong to other suites: flags of the torchcomms plugin
# (module level) and base classes of tests that choose a backend by device.
UNUSED = {"", "DistributedTestBase", "C10dTorchCommsTestBase"}


def open_for(backend: str) -> None:
    """Adds `backend` beside Gloo wherever a table has Gloo."""
    for _, _, backends in rows():
        if PEER in backends:
            backends.add(backend)


def mentions(backend: str) -> list[Mention]:
    """The rows that name Gloo; an error if the module names it anywhere unknown."""
    source, _ = read(MODULE)
    lines: dict[str, int] = {}
    for node in ast.parse(source).body:
        scope = getattr(node, "name", "")
        for inner in ast.walk(node):
            if scope == CLASS and isinstance(inner, ast.Assign):
                lines[ast.unparse(inner.targets[0])] = inner.lineno
            text = inner.value if isinstance(inner, ast.Constant) else None
            named = names_peer(inner) or (isinstance(text, str) and reads_as_peer(text))
            if named and scope != CLASS and scope not in UNUSED:
                where = f"{MODULE}:{inner.lineno} ({scope})"
                raise RuntimeError(f"{where} names Gloo where no rule says what it means")
    found = []
    for table, feature, backends in rows():
        if PEER in backends:
            row = f"{table}[{feature!r}]"
            before = sorted(backends - {backend})
            after = sorted(backends | {backend})
            line = lines.get(row, 0)
            found.append(Mention(MODULE, line, CLASS, f"{row} = {before}", f"{row} = {after}", ""))
    return found


def rows() -> Iterator[tuple[str, str, set[str]]]:
    """Every row as (table, feature, backends); the set is the live one."""
    for table, features in vars(getattr(importlib.import_module(MODULE), CLASS)).items():
        if isinstance(features, dict):
            for feature, backends in features.items():
                if isinstance(backends, set):
                    yield table, feature, backends
