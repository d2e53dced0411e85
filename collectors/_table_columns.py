"""The columns of a request table, typed: durations, instants, counts and texts by meaning."""

from __future__ import annotations

from hashlib import sha256

import polars as pl

from ._table_headers import KEY_MEANING
from ._table_names import NAMING, names_only
from ._table_plan import Plan, column_ms
from ._table_values import instants_ns, numbers, text


def typed_columns(plan: Plan, frame: pl.DataFrame, record: pl.Series) -> pl.DataFrame:
    """One typed column per meaning; absent ones are NULL."""
    height = frame.height
    columns: dict[str, pl.Series] = {"record": record}
    for meaning in ("ttft", "e2e", "tpot"):
        columns[f"{meaning}_ms"] = or_null(column_ms(plan, frame, meaning), height, pl.Float64)
    for meaning in ("start", "first_at", "end"):
        columns[f"{meaning}_raw"] = or_null(_instant(plan, frame, meaning), height, pl.Int64)
    for meaning in (
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "total_tokens",
        "max_tokens",
        "turn",
    ):
        columns[meaning] = or_null(_count(plan, frame, meaning), height, pl.Int64)
    columns["tps"] = or_null(number_column(plan, frame, "tps"), height, pl.Float64)
    for meaning in (
        "external_id",
        "traceparent",
        "trace_id",
        "span_id",
        "parent_span_id",
        "remote_id",
        "session",
        "finish_reason",
        "model",
        "note",
        "streaming",
        "tenant",
        "route",
        "row_id",
        "worker",
        "rank",
    ):
        named = _text(plan, frame, meaning)
        if named is not None and meaning in NAMING:
            named = names_only(named)
        columns[meaning] = or_null(named, height, pl.String)
    keys = hashed(_text(plan, frame, KEY_MEANING))
    columns["tenant"] = or_null(coalesced([columns["tenant"], keys]), height, pl.String)
    columns["route"] = columns["route"].str.split("?").list.first()
    ids = [text_of(frame, c.name) for c in plan.columns.get("request_id", [])]
    ids = [None if values is None else names_only(values) for values in ids]
    columns["request_id"] = or_null(coalesced(ids), height, pl.String)
    first_text = next((n for n in frame.columns if frame[n].dtype == pl.String), None)
    columns["first_cell"] = or_null(
        text_of(frame, first_text) if first_text else None, height, pl.String
    )
    chunks = chunk_instants(plan, frame)
    columns["chunk_first"] = or_null(
        chunks.list.first() if chunks is not None else None, height, pl.Int64
    )
    columns["chunk_last"] = or_null(
        chunks.list.last() if chunks is not None else None, height, pl.Int64
    )
    return pl.DataFrame([series.alias(name) for name, series in columns.items()])


def hashed(keys: pl.Series | None) -> pl.Series | None:
    """API keys as `key-` and ten digits of their sha256: equal keys stay equal, none can be read."""
    if keys is None:
        return None
    known = {
        key: f"key-{sha256(key.encode()).hexdigest()[:10]}" for key in keys.drop_nulls().unique()
    }
    return keys.replace_strict(known, default=None, return_dtype=pl.String)


def or_null(series: pl.Series | None, height: int, kind: type[pl.DataType]) -> pl.Series:
    return (
        pl.repeat(None, height, dtype=kind, eager=True)
        if series is None
        else series.cast(kind, strict=False)
    )


def coalesced(series: list[pl.Series | None]) -> pl.Series | None:
    present = [s for s in series if s is not None]
    return pl.select(pl.coalesce(present)).to_series() if present else None


def text_of(frame: pl.DataFrame, name: str) -> pl.Series | None:
    return (
        text(frame[name]) if name in frame.columns and not frame[name].dtype.is_nested() else None
    )


def _text(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    column = plan.first(meaning)
    return text_of(frame, column.name) if column else None


def number_column(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    column = plan.first(meaning)
    if column is None or column.name not in frame.columns:
        return None
    comma = plan.commas.get(column.name)
    return numbers(frame[column.name], decimal_comma=comma, whole=meaning.endswith("_tokens"))[0]


def _count(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    value = number_column(plan, frame, meaning)
    return None if value is None else value.set((value < 0).fill_null(value=False), None).round()


def _instant(plan: Plan, frame: pl.DataFrame, meaning: str) -> pl.Series | None:
    column = plan.first(meaning)
    if column is None or column.name not in frame.columns or column.name not in plan.rules:
        return None
    return instants_ns(frame[column.name], plan.rules[column.name])


def chunk_instants(plan: Plan, frame: pl.DataFrame) -> pl.Series | None:
    """Instants of the chunks of each answer, in order; unknown where one of them is none (-1 for missing)."""
    column = plan.first("chunk_times")
    if (
        column is None
        or column.name not in frame.columns
        or not isinstance(frame[column.name].dtype, pl.List)
    ):
        return None
    rows = pl.DataFrame({"row": pl.int_range(frame.height, eager=True), "t": frame[column.name]})
    flat = rows.explode("t").drop_nulls("t")
    flat = flat.with_columns(instants_ns(flat["t"], plan.rules[column.name]).alias("t"))
    listed = flat.group_by("row", maintain_order=True).agg(pl.col("t").sort())
    listed = listed.filter(pl.col("t").list.min() >= 0)
    return rows.select("row").join(listed, on="row", how="left", maintain_order="left")["t"]
