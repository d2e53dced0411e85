"""Columns that name a request, session, user or worker: what is text for people is no name."""

from __future__ import annotations

import re

import polars as pl

from ._table_headers import words_of

# meanings whose values are stored as they are
NAMING = frozenset({
    "request_id", "external_id", "session", "tenant", "worker", "rank", "route", "model", "remote_id", "trace_id",
    "row_id",
})  # fmt: skip
LONGEST = 200
_TOO_MANY = 0.02  # share of the values that read like text: then the column holds text
_STATED = re.compile(
    r"(?:^|_)(?:id|uuid|guid|rid|no|nr|nummer|number|index|idx|name|번호|编号|番号)$"
)
# requests, sessions and users under a bare word (`request`, `chat`, `user`) may be what was said
_SAID = r"\S\s+\S+\s+\S|[{}\[\]\"\n]"
_TEXT = r"^\s*[{\[\"]|\n|(?:\S+\s+){6}"


def holds_text(series: pl.Series, name: str) -> bool:
    """Whether a column that is named like an id holds prompts, answers or JSON documents instead."""
    if series.dtype != pl.String:
        return False
    present = series.drop_nulls()
    if not len(present):
        return False
    stated = _STATED.search(words_of(name.rpartition(".")[2])[0])
    odd = present.str.contains(_TEXT if stated else _SAID) | (present.str.len_chars() > LONGEST)
    return bool(odd.mean() > _TOO_MANY)  # type: ignore[operator]


def names_only(series: pl.Series) -> pl.Series:
    """The values that can be names; a text in a column of names is unknown."""
    text = (series.str.len_chars() > LONGEST) | series.str.contains(_TEXT)
    return series.set(text.fill_null(value=False), None)
