"""Conditions of queries (`when:` of their headers): what they ask of tables, piece by piece, each piece once.

Planned as one statement the conditions of all findings take four times as long as one by one, and an EXISTS inside a
SELECT is planned as a join: a piece alone is a scan that ends with the first row. Which of a few names stands in a
column is asked for all pieces at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_EXISTS = re.compile(r"EXISTS \(FROM (?P<rows>\w+(?: WHERE .+)?)\)", re.DOTALL)

_NAMED = re.compile(
    r"(?P<table>\w+) WHERE (?P<column>\w+) (?:= (?P<one>'\w+')|IN \((?P<some>'\w+'(?:, '\w+')*)\))"
)

Rows = Callable[[str], list[tuple[object, ...]]]


class Conditions:
    """Conditions over tables that stay as they are meanwhile."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._known: dict[str, bool] = {}
        self._names: dict[tuple[str, str], set[object]] = {}

    def hold(self, condition: str) -> bool:
        """Whether the condition is true."""
        return any(
            all(self._piece(piece) for piece in _split(way, " AND "))
            for way in _split(" ".join(condition.split()), " OR ")
        )

    def _piece(self, piece: str) -> bool:
        if piece not in self._known:
            self._known[piece] = self._told(piece)
        return self._known[piece]

    def _told(self, piece: str) -> bool:
        found = _EXISTS.fullmatch(piece)
        if found and (named := _NAMED.fullmatch(found["rows"])):
            wanted = (named["one"] or named["some"]).replace("'", "").split(", ")
            return not self._stand_in(named["table"], named["column"]).isdisjoint(wanted)
        rows = self._rows(f"SELECT 1 FROM {found['rows']} LIMIT 1" if found else f"SELECT {piece}")
        return bool(rows and rows[0][0])

    def _stand_in(self, table: str, column: str) -> set[object]:
        """The names in a column."""
        if (table, column) not in self._names:
            rows = self._rows(f"SELECT DISTINCT {column} FROM {table}")
            self._names[table, column] = {name for (name,) in rows}
        return self._names[table, column]


def _split(text: str, word: str) -> list[str]:
    """The parts between a word where it stands in no brackets and no quotes."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if text[place] == "'":
            place = text.index("'", place + 1)
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth and text.startswith(word, place):
            parts.append(text[start:place])
            start = place = place + len(word)
        else:
            place += 1
    return [*parts, text[start:]]
