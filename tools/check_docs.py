"""Checks that files and names mentioned in the documents still exist.

- A relative link leads to a file, and its #anchor to a heading there.
- A path in backticks (`rust/engine/queue.rs`) exists.
- A name in backticks followed by a file, as in `Queue::push` (`rust/engine/queue.rs`), is defined
  in that file; a qualified name on its own (`Queue::push`) stands somewhere in the sources. So does
  the name of a type (`BlockingPool`) in the documents for developers.
- No row of a table in README.md is too wide to be read on a narrow screen.
- The pictures are what their source draws.

    python tools/check_docs.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
SOURCES = ("rust", "csrc", "torch_plugin", "tests", "examples", "benches", "tools", "docs")
SUFFIXES = {".rs", ".cpp", ".h", ".py", ".cu", ".c", ".pyi"}
FOR_DEVELOPERS = [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"]
WIDEST_ROW = 100

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
NAME = r"[A-Za-z_]\w*"
TYPE = re.compile(r"([A-Z]\w*[a-z]\w*)")
QUALIFIED = re.compile(rf"(?:{NAME}::)+({NAME})(?:\(\))?")
DEFINES = r"(?:fn|struct|enum|trait|type|const|static|macro_rules!|class|def)"
NAME_IN_FILE = re.compile(rf"`(?:{NAME}::)*({NAME})(?:\(\))?`\s+\(`([\w./-]+)`\)")
#: Names of torch and of the standard libraries, which our sources don't define.
FOREIGN = re.compile(r"(c10|c10d|torch|at|std|Reducer)::")


def main() -> int:
    """Print all problems, and return how many there are."""
    problems = [problem for document in DOCUMENTS for problem in _problems(document)]
    drawn = subprocess.run([sys.executable, ROOT / "docs/figures/architecture.py", "--check"])
    for problem in problems:
        print(problem)
    return len(problems) + (drawn.returncode != 0)


def _problems(document: Path) -> Iterator[str]:
    text = _without_code_blocks(document.read_text())
    where = document.relative_to(ROOT)
    for target in LINK.findall(text):
        if not re.match(r"[a-z]+:", target) and not _is_there(document, target):
            yield f"{where}: the link {target} leads nowhere"
    for code in CODE.findall(text):
        if _is_path(code) and not any(ROOT.glob(code)):
            yield f"{where}: there is no {code}"
        name = QUALIFIED.fullmatch(code) or (document in FOR_DEVELOPERS and TYPE.fullmatch(code))
        if name and not FOREIGN.match(code) and not _occurs(name[1], _all_sources()):
            yield f"{where}: no source has {code}"
    for name, path in NAME_IN_FILE.findall(text):
        file = ROOT / path
        if _is_path(path) and file.is_file() and not _is_defined(name, file.read_text()):
            yield f"{where}: {path} does not define {name}"
    if document.name == "README.md":
        for row in text.splitlines():
            if row.startswith("|") and len(row) > WIDEST_ROW:
                yield f"{where}: a table row of {len(row)} characters: {row[:40]}…"


def _without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _is_path(code: str) -> bool:
    return bool(re.fullmatch(r"[\w./*-]+", code)) and code.split("/")[0] in SOURCES and "/" in code


def _is_there(document: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (document.parent / name).resolve() if name else document
    if not file.exists():
        return False
    return not anchor or anchor in _anchors(file)


@cache
def _anchors(document: Path) -> set[str]:
    """The anchors of the headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _without_code_blocks(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def _all_sources() -> str:
    files = (path for folder in SOURCES[:3] for path in (ROOT / folder).rglob("*"))
    return "\n".join(path.read_text() for path in files if path.suffix in SUFFIXES)


def _is_defined(name: str, text: str) -> bool:
    return re.search(rf"\b{DEFINES}\s+{name}\b|::{name}\(|^\w.* {name}\(", text, re.M) is not None


def _occurs(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


if __name__ == "__main__":
    sys.exit(min(main(), 1))
