"""How the table `spans` keeps attributes: reading one, packing maps, removing duplicates.

Attributes lie in two columns per value type: the keys of a span as one text (`string_keys`, joined
by the unit separator) and the values as a list in the same order (`string_values`). A store sees
few different sets of keys, so that the first column costs next to nothing. Measured with duckdb
2.0.1 on 12 attributes a span, per million spans: 5.8 CPU seconds to insert and 76 bytes a span,
against 16.5 and 81 for MAP columns, whose keys are checked and written again for every span. (MAP
columns generated from these two cost more still: an INSERT evaluates them.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace.model import MADE_SPAN_ID

SEPARATOR = "\x1f"
# MAP column -> prefix of the stored pair of columns and type of the values.
MAPS: dict[str, tuple[str, pa.DataType]] = {
    "attributes_string": ("string", pa.string()),
    "attributes_int": ("int", pa.int64()),
    "attributes_double": ("double", pa.float64()),
    "attributes_bool": ("bool", pa.bool_()),
    "attributes_other": ("other", pa.string()),
}

KEY_COLUMNS = tuple(f"{prefix}_keys" for prefix, _ in MAPS.values())

IN_ANOTHER_SOURCE = "duplicate of a record in another source"
IN_THE_SOURCE = "duplicate within the source"
LOG_COPY = "log copy of an exported span"


def _value(prefix: str, key: str, place: int | None) -> str:
    """SQL for the value of a key in one pair of columns; NULL when absent."""
    position = f"list_position(string_split({prefix}_keys, chr(31)), {_quoted(key)})"
    return f"{prefix}_values[{place or position}]"


def attribute_sql(key: str, kind: type, places: Mapping[str, int | None] | None = None) -> str:
    """SQL over table spans for one attribute as str, int, float or bool.

    Whatever type it was written in. Numbers written as text are cast when they are numbers; a whole
    number is never made by rounding. NULL when the span has no such attribute or when it cannot be
    cast. `places`: the pairs of columns that hold the key in any span, where that is known
    (keys_held), with its place when all have it at the same: the others are not looked into.
    """
    if kind not in _SQL_TYPES:
        raise TypeError(f"attribute {key}: {kind.__name__} is none of str, int, float, bool")
    found = {
        prefix: _READERS[kind, prefix].format(_value(prefix, key, (places or {}).get(prefix)))
        for prefix in _ORDER[kind]
        if places is None or prefix in places
    }
    return f"coalesce({', '.join([*found.values(), f'CAST(NULL AS {_SQL_TYPES[kind]})'])})"


_SQL_TYPES: dict[type, str] = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
_ORDER: dict[type, tuple[str, ...]] = {
    str: ("string", "int", "double", "bool", "other"),
    int: ("int", "string", "double"),
    float: ("double", "int", "string"),
    bool: ("bool", "string", "int"),
}
# How a value of one pair of columns is read as another type.
_READERS: dict[tuple[type, str], str] = {
    (str, "string"): "{0}",
    (str, "int"): "CAST({0} AS VARCHAR)",
    (str, "double"): "CAST({0} AS VARCHAR)",
    (str, "bool"): "CAST({0} AS VARCHAR)",
    (str, "other"): "{0}",
    (int, "int"): "{0}",
    (int, "string"): "CASE WHEN regexp_full_match(trim({0}), '[+-]?[0-9]+')"
    " THEN TRY_CAST(trim({0}) AS BIGINT) END",
    (int, "double"): "CASE WHEN {0} = floor({0}) THEN TRY_CAST({0} AS BIGINT) END",
    (float, "double"): "{0}",
    (float, "int"): "CAST({0} AS DOUBLE)",
    (float, "string"): "TRY_CAST({0} AS DOUBLE)",
    (bool, "bool"): "{0}",
    (bool, "string"): "CASE lower(trim({0})) WHEN 'true' THEN true WHEN 'false' THEN false END",
    (bool, "int"): "CASE {0} WHEN 1 THEN true WHEN 0 THEN false END",
}


def pairs(kind: type, held: Iterable[str]) -> list[str]:
    """The pairs of columns that are looked into for a key of this type, in this order; `held`: those that hold it."""
    return [prefix for prefix in _ORDER[kind] if prefix in held]


def kinds(connection: duckdb.DuckDBPyConnection) -> list[tuple[str | None, ...]]:
    """Every scope, name and set of keys (as KEY_COLUMNS) that spans have, each once."""
    found: list[tuple[str | None, ...]] = connection.execute(
        f"SELECT DISTINCT scope_name, name, {', '.join(KEY_COLUMNS)} FROM spans"
    ).fetchall()
    return found


def keys_of(texts: Iterable[str | None]) -> frozenset[str]:
    """The keys in these columns of a span."""
    return frozenset().union(*(text.split(SEPARATOR) for text in texts if text))


def keys_held(texts: Iterable[Sequence[str | None]]) -> dict[str, dict[str, int | None]]:
    """Which pairs of columns (string, int, ...) hold each attribute key; `texts`: KEY_COLUMNS of all spans.

    With the key's place (from 1) in the lists of values, when nothing else is ever at it: to look
    there takes a quarter of the time of finding the key span by span.
    """
    held: dict[str, dict[str, int | None]] = {}
    columns = zip(*texts, strict=True)
    for (prefix, _), column in zip(MAPS.values(), columns, strict=False):
        at: dict[int, set[str]] = {}
        found: dict[str, set[int]] = {}
        for text in {text for text in column if text is not None}:
            for place, key in enumerate(text.split(SEPARATOR), start=1):
                at.setdefault(place, set()).add(key)
                found.setdefault(key, set()).add(place)
        for key, places in found.items():
            (place, *more) = places
            alone = not more and at[place] == {key}
            held.setdefault(key, {})[prefix] = place if alone else None
    return held


def resource_attribute_sql(key: str) -> str:
    """SQL over table resources for one attribute as text; NULL when absent."""
    return f"attributes[{_quoted(key)}]"


def map_sql(prefix: str) -> str:
    """SQL over table spans for the attributes of one type (string, int, double, bool.

    Other) as a MAP.
    """
    return f"map(string_split({prefix}_keys, chr(31)), {prefix}_values)"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- packing -------------------------------------------------------------------------------------


def packed(batch: Any) -> Any:
    """Rows of spans whose attributes are maps (or lists of structs, or dicts).

    As the table stores them.

    Batches without such columns come back untouched.
    """
    if isinstance(batch, Sequence):
        return _packed_rows(batch) if any(name in row for row in batch for name in MAPS) else batch
    names = batch.columns if isinstance(batch, pl.DataFrame) else batch.schema.names
    if not any(name in MAPS for name in names):
        return batch
    table = batch.to_arrow() if isinstance(batch, pl.DataFrame) else pa.table(batch)
    for name, (prefix, kind) in MAPS.items():
        if name not in table.column_names:
            continue
        keys, values = _pair(table.column(name).to_pylist(), kind)
        table = table.drop_columns([name])
        table = table.append_column(f"{prefix}_keys", keys).append_column(
            f"{prefix}_values", values
        )
    return table


def _packed_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    plain = [{k: v for k, v in row.items() if k not in MAPS} for row in rows]
    names = list(dict.fromkeys(name for row in plain for name in row))
    table = pl.DataFrame(plain, schema=names, infer_schema_length=None).to_arrow()
    for name, (prefix, kind) in MAPS.items():
        maps = [row.get(name) for row in rows]
        if any(maps):
            keys, values = _pair(maps, kind)
            table = table.append_column(f"{prefix}_keys", keys).append_column(
                f"{prefix}_values", values
            )
    return table


def _pair(maps: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    keys: list[str | None] = []
    values: list[list[Any] | None] = []
    for entry in maps:
        pairs = list(_items(entry))
        keys.append(SEPARATOR.join(str(key) for key, _ in pairs) if pairs else None)
        values.append([value for _, value in pairs] if pairs else None)
    return pa.array(keys, pa.string()), pa.array(values, pa.list_(kind))


def _items(entry: Any) -> Sequence[tuple[Any, Any]]:
    if not entry:
        return ()
    if isinstance(entry, dict):
        return list(entry.items())
    return [(e["key"], e["value"]) if isinstance(e, dict) else (e[0], e[1]) for e in entry]


# ---- duplicates ----------------------------------------------------------------------------------

NO_DUPLICATES = pl.DataFrame(
    schema={
        "source": pl.Int32,
        "reason": pl.String,
        "records": pl.Int64,
        "conflicts": pl.Int64,
        "positions": pl.List(pl.Int64),
    }
)

_WITHHELD = '{"length":'
_PAIRS = " || ".join(
    f"coalesce(list_sort(list_zip(string_split({p}_keys, chr(31)), {p}_values))::VARCHAR, '')"
    for p, _ in MAPS.values()
)

_TEXTS = "coalesce(string_values::VARCHAR, '') || coalesce(other_values::VARCHAR, '')"
_COUNT = " + ".join(f"coalesce(len({p}_values), 0)" for p, _ in MAPS.values())

_CANDIDATES = f"""
CREATE OR REPLACE TEMP TABLE span_copies AS
SELECT rowid AS id, source, record, trace_id, span_id, start_ns, resolution_ns,
       (length({_TEXTS}) - length(replace({_TEXTS}, '{_WITHHELD}', '')))
         // {len(_WITHHELD)} AS losses,
       {_COUNT} AS attributes,
       hash(parent_span_id, end_ns, name, kind, status_code, status_message, trace_state, flags,
            scope_name, scope_version, resource, events, links, extra, {_PAIRS}) AS content
