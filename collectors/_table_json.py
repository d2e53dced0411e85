"""Request tables in JSON lines, JSON arrays and Parquet; nested keys are joined by dots."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from pdtrace.model import Sink, Source

from ._common import json_records
from ._table_blocks import is_block_column
from ._table_headers import is_request_table, understand

BATCH_ROWS = 65_536
DEPTH = 4  # nested JSON keys deeper than this are not looked at
NO_REQUEST_COLUMNS = "no request columns"
_TOKEN = re.compile(r'[{}\[\]]|"(?:[^"\\]|\\.)*"\s*:?')
_LIST_KEY = re.compile(r'^\s*\{[^\[\]]{0,4000}?"(?:\w{1,40})"\s*:\s*(?=\[\s*\{)')


# ---- JSON


def json_names(text: str) -> tuple[str, list[str]] | None:
    """JSON lines or a list of records, and the key paths of the first record."""
    if text[0] == "[":
        names = _names_at(text, text.find("{"))
        return None if names is None else ("json", names)
    names = _names_at(text, 0)
    if names is not None and is_request_table(names):
        return "jsonl", names
    match = _LIST_KEY.match(text)
    names = _names_at(text, text.index("{", match.end())) if match else None
    return None if names is None else ("json", names)


def _names_at(text: str, start: int) -> list[str] | None:
    """Key paths of the record that begins here; of one longer than the head, its outer keys."""
    if start < 0:
        return None
    try:
        record, _ = json.JSONDecoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError):
        return _outer_keys(text[start:]) if len(text) > 60_000 else None
    if not isinstance(record, dict):
        return None
    columnar = any(_is_column(k) for k, v in record.items() if isinstance(v, list))
    return [] if columnar else paths_of(record)


def _is_column(key: str) -> bool:
    """Whether a list under this key (`ttfts`, `input_lens`) is a whole column, not a record's."""
    column = understand(key) or understand(key.removesuffix("s"))
    return column is not None and column.meaning not in ("chunk_times", "itl")


def _outer_keys(text: str) -> list[str]:
    """Keys of the outermost object of a text that ends in the middle of it."""
    keys: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(text):
        word = token.group()
        if word[0] in "{[":
            depth += 1
        elif word[0] in "}]":
            depth -= 1
        elif depth == 1 and word.endswith(":"):
            keys.append(json.loads(word[:-1]))
            listed = text[token.end() : token.end() + 8].lstrip().startswith("[")
            if listed and _is_column(keys[-1]):
                return []
        if depth == 0:
            break
    return keys


def paths_of(record: dict[str, Any], depth: int = DEPTH) -> list[str]:
    """Key paths of everything that is no object, joined by dots."""
    found: list[str] = []
    for key, value in record.items():
        if isinstance(value, dict) and value and depth > 1:
            found.extend(f"{key}.{path}" for path in paths_of(value, depth - 1))
        else:
            found.append(key)
    return found


def _pick(record: dict[str, Any], path: list[str]) -> Any:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if isinstance(value, dict) else value


def _frame_of_records(records: list[dict[str, Any]]) -> pl.DataFrame:
    """Numbers and columns that are understood; prompts and answers are never copied."""
    names: dict[str, None] = {}
    for record in records if len(records) <= 64 else records[:32] + records[-32:]:
        names.update(dict.fromkeys(paths_of(record)))
    columns = [_column(name, [_pick(r, name.split(".")) for r in records]) for name in names]
    return pl.DataFrame([c for c in columns if c is not None])


