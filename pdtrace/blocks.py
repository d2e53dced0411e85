"""Pieces of a report that text and Markdown show alike: a heading, sentences, a table, a list."""

from __future__ import annotations

from pdtrace.records import dataclass


@dataclass(frozen=True)
class Block:
    """One piece; what is empty is not shown. Columns named in `fixed` are not broken over lines."""

    title: str = ""
    strong: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    items: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing to show below the title."""
        return not (self.strong or self.lines or self.rows or self.items)
