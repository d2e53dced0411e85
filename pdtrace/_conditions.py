"""Conditions of queries (`when:` of their headers): what they ask of tables, piece by piece, each piece once.

Planned as one statement the conditions of all findings take four times as long as one by one, and an EXISTS inside a
SELECT is planned as a join: a piece alone is a scan that ends with the first row. Which of a few names stands in a
column is asked for all pieces at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WORD = re.compile(r"\w+")
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

    def hold(self, condition: str, rows: Rows | None = None) -> bool:
        """Whether the condition is true. `rows`: who is asked now, where it is somebody else."""
        known = self.told(condition)
        return (
            known
            if known is not None
            else bool(_judged(condition, self._asking(rows or self._rows)))
        )

    def told(self, condition: str) -> bool | None:
        """The same as far as it is known; None where that does not decide."""
        return _judged(condition, self._known.get)

    def _asking(self, rows: Rows) -> Callable[[str], bool]:
        def piece(text: str) -> bool:
            if text not in self._known:
                self._known[text] = self._answer(text, rows)
            return self._known[text]

        return piece

    def _answer(self, piece: str, rows: Rows) -> bool:
        found = _EXISTS.fullmatch(piece)
        if found and (named := _NAMED.fullmatch(found["rows"])):
            wanted = (named["one"] or named["some"]).replace("'", "").split(", ")
            return not self._stand_in(named["table"], named["column"], rows).isdisjoint(wanted)
        told = rows(f"SELECT 1 FROM {found['rows']} LIMIT 1" if found else f"SELECT {piece}")
        return bool(told and told[0][0])

    def _stand_in(self, table: str, column: str, rows: Rows) -> set[object]:
        """The names in a column."""
        if (table, column) not in self._names:
            found = rows(f"SELECT DISTINCT {column} FROM {table}")
            self._names[table, column] = {name for (name,) in found}
        return self._names[table, column]


def named_in(text: str) -> frozenset[str]:
    """The words of a condition, names of tables among them."""
    return frozenset(_WORD.findall(text))


def _judged(condition: str, piece: Callable[[str], bool | None]) -> bool | None:
    """A condition by what its pieces are; None where those that are unknown decide."""
    unknown = False
    for way in _split(" ".join(condition.split()), " OR "):
        holds: bool | None = True
        for part in _split(way, " AND "):
            if (found := piece(part)) is False:
                holds = False
                break
            holds = holds and found
        if holds:
            return True
        unknown |= holds is None
    return None if unknown else False


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
