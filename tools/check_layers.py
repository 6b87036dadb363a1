"""Checks that dependencies in the engine point downward and never in a ring.

The order is written once, in the docs of `rust/lib.rs`:

    //! bridge > engine > gradients > cuda, collective > codec, transport > observe > simd
    //! leaves: error, fork, huge_pages, sync

A folder may use every folder to the right of the next `>`; folders between the same two `>` may
not use each other. Everything may use the leaves, which use nothing. So there is no cycle between
folders. Within a folder, the modules (one per file) may not form a cycle either. A path through a
re-export counts as a use of the module that defines the name, and a `pub use` counts only if its
own file uses the name.

The checker reads `use` lines and qualified paths in the code that ships. It skips comments and
everything under `#[cfg(test)]`: tests may reach sideways. It doesn't see method calls, which name
no path.

    python tools/check_layers.py           fail on every edge that is not allowed
    python tools/check_layers.py --list    print all edges, allowed or not
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Comments and literals, which hold no code. `'a'` is a literal; `'a`, a lifetime, doesn't match.
LITERAL = re.compile(
    r"""//[^\n]*
      | b?r(?P<hashes>\#*)".*?"(?P=hashes)
      | b?"(?:\\.|[^"\\])*"
      | b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^'\\])'
    """,
    re.VERBOSE | re.DOTALL,
)
TEST_ONLY = re.compile(r"#!?\[cfg\((?:test\b|all\([^\]]*\btest\b)[^\]]*\]")
ATTRIBUTE = re.compile(r"\s*#\[[^\]]*\]")
ITEM = re.compile(
    r"\s*(?:pub(?:\([^)]*\))?\s+)?(?:(?:unsafe|async|const|extern)\s+)*"
    r"(?P<keyword>fn|mod|struct|enum|union|impl|trait|use|const|static|type|macro_rules!|extern)\b"
)
MODULE = re.compile(r"\bmod\s+(?P<name>\w+)\s*(?P<end>[;{])")
USE = re.compile(r"\b(?P<public>pub(?:\([^)]*\))?\s+)?use\s+(?P<tree>[^;]+);")
PATH = re.compile(r"(?<![\w:.])(?:[A-Za-z_]\w*)(?:\s*::\s*[A-Za-z_]\w*)+")
DEFINITION = re.compile(
    r"\b(?:fn|struct|enum|union|trait|const|static|type|macro_rules!)\s+(?:mut\s+)?(?P<name>\w+)"
)

Name = tuple[str, ...]


class LayoutError(Exception):
    """The order in lib.rs is missing or does not fit the modules that lib.rs declares."""


@dataclass
class Use:
    """One path in the code, from the module that writes it to the module that defines it."""

    source: Name
    target: Name
    file: Path
    line: int


@dataclass
class Module:
    """One file: the code that ships, and the names that it defines or imports."""

    name: Name
    file: Path
    code: str
    children: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    imported: dict[str, Name] = field(default_factory=dict)
    globs: list[Name] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """Which folder may use which."""

    level: dict[str, int]
    leaves: frozenset[str]

    def allows(self, source: str, target: str) -> bool:
        """Whether code in one folder may use another folder."""
        if target in self.leaves or source in self.leaves:
            return source not in self.leaves
        return self.level[source] < self.level[target]

    def below(self, source: str) -> str:
        """The folders that one may use, for messages."""
        if source in self.leaves:
            return "nothing (it is a leaf)"
        lower = [name for name, level in self.level.items() if level > self.level[source]]
        return ", ".join([*lower, *sorted(self.leaves)])


def blank(text: str) -> str:
    """Spaces instead of text, with the line breaks kept so that line numbers stay right."""
    return re.sub(r"[^\n]", " ", text)


def without_literals(text: str) -> str:
    """Rust code with comments, strings and characters blanked out."""
    out, at = [], 0
    while at < len(text):
        if text.startswith("/*", at):
            end, depth = at + 2, 1
            while depth and end < len(text):
                step = {"/*": 1, "*/": -1}.get(text[end : end + 2], 0)
                depth, end = depth + step, end + (2 if step else 1)
        elif (found := LITERAL.match(text, at)) and not text[at - 1 : at].isidentifier():
            end = found.end()
        else:
            out.append(text[at])
            at += 1
            continue
        out.append(blank(text[at:end]))
        at = end
    return "".join(out)


def closing(code: str, at: int) -> int:
    """The position after the bracket that closes the one at `at`."""
    depth = 0
    for position in range(at, len(code)):
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(code[position], 0)
        if depth == 0:
            return position + 1
    return len(code)


def end_of_item(code: str, at: int) -> int:
    """Where the item, field or statement that begins at `at` ends."""
    item = ITEM.match(code, at)
    to_semicolon = item is not None and item["keyword"] in ("use", "const", "static", "type")
    while at < len(code):
        if code[at] in "([" or (code[at] == "{" and to_semicolon):
            at = closing(code, at)
        elif code[at] == "{":
            return closing(code, at)
        elif code[at] == ";" or (code[at] == "," and item is None):
            return at + 1
        elif code[at] in "})]":
            return at
        else:
            at += 1
    return at


def without_tests(code: str) -> str:
    """Code without the items under `#[cfg(test)]`."""
    while found := TEST_ONLY.search(code):
        at = found.end()
        while attribute := ATTRIBUTE.match(code, at):
            at = attribute.end()
        end = len(code) if found[0].startswith("#!") else end_of_item(code, at)
        code = code[: found.start()] + blank(code[found.start() : end]) + code[end:]
    return code


def use_paths(tree: str) -> Iterator[tuple[list[str], str]]:
    """The paths of a `use` tree, each with the name that it binds (`*` for a glob)."""
    tree = tree.strip()
    if brace := re.search(r"\{", tree):
        prefix = [part for part in re.split(r"\s*::\s*", tree[: brace.start()].strip()) if part]
        inner, depth, part = tree[brace.end() : closing(tree, brace.start()) - 1], 0, ""
        for letter in inner + ",":
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                for path, name in use_paths(part) if part.strip() else ():
                    own = path == ["self"]
                    bound = prefix[-1] if own and name == "self" else name
                    yield prefix + ([] if own else path), bound
                part = ""
            else:
                part += letter
        return
    path, _, alias = tree.partition(" as ")
    parts = [part for part in re.split(r"\s*::\s*", path.strip()) if part]
    yield parts, alias.strip() or parts[-1]


class Crate:
    """The modules of a crate that ship, found by following `mod` from lib.rs, and their uses."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[Name, Module] = {}
        self._load((), folder / "lib.rs", folder)
        self.uses: list[Use] = []
        for module in self.modules.values():
            self._read_imports(module)
        for module in self.modules.values():
            self._read_uses(module)

    def _load(self, name: Name, file: Path, folder: Path) -> None:
        code = without_tests(without_literals(file.read_text()))
        module = self.modules[name] = Module(name, file, code)
        module.defined = {found["name"] for found in DEFINITION.finditer(code)}
        for found in MODULE.finditer(code):
            child = found["name"]
            if found["end"] == "{":
                module.defined.add(child)
                continue
            module.children.add(child)
            places = folder / f"{child}.rs", folder / child / "mod.rs"
            if not (place := next((place for place in places if place.exists()), None)):
                raise LayoutError(f"{file}: there is no file for `mod {child}`")
            self._load((*name, child), place, folder / child)

    def _absolute(self, module: Module, path: list[str], depth: int) -> Name | None:
        """A path as seen from the crate's root; None if it leads out of the crate."""
        parts = list(path)
        base = module.name
        if parts[0] == "crate":
            return tuple(parts[1:])
        if parts[0] not in ("self", "super"):
            if parts[0] in module.children:
                return (*base, *parts)
            imported = module.imported.get(parts[0])
            return (*imported, *parts[1:]) if imported else None
        while parts and parts[0] in ("self", "super"):
            if parts.pop(0) == "super":
                # In an inline `mod x { }`, the first `super` is the file itself.
                depth, base = (depth - 1, base) if depth else (0, base[:-1])
        return (*base, *parts)

    def _read_imports(self, module: Module) -> None:
        for found in USE.finditer(module.code):
            for path, name in use_paths(found["tree"]):
                target = self._absolute(module, path, 0)
                if target is None:
                    continue
                if name == "*":
                    module.globs.append(target[:-1])
                else:
                    module.imported[name] = target

    def _definer(self, path: Name, seen: frozenset[Name] = frozenset()) -> Name:
        """The module that defines what a path from the root names, past all re-exports."""
        length = next(n for n in range(len(path), -1, -1) if path[:n] in self.modules)
        module, rest = self.modules[path[:length]], path[length:]
        if not rest or rest[0] in module.defined or path in seen:
            return module.name
        if target := module.imported.get(rest[0]):
            return self._definer((*target, *rest[1:]), seen | {path})
        for glob in module.globs:
            inner = self._definer((*glob, *rest), seen | {path})
            if rest[0] in self.modules[inner].defined:
                return inner
        return module.name

    def _read_uses(self, module: Module) -> None:
        def add(position: int, path: list[str]) -> None:
            depth = inline_depth(module.code, position)
            target = self._absolute(module, path, depth)
            if target is None:
                return
            target = tuple(part for part in target if part != "*")
            definer = self._definer(target)
            if definer != module.name:
                line = module.code.count("\n", 0, position) + 1
                self.uses.append(Use(module.name, definer, module.file, line))

        body = USE.sub(lambda found: blank(found[0]), module.code)
        for found in USE.finditer(module.code):
            for path, name in use_paths(found["tree"]):
                if not found["public"] or self._is_needed(module, path, name, body):
                    add(found.start("tree"), path)
        for found in PATH.finditer(body):
            add(found.start(), re.split(r"\s*::\s*", found[0]))

    def _is_needed(self, module: Module, path: list[str], name: str, body: str) -> bool:
        """Whether a re-export is more than the way in for others: its own file uses the name too,
        or it comes from another folder."""
        target = self._absolute(module, path, 0)
        outside = target is not None and target[:1] != module.name[:1]
        return outside or re.search(rf"\b{re.escape(name)}\b", body) is not None


