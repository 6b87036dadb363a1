"""Opens for the backend under test every gate that PyTorch's suite opens for Gloo by name.

The suite decides by name what a backend is asked to do (`BACKEND != "gloo"` skips a test). Here its
source is read, those comparisons are widened to accept a second name, and the result runs in place
of the module. Every mention of Gloo must be recognised, as a gate or as one of the few places that
mean Gloo itself; an unknown one is an error, so that a new release of PyTorch cannot quietly close
a gate.

Must never touch anything but a comparison with, or a collection of, backend names. No assertion is
changed or removed here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from types import ModuleType

from . import tables
from .mention import PEER, Mention, lists_peer, names_peer, read, reads_as_peer

SUITE = "torch.testing._internal.distributed.distributed_test"


class UnknownGateError(Exception):
    """A mention of Gloo that is neither a known gate nor known to mean Gloo itself."""


def load(backend: str) -> ModuleType:
    """PyTorch's suite as a module, with Gloo's gates open for `backend`."""
    if backend == PEER:
        # Gloo is the reference: it runs PyTorch's suite unmodified, through the normal import.
        return importlib.import_module(SUITE)
    if SUITE in sys.modules:
        raise RuntimeError(f"{SUITE} was imported before its gates were opened")
    # The tables first: the suite reads them while its classes are being built.
    tables.open_for(backend)
    source, origin = read(SUITE)
    tree, _ = open_for(backend, source)
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Under its own name, so that objects pickled by the tests find their classes again.
    sys.modules[SUITE] = module
    # Without this file's __future__ imports, which would turn the tests' annotations into strings.
    exec(compile(tree, origin, "exec", dont_inherit=True), module.__dict__)
    package, _, leaf = SUITE.rpartition(".")
    setattr(importlib.import_module(package), leaf, module)
    return module


def mentions(backend: str) -> list[Mention]:
    """Every place that names Gloo and what `load` does about it; changes nothing."""
    source, _ = read(SUITE)
    return tables.mentions(backend) + open_for(backend, source)[1]


def open_for(backend: str, source: str) -> tuple[ast.Module, list[Mention]]:
    opener = GateOpener(backend)
    tree = opener.visit(ast.parse(source))
    if opener.unknown:
        places = "; ".join(opener.unknown)
        raise UnknownGateError(f"{SUITE} names Gloo where no rule says what it means: {places}")
    return tree, opener.mentions


class GateOpener(ast.NodeTransformer):
    """Widens what names Gloo as a gate, and accounts for each mention of Gloo that it passes."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.mentions: list[Mention] = []
        self.unknown: list[str] = []
        self.scope: list[str] = []

    # The places where a gate can stand.

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) != 1:
            return self.generic_visit(node)
        left, op, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(op, ast.Eq | ast.NotEq) and (names_peer(left) or names_peer(right)):
            name, other = (left, right) if names_peer(left) else (right, left)
            if ast.unparse(other) == "ddp_logging_data.get('backend_name')":
                return self.keep(node, "PyTorch's DDP logger fills these fields for Gloo alone")
            both = ast.Tuple([name, ast.Constant(self.backend)], ast.Load())
            member = ast.In() if isinstance(op, ast.Eq) else ast.NotIn()
            return self.replace(node, ast.Compare(self.visit(other), [member], [both]))
        if isinstance(op, ast.In | ast.NotIn) and lists_peer(right):
            return self.replace(node, ast.Compare(self.visit(left), [op], [self.widen(right)]))
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if not self.scope and lists_peer(node.value):
            return self.replace(node, ast.Assign(node.targets, self.widen(node.value)))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called == "require_backend_is_available" and [*map(lists_peer, node.args)] == [True]:
            return self.replace(node, ast.Call(node.func, [self.widen(node.args[0])], []))
        if called == "dist.new_group" and any(names_peer(word.value) for word in node.keywords):
            return self.keep(node, "a group that is Gloo on purpose, beside the one under test")
        if called == "dist.Backend" and any(map(lists_peer, node.args)):
            return self.keep(node, "a list, which the test expects to be refused as a name")
        return self.generic_visit(node)

    # Anything else must not name Gloo.

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and reads_as_peer(node.value):
            self.unknown.append(f"line {node.lineno}: {ast.unparse(node)}")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if names_peer(node):
            self.unknown.append(f"line {node.lineno}: {ast.unparse(node)}")
        return self.generic_visit(node)

    # Where a mention stands.

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self.enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self.enter(node)

    def enter(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        self.scope.append(node.name)
        try:
            return self.generic_visit(node)
        finally:
            self.scope.pop()

    # What was done.

    def widen(self, names: ast.expr) -> ast.expr:
        assert isinstance(names, ast.List | ast.Set | ast.Tuple)
        elements = [*names.elts, ast.Constant(self.backend)]
        return ast.Set(elements) if isinstance(names, ast.Set) else type(names)(elements, names.ctx)

    def keep(self, node: ast.expr, why: str) -> ast.AST:
        text = ast.unparse(node)
        self.record(node, text, text, why)
        return node

    def replace(self, node: ast.expr | ast.stmt, new: ast.expr | ast.stmt) -> ast.AST:
        # The line numbers stay those of PyTorch's file, for tracebacks.
        ast.fix_missing_locations(ast.copy_location(new, node))
        self.record(node, ast.unparse(node), ast.unparse(new), "")
        return new

    def record(self, node: ast.expr | ast.stmt, before: str, after: str, why: str) -> None:
        place = ".".join(self.scope)
        self.mentions.append(Mention(SUITE, node.lineno, place, before, after, why))