def _column(name: str, values: list[Any]) -> pl.Series | None:
    present = [v for v in values if v is not None]
    kinds = {type(v) for v in present}
    if kinds == {bool}:
        return pl.Series(name, values, dtype=pl.Boolean)
    if kinds == {int} and all(-(2**63) <= v < 2**63 for v in present):
        return pl.Series(name, values, dtype=pl.Int64)
    if kinds and kinds <= {int, float}:
        return pl.Series(name, values, dtype=pl.Float64, strict=False)
    if list in kinds and sum(isinstance(v, list) for v in present) * 2 <= len(present):
        return _column(name, [None if isinstance(v, list) else v for v in values])
    if list in kinds:
        if is_block_column(name):
            return _hash_column(name, values)
        if not understand(name):
            return pl.Series(name, [None] * len(values), dtype=pl.Null)
        return _list_column(name, values)
    if not understand(name):
        return pl.Series(name, [None] * len(values), dtype=pl.Null)
    return pl.Series(name, [None if v is None else str(v) for v in values], dtype=pl.String)


def _list_column(name: str, values: list[Any]) -> pl.Series:
    rows = [
        [x for x in v if isinstance(x, int | float) and not isinstance(x, bool)]
        if isinstance(v, list)
        else None
        for v in values
    ]
    whole = all(isinstance(x, int) for row in rows if row for x in row)
    return pl.Series(name, rows, dtype=pl.List(pl.Int64 if whole else pl.Float64), strict=False)


def _hash_column(name: str, values: list[Any]) -> pl.Series:
    """Lists of whole numbers of 64 bits, all or nothing: a list with anything else in it is unknown."""
    rows = [
        v if isinstance(v, list) and all(type(x) is int and 0 <= x < 2**64 for x in v) else None
        for v in values
    ]
    return pl.Series(name, rows, dtype=pl.List(pl.UInt64))


def json_batches(
    source: Source, lines: bool, encoding: str, out: Sink
) -> Iterator[tuple[pl.Series, pl.DataFrame]]:
    if lines:
        for ordinals, objects in json_records(source, out):
            yield pl.Series("record", ordinals, dtype=pl.Int64), _frame_of_records(objects)
        return
    with source.open() as stream:
        text = stream.read().decode(encoding, "replace").lstrip("\ufeff")
    value = _loads(text)
    if isinstance(value, dict):
        value = next(
            (v for v in value.values() if isinstance(v, list) and v and isinstance(v[0], dict)), []
        )
    elif not isinstance(value, list):
        value = []
    out.read(len(value))
    strays = [i for i, item in enumerate(value) if not isinstance(item, dict)]
    if strays:
        out.skip(strays, "not an object")
    rows = [(i, item) for i, item in enumerate(value) if isinstance(item, dict)]
    for start in range(0, len(rows), BATCH_ROWS):
        part = rows[start : start + BATCH_ROWS]
        yield (
            pl.Series("record", [i for i, _ in part], dtype=pl.Int64),
            _frame_of_records([r for _, r in part]),
        )


def _loads(text: str) -> Any:
    """The document; of one that was cut off, the whole records before the cut."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    decoder, records, position = json.JSONDecoder(), [], text.find("{", text.find("["))
    while position >= 0:
        try:
            record, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            break
        records.append(record)
        position = text.find("{", end)
    return records


# ---- Parquet


def parquet_batches(source: Source, out: Sink) -> Iterator[tuple[pl.Series, pl.DataFrame]]:
    import pyarrow.parquet as pq  # 70 ms that other files need not pay

    with source.open() as stream:
        file = pq.ParquetFile(io.BytesIO(stream.read()))
    if not is_request_table(file.schema_arrow.names):
        out.read(file.metadata.num_rows)
        out.skip_many(file.metadata.num_rows, NO_REQUEST_COLUMNS, 0)
        return
    first = 0
    for batch in file.iter_batches(BATCH_ROWS):
        frame = pl.DataFrame(pa.Table.from_batches([batch]))
        frame = frame.with_columns(
            pl.col(name).cast(pl.String)
            for name, kind in frame.schema.items()
            if kind == pl.Categorical
        )
        out.read(frame.height)
        yield (
            pl.int_range(first, first + frame.height, eager=True, dtype=pl.Int64).alias("record"),
            frame,
        )
        first += frame.height
