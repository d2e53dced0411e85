"""Tables of text that stay readable at any width: columns give way or go below each other before numbers break."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import set_cell_size

from pdtrace._paper import Plain, cell_len, put
from pdtrace.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2  # blanks between columns
NARROWEST = 14  # a column of words is not squeezed below this many cells
SHORTEST = 8  # nor any column, where nothing else helps


@dataclass(frozen=True)
class Column:
    """One column: numbers stand right and are never broken; words may wrap; optional ones may go."""

    name: str
    right: bool = False
    wraps: bool = False  # words: may take several lines
    optional: int = 0  # 0 never dropped; of several the greatest goes first


def grid(
    out: Console | Plain,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    style: str = "dim",
    *,
    keep_empty: bool = False,
) -> None:
    """Print rows under their headings, in the width of the console; empty columns are left out unless they are to be kept.

    A row of another length is an error of ours, not a table that is shifted.
    """
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns: {row}")
    filled = [n for n in range(len(columns)) if keep_empty or any(row[n] for row in cells)]
    if not filled:
        return
    names = [c.name for c in columns]
    natural = [max(cell_len(row[n]) for row in [names, *cells]) for n in range(len(columns))]
    kept, widths = _fit(columns, filled, natural, out.width)
    if _needed(widths) <= out.width:
        bands = [(kept, widths)]
    else:
        kinds = [Column(c.name, c.right, c.wraps) for c in columns]
        bands = [
            _fit(kinds, band, natural, out.width)
            for band in _bands(columns, kept, natural, out.width)
        ]
    for places, cut in bands:
        chosen = [columns[n] for n in places]
        for line in _lines(chosen, cut, [c.name for c in chosen]):
            put(out, line, style, whole=True)
        for row in cells:
            for line in _lines(chosen, cut, [row[n] for n in places]):
                put(out, line, whole=True)


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _bands(
    columns: Sequence[Column], kept: list[int], natural: list[int], width: int
) -> list[list[int]]:
    """Which of the columns kept stand beside each other; what has no room stands below, beside the row's name again.

    A row's name are the columns of words before its first number, as far as they leave half of the room.
    """
    least = {n: min(natural[n], NARROWEST) if columns[n].wraps else natural[n] for n in kept}
    named = kept[:1]
    for n in kept[1:]:
        if columns[n].right or 2 * _needed([least[m] for m in [*named, n]]) > width:
            break
        named.append(n)
    bands = [list(named)]
    for n in kept[len(named) :]:
        if bands[-1] != named and _needed([least[m] for m in [*bands[-1], n]]) > width:
            bands.append(list(named))
        bands[-1].append(n)
    return bands


def _fit(
    columns: Sequence[Column], filled: list[int], natural: list[int], width: int
) -> tuple[list[int], list[int]]:
    """Columns that are kept and their widths: first words wrap, then optional columns go, then words are cut."""
    kept = list(filled)

    def needed(squeezed: bool) -> int:
        parts = (
            min(natural[n], max(NARROWEST, cell_len(columns[n].name)))
            if squeezed and columns[n].wraps
            else natural[n]
            for n in kept
        )
        return sum(parts) + GAP * (len(kept) - 1)

    while needed(squeezed=True) > width and any(columns[n].optional for n in kept):
        kept.remove(max(kept, key=lambda n: columns[n].optional))
    widths = {n: natural[n] for n in kept}
    surplus = sum(widths.values()) + GAP * (len(kept) - 1) - width
    words = [n for n in kept if columns[n].wraps]
    surplus = _squeeze(widths, words, surplus, NARROWEST)
    _squeeze(widths, [n for n in kept if not columns[n].right], surplus, SHORTEST)
    return kept, [widths[n] for n in kept]


def _squeeze(widths: dict[int, int], narrowed: list[int], surplus: int, least: int) -> int:
    """Take cells from the widest of these columns, not below the least; what is still too much."""
    while surplus > 0 and narrowed:
        widest = max(narrowed, key=lambda n: widths[n])
        if widths[widest] <= least:
            break
        widths[widest] -= 1
        surplus -= 1
    return surplus


def _lines(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> list[str]:
    """One row as lines of text without blanks at their ends."""
    parts = [
        wrapped(cell, width) if column.wraps else [shortened(cell, width)]
        for column, width, cell in zip(columns, widths, cells, strict=True)
    ]
    lines = []
    for place in range(max(map(len, parts))):
        texts = [part[place] if place < len(part) else "" for part in parts]
        line = (" " * GAP).join(
            _padded(text, width, column.right)
            for text, width, column in zip(texts, widths, columns, strict=True)
        )
        lines.append(line.rstrip())
    return lines


# A number and its unit stay on one line, and so do the ends of a range.
_BOUND = re.compile(
    r"(?<=\d) (?=(?:ms|s|min|%|MB|GB|tokens|UTC)\b|%)|(?<=[≤–]) (?=[\d≤])|(?<=\d) (?=–)"
)
_TIE = "\N{NO-BREAK SPACE}"


def wrapped(text: str, width: int) -> list[str]:
    """Text in lines of so many cells; words longer than a line are folded, nothing else is broken."""
    lines: list[str] = []
    line = ""
    for word in _BOUND.sub(_TIE, text).split(" "):
        if not line:
            line = word
        elif cell_len(line) + 1 + cell_len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
        while cell_len(line) > width:
            head = set_cell_size(line, width)
            lines.append(head)
            line = line[len(head) :] if line.startswith(head) else line[len(head) - 1 :]
    lines.append(line)
    return [part.replace(_TIE, " ").rstrip() for part in lines]


def _padded(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def shortened(text: str, width: int) -> str:
    """A text that does not fit ends in …"""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(1, width - 1)).rstrip() + "…"
