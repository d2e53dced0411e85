"""Why requests are slow, as a page of text and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdtrace import _words_slow as words
from pdtrace._grid import Column, grid, wrapped
from pdtrace._paper import Plain, put, rule
from pdtrace.markdown import cell, table
from pdtrace.phrases import shorten

if TYPE_CHECKING:
    from rich.console import Console

    from pdtrace.slow import Answer, Comparison

_NUMBERS = {
    "selected",
    "of",
    "share",
    "of others",
    "difference",
    "lift",
    "TTFT",
    "total",
    "per token",
    "in",
    "out",
}
_NEXT = "The slowest of them (`pdtrace explain REQUEST PATH` tells the story of one)"


def write(answer: Answer, out: Console | Plain) -> None:
    """Every deployment's comparison, for people."""
    for c in answer.comparisons:
        rule(out, shorten(c.name, max(20, out.width - 10)))
        _one(c, answer, out)
    if not answer.comparisons:
        put(out, "No requests in these data.")


def _one(c: Comparison, answer: Answer, out: Console | Plain) -> None:
    for text in words.blocks(c, answer.needed):
        _text(text, out)
    if rows := words.rows(c):
        put(out)
        _text("What sets them apart, the strongest first", out, "bold")
        columns = [
            Column(h, right=h in _NUMBERS, wraps=h in ("what", "value"), optional={"lift": 3, "of others": 2, "95 % interval": 1}.get(h, 0))
            for h in words.HEADS
        ]  # fmt: skip
        grid(out, columns, rows)
    for line in words.remarks(c, answer.alpha):
        for place, part in enumerate(wrapped(line, max(20, out.width - 4))):
            put(out, ("  - " if place == 0 else "    ") + part)
    if c.examples:
        put(out)
        _text(_NEXT, out, "bold")
        heads = [Column(h, right=h in _NUMBERS) for h in words.EXAMPLE_HEADS]
        grid(out, heads, words.example_rows(c))
    if rows:
        _text(words.NO_CAUSE, out, "dim")
    put(out)


def _text(text: str, out: Console | Plain, style: str = "") -> None:
    for line in wrapped(text, out.width):
        put(out, line, style)


def markdown(answer: Answer) -> str:
    """The same as Markdown."""
    parts: list[str] = []
    for c in answer.comparisons:
        parts += [
            f"## {cell(c.name)}",
            "",
            *(f"{cell(text)}  " for text in words.blocks(c, answer.needed)),
            "",
        ]
        rows = words.rows(c)
        if rows:
            parts.append(table(words.HEADS, rows))
        parts += [f"- {cell(line)}" for line in words.remarks(c, answer.alpha)]
        if c.examples:
            parts += ["", f"{_NEXT}:", "", table(words.EXAMPLE_HEADS, words.example_rows(c))]
        if rows:
            parts += [cell(words.NO_CAUSE), ""]
    return "\n".join(parts) + "\n"
