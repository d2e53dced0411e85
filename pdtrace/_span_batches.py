"""Spans that were kept aside as Arrow: their kinds, and the frame that collectors interpret, without DuckDB.

To write 100,000 spans of 13 attributes into a table and to read a dozen of these again took 0.3 s of CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
import polars as pl
import pyarrow as pa

from pdtrace._lookup import repeated
from pdtrace.spans import KEY_COLUMNS, SEPARATOR

_KIND = ("scope_name", "name", *KEY_COLUMNS)
_MOST_KINDS = 2**62  # combinations of texts that one number can tell apart
_TYPES: Mapping[type, type[pl.DataType]] = {
    str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean,
}  # fmt: skip
# What can be read of a pair of columns as a type, the value itself or a cast that always succeeds.
_READABLE = {
    (str, "string"), (int, "int"), (float, "double"), (bool, "bool"), (str, "int"), (float, "int"),
}  # fmt: skip
_COLUMNS: Mapping[str, pl.DataType] = {
    "source": pl.Int32(),
    "start_ns": pl.Int64(),
    "end_ns": pl.Int64(),
    "resolution_ns": pl.Int64(),
    "events": pl.List(pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String})),
    "links": pl.List(
        pl.Struct({"trace_id": pl.String, "span_id": pl.String, "attributes": pl.String})
    ),
}  # of the columns that are no texts
Kind = tuple[str | None, ...]


def kinds(batches: Sequence[pa.Table]) -> list[Kind] | None:
    """As spans.kinds(); None where there are none, or the columns are no dictionaries."""
    if not batches:
        return None
    found: set[Kind] = set()
    for table in batches:
        for rows in table.select([n for n in _KIND if n in table.column_names]).to_batches():
            told = _told(rows)
            if told is None:
                return None
            found |= told
    return list(found)


def repeat(batches: Sequence[pa.Table]) -> bool:
    """Whether a span may stand in these twice, or under an id made up for it."""
    hashes = []
    for table in batches:
        if "extra" in table.column_names or not {"trace_id", "span_id"} <= set(table.column_names):
            return True
        ids = pl.DataFrame(pl.from_arrow(table.select(["trace_id", "span_id"])))
        hashes.append(ids["trace_id"].hash(1) ^ ids["span_id"].hash())
    return bool(repeated(pl.concat(hashes)).any())


def _told(rows: pa.RecordBatch) -> set[Kind] | None:
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    if not all(isinstance(column, pa.DictionaryArray) for column in columns.values()):
        return None
    several = [c for c in columns.values() if len(c.dictionary) > 1 or c.null_count]
    sizes = [len(column.dictionary) + 1 for column in several]
    if reduce(int.__mul__, sizes, 1) > _MOST_KINDS:
        return None
    number = np.zeros(rows.num_rows, dtype=np.int64)
    for size, column in zip(sizes, several, strict=True):
        place = column.indices.cast(pa.int64()).fill_null(size - 1).to_numpy(zero_copy_only=False)
        number = number * size + place
    one = rows.num_rows == 0 or number.min() == number.max()
    first = [0][: rows.num_rows] if one else np.unique(number, return_index=True)[1].tolist()
    return {
        tuple(columns[name][at].as_py() if name in columns else None for name in _KIND)
        for at in first
    }


def frame(
    batches: Sequence[pa.Table],
    columns: Sequence[str],
    attributes: Mapping[str, tuple[str, type, Sequence[str]]],
) -> pl.DataFrame | None:
    """These columns of all spans, and attributes: by name, their key, type and the pairs of columns to look into.

    None where values must be converted with care, or a column is not as DuckDB would give it.
    """
    if any(
        (kind, pair) not in _READABLE for _, kind, pairs in attributes.values() for pair in pairs
    ):
        return None
    fixed = {name: text for name in columns if (text := _same(batches, name)) is not None}
    wanted = {pair for *_, pairs in attributes.values() for pair in pairs}
    parts = []
    for table in batches:
        told = [name for name in columns if name in table.column_names and name not in fixed]
        pairs = [pair for pair in wanted if f"{pair}_keys" in table.column_names]
        lists = [f"{pair}_{part}" for pair in pairs for part in ("keys", "values")]
        part = pl.DataFrame(pl.from_arrow(table.select([*told, *lists])))
        if any(part.schema[f"{pair}_keys"] != pl.Categorical for pair in pairs):
            return None
        texts = (name for name in told if part.schema[name] == pl.Categorical)
        part = part.with_columns(pl.col(name).cast(pl.String) for name in texts)
        if any(part.schema[name] != _COLUMNS.get(name, pl.String()) for name in told):
            return None
        places = {pair: _Places(part[f"{pair}_keys"]) for pair in pairs}
        values = {
            name: [
                pl.col(f"{pair}_values").list.get(places[pair].of(key), null_on_oob=True)
                for pair in (pair for pair in own if pair in places)
            ]
            for name, (key, _, own) in attributes.items()
        }
        parts.append(
            part.select(
                *told,
                *(
                    pl.coalesce(*(v.cast(_TYPES[attributes[name][1]]) for v in found), None)
                    .cast(_TYPES[attributes[name][1]])
                    .alias(name)
                    for name, found in values.items()
                ),
            )
        )
    whole = pl.concat(parts, how="diagonal")
    return whole.with_columns(
        pl.lit(fixed.get(name), dtype=_COLUMNS.get(name, pl.String())).alias(name)
        for name in columns
        if name not in whole.columns
    )


class _Places:
    """Where each key stands in the lists of values, span by span."""

    def __init__(self, keys: pl.Series) -> None:
        self._codes = keys.to_physical()
        once = keys.drop_nulls().unique()
        self._texts = [text.split(SEPARATOR) for text in once.cast(pl.String)]
        self._known = once.to_physical().to_numpy()
        self._some_untold = keys.null_count() > 0

    def of(self, key: str) -> pl.Expr:
        """The place of a key (from 0), NULL in spans without it."""
        places = [text.index(key) if key in text else None for text in self._texts]
        if len({*places, *([None] if self._some_untold else [])}) == 1:
            return pl.lit(places[0], pl.Int64)
        found = pl.Series([None], dtype=pl.Int64).new_from_index(
            0, int(self._known.max(initial=0)) + 1
        )
        found = found.scatter(self._known, places)
        return pl.lit(found.gather(self._codes))


def _same(batches: Sequence[pa.Table], name: str) -> str | None:
    """The text that all spans have in a column, where that is so."""
    texts: set[str] = set()
    for table in batches:
        if name not in table.column_names:
            return None
        column = table.column(name)
        if column.null_count or not pa.types.is_dictionary(column.type):
            return None
        texts.update(*(chunk.dictionary.to_pylist() for chunk in column.chunks[:100]))
        if len(texts) > 1 or column.num_chunks > 100:
            return None
    return texts.pop() if texts else None
