"""A table of text, for terminals. The cells are shown as they are given."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    groups: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a table with right-aligned columns.

    Args:
        header: a word for each column.
        rows: the cells.
        groups: a line above the header: a title, and how many columns it is the title of.

    Example:
        >>> print(render(["size", "µs"], [["4 KiB", "512"], ["25 MiB", "28100"]]))
          size     µs
        ------  -----
         4 KiB    512
        25 MiB  28100
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    above = []
    if groups:
        spans = _spans(groups, widths)
        titles = [title for title, _ in groups]
        above.append(_GAP.join(map(_centred, titles, spans)).rstrip())
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(above + [_line(cells, widths) for cells in lines])


def _spans(groups: Sequence[tuple[str, int]], widths: list[int]) -> list[int]:
    """The width of each group; the first column of one with a long title is made wider."""
    spans = []
    start = 0
    for title, columns in groups:
        own = widths[start : start + columns]
        span = sum(own) + len(_GAP) * (columns - 1)
        widths[start] += max(0, len(title) - span)
        spans.append(max(len(title), span))
        start += columns
    return spans


def _centred(title: str, width: int) -> str:
    """The title, between dashes if there is room: one sees how far it reaches."""
    has_room = title and len(title) + 4 <= width
    return f" {title} ".center(width, "-") if has_room else title.center(width)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
