"""Draws the two pictures of docs/architecture.md: the layers, and a gradient's way through them.

    python docs/figures/architecture.py            write layers.svg and gradient.svg
    python docs/figures/architecture.py --check    fail if they are not what this file draws

The order of the engine's layers is read from rust/lib.rs, which the compiler and
tools/check_layers.py know too, so the picture cannot show another one.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent

STYLE = """
  .card { fill: #fcfcfb; stroke: #d7d7d3 }
  .box { fill: #eef2f7; stroke: #8295ad }
  .engine { fill: #fdf0e6; stroke: #d08a4e }
  .outside { fill: #f2f2ef; stroke: #a3a39c; stroke-dasharray: 4 3 }
  .rail { stroke: #c9c9c4; stroke-dasharray: 2 4 }
  .arrow { stroke: #4a4a46; stroke-width: 1.4; fill: none }
  .head { fill: #4a4a46 }
  text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #23231f }
  .title { font-weight: 600 }
  .path { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-weight: 600 }
  .small { font-size: 11.5px; fill: #55554f }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b1c1e; stroke: #3c3e42 }
    .box { fill: #232c38; stroke: #6e87a5 }
    .engine { fill: #35291f; stroke: #c08350 }
    .outside { fill: #26272a; stroke: #75777c }
    .rail { stroke: #4a4c50 }
    .arrow { stroke: #c9c9c4 }
    .head { fill: #c9c9c4 }
    text { fill: #ececea }
    .small { fill: #b3b3ae }
  }
"""


class Picture:
    """Collects shapes and gives them out as one SVG."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes = [
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """A box with round corners."""
        self.shapes.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text; ``y`` is its baseline."""
        self.shapes.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rail(self, x: float, top: float, bottom: float) -> None:
        """The life line of a thread."""
        self.shapes.append(f'<line class="rail" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], both: bool = False
    ) -> None:
        """A straight arrow, along one axis; with ``both``, heads at both ends."""
        (x1, y1), (x2, y2) = start, end
        self.shapes.append(f'<line class="arrow" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
        self._head(start, end)
        if both:
            self._head(end, start)

    def corner(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """An arrow that first goes down and then sideways."""
        (x1, y1), (x2, y2) = start, end
        self.shapes.append(f'<path class="arrow" d="M {x1} {y1} V {y2} H {x2}"/>')
        self._head((x1, y2), end)

    def _head(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x, y) = start, end
        if y1 == y:
            back = -7 if x > x1 else 7
            corners = f"{x},{y} {x + back},{y - 4} {x + back},{y + 4}"
        else:
            back = -7 if y > y1 else 7
            corners = f"{x},{y} {x - 4},{y + back} {x + 4},{y + back}"
        self.shapes.append(f'<polygon class="head" points="{corners}"/>')

    def svg(self) -> str:
        """The whole file."""
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img">'
        )
        comment = "<!-- Drawn by docs/figures/architecture.py: change that, not this. -->"
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join(
            [opening, comment, title, f"<style>{STYLE}</style>", *self.shapes, "</svg>", ""]
        )


#: What each folder of the engine does, in a few words.
ENGINE = {
    "bridge": [
        "the C++ boundary (cxx): torch's codes become",
        "our types; panics become exceptions",
    ],
    "engine": ["a group: queue, worker, completion, life cycle", ""],
    "gradients": [
        "what happens to a bucket: count steps, hold,",
        "fuse, exchange, keep the residual",
    ],
    "collective": ["agreement, plan, ring,", "sums in shared memory"],
    "cuda": ["exchange on a stream:", "driver, NVRTC, NCCL"],
    "transport": ["TCP, shared memory,", "handshake, frames"],
    "codec": ["what is sent: pure,", "slices in, slices out"],
    "observe": ["log and counters", ""],
    "simd": ["sums and casts, for every instruction set", ""],
}


#: What is outside of the engine, and the folder that talks to it.
OUTSIDE = {
    "cuda": ("GPU", "driver, NVRTC, NCCL"),
    "transport": ("other ranks", "shared memory, TCP"),
}


def engine_order() -> list[list[str]]:
    """The layers of the engine, top first, as rust/lib.rs states them."""
    text = (ROOT / "rust/lib.rs").read_text()
    found = re.search(r"^//! (bridge > .*)$", text, re.MULTILINE)
    if found is None:
        raise SystemExit("docs/figures: rust/lib.rs no longer has the line 'bridge > …'")
    layers = [[name.strip() for name in layer.split(",")] for layer in found[1].split(">")]
    for layer in layers:
        # What talks to the outside stands on that side of the picture.
        layer.sort(key=lambda name: name in OUTSIDE)
    names = {name for layer in layers for name in layer}
    if names != set(ENGINE):
        raise SystemExit(f"docs/figures: describe {sorted(names ^ set(ENGINE))} in {__file__}")
    return layers


def layers() -> Picture:
    """The folders from top to bottom; each uses only those below it."""
    order = engine_order()
    left, width, top, tall, gap = 24, 560, 186, 48, 12
    frame = len(order) * (tall + gap) + gap + 22
    height = top + frame + 36
    picture = Picture(800, height, "The layers of gflow: each uses only those below it")

    picture.box(left, 20, width, 40, "outside")
    picture.text(left + 12, 45, "your script, torch.distributed, DDP", "title")

    half = (width - gap) / 2
    for column, (path, words) in enumerate(
        [
            (
                "torch_plugin/",
                ["imported as gflow: registration, options,", "rendezvous, state, command line"],
            ),
            ("csrc/", ["GflowBackend, GflowWork: c10d's calls", "become ours, and back"]),
        ]
    ):
        x = left + column * (half + gap)
        picture.box(x, 84, half, 66)
        picture.text(x + 12, 105, path, "path")
        picture.text(x + 12, 124, words[0], "small")
        picture.text(x + 12, 140, words[1], "small")
        picture.arrow((x + half / 2, 60), (x + half / 2, 84))

    picture.box(left, top, width, frame, "engine")
    picture.text(left + 12, top + 19, "rust/: the engine, one crate", "title")
    picture.arrow((left + half + gap + half / 2, 150), (left + half + gap + half / 2, top))
    picture.text(left + half + gap + half / 2 + 10, 173, "cxx", "small")

    y = top + 30
    for layer in order:
        each = (width - 2 * gap - gap * (len(layer) - 1)) / len(layer)
        for column, name in enumerate(layer):
            x = left + gap + column * (each + gap)
            picture.box(x, y, each, tall)
            picture.text(x + 12, y + tall / 2 + 4, f"{name}/", "path")
            lines = [line for line in ENGINE[name] if line]
            for row, line in enumerate(lines):
                base = y + tall / 2 + 4 - 8 * (len(lines) - 1)
                picture.text(x + 112, base + 16 * row, line, "small")
        y += tall + gap

    right = left + width + 40
    picture.box(right, 84, 152, 66, "outside")
    picture.text(right + 12, 105, "inner backends", "title")
    picture.text(right + 12, 124, "torch's own Gloo and", "small")
    picture.text(right + 12, 140, "NCCL, for the rest", "small")
    picture.arrow((left + width, 117), (right, 117))

    for folder, (name, words) in OUTSIDE.items():
        row = next(index for index, names in enumerate(order) if folder in names)
        y = top + 30 + row * (tall + gap)
        picture.box(right, y, 152, tall, "outside")
        picture.text(right + 12, y + 20, name, "title")
        picture.text(right + 12, y + 38, words, "small")
        picture.arrow((left + width - gap, y + tall / 2), (right, y + tall / 2), both=True)

    picture.text(
        left, height - 14, "A layer uses only layers below it; make lint checks that.", "small"
    )
    return picture


#: The columns of the second picture: what runs there, and the middle of the column.
COLUMNS = {
    "caller": ("autograd's thread", "csrc/", 116),
    "worker": ("worker", "rust/engine/, rust/gradients/", 366),
    "courier": ("courier", "rust/gradients/", 620),
    "others": ("other ranks", "", 816),
}


def gradient() -> Picture:
    """A bucket from the backward pass to the wire and back, by thread, from top to bottom."""
    picture = Picture(900, 820, "The way of a gradient bucket, by thread")
    middle = {name: column[2] for name, column in COLUMNS.items()}
    for title, path, x in COLUMNS.values():
        picture.text(x, 28, title, "title", "middle")
        if path:
            picture.text(x, 45, path, "small", "middle")
        picture.rail(x, 54, 768)

    def step(column: str, y: float, title: str, words: str = "", width: float = 0) -> None:
        width = width or {"caller": 184, "worker": 236, "courier": 160, "others": 124}[column]
        kind = {"caller": "box", "others": "outside"}.get(column, "engine")
        x = middle[column] - width / 2
        tall = 44 if words else 30
        picture.box(x, y, width, tall, kind)
        picture.text(middle[column], y + 19, title, "title", "middle")
        if words:
            picture.text(middle[column], y + 36, words, "small", "middle")

    def across(y: float, start: str, end: str, words: str = "", both: bool = False) -> None:
        half = {"caller": 92, "worker": 118, "courier": 80, "others": 62}
        sign = 1 if middle[end] > middle[start] else -1
        begin = middle[start] + sign * half[start]
        finish = middle[end] - sign * half[end]
        picture.arrow((begin, y), (finish, y), both)
        if words:
            picture.text((begin + finish) / 2, y - 6, words, "small", "middle")

    step("caller", 66, "a bucket is ready", "GflowBackend::allreduce")
    step("worker", 66, "queue", "in program order")
    across(88, "caller", "worker")

    step("worker", 130, "agree", "same call? which bucket, which step?")
    step("others", 130, "agree")
    across(152, "worker", "others", "headers: shared memory, mesh", both=True)

    step("worker", 194, "sum within the host", "exact; each carrier its shard")
    step("others", 194, "this host")
    across(216, "worker", "others", "shared memory", both=True)

    step("worker", 258, "hold", "until fusion_bytes, or the pass ends")
    step("caller", 258, "the pass ends", "end_of_pass, a callback")
    across(280, "caller", "worker")

    step("worker", 322, "accumulate", "gradient into residual, chunk norms")

    step("worker", 386, "sum the norms", "one number per chunk")
    step("others", 386, "other hosts")
    across(408, "worker", "others", "norms: mesh", both=True)

    step("worker", 450, "choose and pack", "the heaviest chunks, scaled, as fp16")
    step("courier", 450, "send parcels", "while the worker goes on")
    across(472, "worker", "courier", "parcel")

    step("courier", 522, "round the ring", "each hop adds in 32 bits")
    step("others", 522, "other hosts")
    across(544, "courier", "others", both=True)
    picture.arrow((620, 494), (620, 522))

    step("worker", 586, "unpack", "sums to bucket, rounding to residual")
    picture.corner((620, 566), (484, 608))
    picture.text(552, 602, "sums", "small", "middle")

    step("worker", 650, "distribute within the host", "every rank has every shard")
    step("others", 650, "this host")
    across(672, "worker", "others", "shared memory", both=True)

    step("worker", 714, "complete", "wake wait(); the pool does Futures")
    step("caller", 714, "DDP goes on", "the gradient is in the bucket")
    across(736, "worker", "caller")

    for upper, lower in [(110, 130), (174, 194), (238, 258), (302, 322), (366, 386), (430, 450)]:
        picture.arrow((366, upper), (366, lower))
    for upper, lower in [(630, 650), (694, 714)]:
        picture.arrow((366, upper), (366, lower))
    picture.text(
        366,
        790,
        "During warm-up, and for all else: agree, sum within, ring, distribute.",
        "small",
        "middle",
    )
    return picture


def main(arguments: list[str]) -> None:
    """Write the pictures, or check that they are as they should be."""
    for name, picture in [("layers.svg", layers()), ("gradient.svg", gradient())]:
        path, drawn = FOLDER / name, picture.svg()
        if arguments == ["--check"]:
            if not path.exists() or path.read_text() != drawn:
                raise SystemExit(f"{path} is out of date: run {Path(__file__).name}")
        else:
            path.write_text(drawn)


if __name__ == "__main__":
    main(sys.argv[1:])
