"""Tests the checker of layers: what it finds in small trees made for it, and what it lets pass."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "check_layers.py"
LIB = """//! A crate.
//!
//! top > left, right > low
//! leaves: leaf
mod leaf;
mod left;
mod low;
mod right;
mod top;
"""


class Tree:
    """A crate in which every module is empty until it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "rust"
        self.write("lib.rs", LIB)
        for name in ("leaf", "left", "low", "right", "top"):
            self.write(f"{name}.rs", "")

    def write(self, name: str, code: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)

    def folder_of(self, name: str, **modules: str) -> None:
        """Makes a folder of modules; `mod_rs` is added to what mod.rs declares."""
        (self.folder / f"{name}.rs").unlink()
        added = modules.pop("mod_rs", "")
        self.write(f"{name}/mod.rs", "".join(f"mod {child};\n" for child in modules) + added)
        for child, code in modules.items():
            self.write(f"{name}/{child}.rs", code)

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *options, str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def passes(self) -> None:
        result = self.check()
        assert (result.returncode, result.stderr) == (0, "")

    def fails(self) -> str:
        result = self.check()
        assert result.returncode == 1, result.stdout
        return result.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_edges_that_point_downward_pass(tree: Tree) -> None:
    tree.write("top.rs", "use crate::{left::A, low::{self, C}};\nuse crate::leaf::L;")
    tree.write("left.rs", "pub struct A;\nfn f() { crate::low::c(); crate::leaf::l() }")
    tree.passes()


@pytest.mark.parametrize(
    "code",
    [
        "\nuse crate::top::Thing;",
        "\nuse crate::{leaf::L, top::{self, Thing}};",
        "\nfn f() { crate::top::thing() }",
        "\nuse super::top::Thing;",
        "\nmod inline { use super::super::top::Thing; }",
        "\nimpl crate::top::Thing for u8 {}",
        "\npub use crate::top::Thing;",
    ],
)
def test_an_edge_upward_is_found(tree: Tree, code: str) -> None:
    tree.write("low.rs", code)
    found = tree.fails()
    assert "rust/low.rs:2: low uses top, but low may only use leaf" in found
    assert "1 dependencies against the order" in found


def test_an_edge_sideways_is_found_and_the_allowed_ones_are_named(tree: Tree) -> None:
    tree.write("left.rs", "use crate::right::R;")
    assert "rust/left.rs:1: left uses right, but left may only use low, leaf" in tree.fails()


def test_a_leaf_uses_nothing(tree: Tree) -> None:
    tree.write("leaf.rs", "use crate::low::C;")
    assert "leaf may only use nothing (it is a leaf)" in tree.fails()


def test_what_does_not_ship_may_use_everything(tree: Tree) -> None:
    tree.write(
        "low.rs",
        """// use crate::top::Thing;
/* crate::top /* nested */ crate::top::x */
/// Like [`crate::top::Thing`].
const TEXT: &str = "crate::top::Thing \\" crate::top::Thing";
const RAW: &str = r#"crate::top::" Thing"#;
fn f<'a>(quote: char) -> &'a str { if quote == '"' { "crate::top::x" } else { "" } }
#[cfg(test)]
use crate::top::{A, B};
struct S { #[cfg(test)] a: crate::top::A, b: u8 }
#[cfg(all(test, not(loom)))]
#[allow(unused)]
mod tests { use crate::top::Thing; fn f() { { crate::top::x() } } }
#[cfg(test)]
mod in_a_file;
""",
    )
    tree.passes()
    tree.write("low.rs", "#[cfg(test)]\nmod tests { }\nuse crate::top::Thing;")
    assert "rust/low.rs:3: low uses top" in tree.fails()


def test_a_ring_of_modules_in_a_folder_is_found(tree: Tree) -> None:
    tree.folder_of(
        "low",
        a="use super::b::B;\npub struct A;",
        b="use crate::low::c::C;\npub struct B;",
        c="pub struct C;\nfn f() { super::a::new() }",
        d="use super::a::A;",
    )
    assert tree.fails().splitlines()[:4] == [
        "a ring of modules in low:",
        "    low::a uses low::b (rust/low/a.rs:1)",
        "    low::b uses low::c (rust/low/b.rs:1)",
        "    low::c uses low::a (rust/low/c.rs:2)",
    ]


def test_a_name_that_is_re_exported_counts_for_the_module_that_defines_it(tree: Tree) -> None:
    tree.folder_of(
        "low",
        a="use super::{B, Renamed};\npub struct A;",
        b="pub struct B;\npub struct C;",
        mod_rs="pub use a::A;\npub use b::{B, C as Renamed};",
    )
    tree.passes()
    assert tree.check("--list").stdout.splitlines() == ["low::a -> low::b"]


def test_a_path_through_an_imported_module_is_followed(tree: Tree) -> None:
    tree.folder_of(
        "low",
        a="pub fn f() {}",
        b="use super::c;\nfn f() { c::g() }",
        c="pub use super::a::f as g;",
    )
    tree.passes()
    assert "low::b -> low::a" in tree.check("--list").stdout.splitlines()


def test_a_parent_and_a_child_that_use_each_other_are_a_ring(tree: Tree) -> None:
    tree.folder_of("low", a="use super::Own;", mod_rs="pub struct Own;\nfn f() { a::g() }")
    assert "low::a uses low (rust/low/a.rs:1)" in tree.fails()
    tree.write("low/mod.rs", "mod a;\npub use a::A;\npub struct Own { a: A }")
    tree.write("low/a.rs", "use super::Own;\npub struct A;")
    assert "low uses low::a (rust/low/mod.rs:2)" in tree.fails()


def test_a_module_that_the_order_does_not_name_is_an_error(tree: Tree) -> None:
    tree.write("lib.rs", LIB + "mod other;\n")
    tree.write("other.rs", "")
    assert "but not both: other" in tree.fails()
    tree.write("lib.rs", LIB.replace("//! top", "//! Top is above"))
    assert "needs one line" in tree.fails()


def test_an_edge_is_reported_once_per_line(tree: Tree) -> None:
    tree.write("low.rs", "use crate::top::{A, B};")
    assert tree.fails().count("low uses top") == 1