FROM spans
WHERE trace_id IS NOT NULL
  AND span_id IS NOT NULL
  AND hash(trace_id, span_id) IN (FROM span_twins)
"""

# A coarse row (rebuilt from log lines) gives way to a finer row of the same span, whose start may
# differ; a start further away is another run under the same seed.
_RUN_NS = 60 * 10**9
_LOSERS = f"""
CREATE OR REPLACE TEMP TABLE span_losers AS
WITH ranked AS (
  SELECT c.*, min(coalesce(c.resolution_ns, 1)) OVER near AS finest,
         row_number() OVER best AS place, first_value(c.source) OVER best AS winner_source,
         first_value(c.content) OVER best AS winner_content
  FROM span_copies c LEFT JOIN (SELECT source, sha256 FROM sources) s USING (source)
  WINDOW best AS (
    PARTITION BY c.trace_id, c.span_id, c.start_ns
    ORDER BY coalesce(c.resolution_ns, 1), c.losses, c.attributes DESC, s.sha256, c.record, c.source
  ), near AS (
    PARTITION BY c.trace_id, c.span_id ORDER BY c.start_ns
    RANGE BETWEEN {_RUN_NS} PRECEDING AND {_RUN_NS} FOLLOWING
  )
)
SELECT id, source, record,
       CASE WHEN coalesce(resolution_ns, 1) > finest THEN '{LOG_COPY}'
            WHEN source IS DISTINCT FROM winner_source THEN '{IN_ANOTHER_SOURCE}'
            ELSE '{IN_THE_SOURCE}' END AS reason,
       coalesce(resolution_ns, 1) = finest AND content <> winner_content AS conflict
