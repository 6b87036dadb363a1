"""Puts rows of text under each other. It must never round or change what it is given."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with right-aligned columns.

    Example:
        >>> print(render(["size", "µs"], [["4 KiB", "512"], ["25 MiB", "28100"]]))
          size     µs
        ------  -----
         4 KiB    512
        25 MiB  28100
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