def inline_depth(code: str, position: int) -> int:
    """How many inline modules enclose a position of the file."""
    return sum(
        found["end"] == "{" and found.end() <= position < closing(code, found.end() - 1)
        for found in MODULE.finditer(code, 0, position)
    )


def read_order(lib: Path) -> Order:
    """The order of the folders, from the docs of lib.rs."""
    text = lib.read_text()
    word = r"\w+(?:, \w+)*"
    order = re.search(rf"^//!\s*({word}(?: > {word})+)$", text, re.MULTILINE)
    leaves = re.search(rf"^//!\s*leaves: ({word})$", text, re.MULTILINE)
    if not order or not leaves:
        raise LayoutError(f"{lib}: needs one line `//! a > b, c > d` and one `//! leaves: e, f`")
    level = {
        name: number
        for number, names in enumerate(order[1].split(" > "))
        for name in names.split(", ")
    }
    return Order(level, frozenset(leaves[1].split(", ")))


def find_ring(edges: dict[Name, set[Name]]) -> list[Name] | None:
    """The shortest cycle, as the modules on it in order; None if there is none."""
    shortest: list[Name] | None = None
    for start in sorted(edges):
        came_from: dict[Name, Name] = {}
        front = [start]
        while front and start not in came_from:
            following = []
            for source in front:
                for target in sorted(edges.get(source, ())):
                    if target not in came_from:
                        came_from[target] = source
                        following.append(target)
            front = following
        if start in came_from:
            ring = [came_from[start]]
            while ring[0] != start:
                ring.insert(0, came_from[ring[0]])
            if shortest is None or len(ring) < len(shortest):
                shortest = ring
    return shortest