FROM ranked
WHERE place > 1 OR coalesce(resolution_ns, 1) > finest
"""


# A span rebuilt from a log line without ids got an id made up: its exported twin has another.
_SLACK_NS = 100_000_000  # a log line may be written this late
_MADE_UP = f"""
SELECT m.rowid AS id, m.source, m.record FROM spans m
WHERE m.extra = '{MADE_SPAN_ID}'
  AND EXISTS (
    SELECT 1 FROM spans f
    WHERE f.trace_id = m.trace_id AND f.name = m.name
      AND coalesce(f.resolution_ns, 1) < m.resolution_ns
      AND abs(f.start_ns - m.start_ns) <= {_SLACK_NS} + m.resolution_ns
      AND coalesce(abs(f.end_ns - m.end_ns) <= {_SLACK_NS} + m.resolution_ns, true)
  )
"""


_SPANS_AT_ONCE = 2_000_000  # their hashes take some 150 MB


def _find_twins(connection: duckdb.DuckDBPyConnection) -> bool:
    """Temp table span_twins(twin): hashes of (trace, span) that occur more than once; whether there are any."""
    parts = 1 + connection.execute("SELECT count(*) FROM spans").fetchall()[0][0] // _SPANS_AT_ONCE
    twins = "SELECT twin FROM (SELECT hash(trace_id, span_id) AS twin FROM spans) {} GROUP BY twin HAVING count(*) > 1"
    mine = f"WHERE twin % {parts} = {{}}" if parts > 1 else ""
    connection.execute(f"CREATE OR REPLACE TEMP TABLE span_twins AS {twins.format(mine.format(0))}")
    for part in range(1, parts):
        connection.execute(f"INSERT INTO span_twins {twins.format(mine.format(part))}")
    return bool(connection.execute("SELECT 1 FROM span_twins LIMIT 1").fetchall())


def deduplicate(
    connection: duckdb.DuckDBPyConnection, settle: Callable[[], None] = lambda: None
) -> pl.DataFrame:
    """Keep one row per (trace_id, span_id, start_ns) in table spans; spans without ids stay.

    The winner does not depend on the order of reading: finest resolution, fewest texts withheld,
    most attributes, then the hash of its source and its record. Returns what was removed, per
    source and reason: records, conflicts (copies that differ from the winner), first positions.
    `settle` is called before rows are told apart by their places.
    """
    twins = _find_twins(connection)
    made_up = connection.execute(
        f"SELECT 1 FROM spans WHERE extra = '{MADE_SPAN_ID}' LIMIT 1"
    ).fetchall()
    if not made_up and not twins:
        return NO_DUPLICATES
    settle()
    try:
        connection.execute(_CANDIDATES)
        connection.execute(_LOSERS)
        if made_up:
            connection.execute(
                f"""INSERT INTO span_losers
                    SELECT id, source, record, '{LOG_COPY}', false FROM ({_MADE_UP})
                    WHERE id NOT IN (SELECT id FROM span_losers)"""
            )
        removed = connection.sql(
            """SELECT source, reason, count(*) AS records,
                      count(*) FILTER (WHERE conflict) AS conflicts,
                      list_sort(min(record, 5)) AS positions
               FROM span_losers GROUP BY source, reason ORDER BY source, reason"""
        ).pl()
        if removed.height:
            connection.execute("DELETE FROM spans WHERE rowid IN (SELECT id FROM span_losers)")
        typed: pl.DataFrame = removed.cast(dict(NO_DUPLICATES.schema))
        return typed
    finally:
        # span_twins stays: episodes.find() looks at what is left of them.
        for name in ("span_copies", "span_losers"):
            connection.execute(f"DROP TABLE IF EXISTS {name}")