def find_rings(edges: dict[Name, set[Name]]) -> list[list[Name]]:
    """Cycles that share no edge, shortest first, until none is left."""
    edges = {source: set(targets) for source, targets in edges.items()}
    rings = []
    while ring := find_ring(edges):
        rings.append(ring)
        for source, target in zip(ring, ring[1:] + ring[:1], strict=True):
            edges[source].discard(target)
    return rings


def check(crate: Crate, order: Order) -> list[str]:
    """One message for every edge that is not allowed and every ring of modules."""
    known = set(order.level) | order.leaves
    if known != (declared := crate.modules[()].children):
        names = ", ".join(sorted(known ^ declared))
        raise LayoutError(
            f"rust/lib.rs: in the order or declared as modules, but not both: {names}"
        )
    found = []
    within: dict[str, dict[Name, set[Name]]] = {}
    first: dict[tuple[Name, Name], Use] = {}
    for use in crate.uses:
        if not use.source or not use.target:
            continue
        source, target = use.source[0], use.target[0]
        if source == target:
            within.setdefault(source, {}).setdefault(use.source, set()).add(use.target)
            first.setdefault((use.source, use.target), use)
        elif not order.allows(source, target):
            message = (
                f"{use.file}:{use.line}: {dotted(use.source)} uses {dotted(use.target)}, but "
                f"{source} may only use {order.below(source)}"
            )
            if message not in found:
                found.append(message)
    for folder, edges in sorted(within.items()):
        for ring in find_rings(edges):
            lines = [f"a ring of modules in {folder}:"]
            for pair in zip(ring, ring[1:] + ring[:1], strict=True):
                use = first[pair]
                lines.append(
                    f"    {dotted(pair[0])} uses {dotted(pair[1])} ({use.file}:{use.line})"
                )
            found.append("\n".join(lines))
    return found


def dotted(name: Name) -> str:
    """A module as Rust writes it."""
    return "::".join(name) or "lib.rs"


def main() -> int:
    """Check the tree that this script is in, or one given."""
    parser = argparse.ArgumentParser(description="check the layers of the engine")
    parser.add_argument("--list", action="store_true", help="print all edges between modules")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "rust")
    options = parser.parse_args()
    try:
        crate = Crate(options.folder)
        if options.list:
            edges = {f"{dotted(use.source)} -> {dotted(use.target)}" for use in crate.uses}
            print("\n".join(sorted(edges)))
            return 0
        found = check(crate, read_order(options.folder / "lib.rs"))
    except LayoutError as error:
        found = [str(error)]
    for message in found:
        print(message.replace(f"{options.folder.parent}/", ""), file=sys.stderr)
    if found:
        print(f"gflow: {len(found)} dependencies against the order in lib.rs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
