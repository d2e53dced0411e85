"""Engine steps in pdtrace's own spans: a run of steps a span, their numbers in arrays (pdtrace/semconv.py)."""

from __future__ import annotations

from typing import Any

import orjson
import polars as pl

from pdtrace import semconv as s

# Arrays come as JSON text.
ATTRIBUTES: dict[str, type] = {
    s.STEP_FIRST_SEQ: int,
    s.STEP_RANK: str,
    **dict.fromkeys(
        (
            s.STEP_OFFSETS_NS,
            s.STEP_ELAPSED_NS,
            *s.STEP_COUNTS.values(),
            s.STEP_KV_USAGE,
            s.STEP_MEMBER_IDS,
            *s.STEP_MEMBERS.values(),
        ),
        str,
    ),
}


def steps(mine: pl.DataFrame) -> pl.DataFrame:
    """Rows of the table steps; arrays shorter than the run leave unknown values at its end."""
    runs = _runs(mine).filter(pl.col(s.STEP_ELAPSED_NS).is_not_null())
    arrays = {
        "offset": _numbers(s.STEP_OFFSETS_NS),
        "elapsed_ns": _numbers(s.STEP_ELAPSED_NS),
        **{name: _numbers(key) for name, key in s.STEP_COUNTS.items()},
        "kv_usage_ratio": arrays_of(s.STEP_KV_USAGE, pl.Float64),
    }
    length = pl.col("elapsed_ns").list.len()
    rows = (
        runs.with_columns(**arrays)
        .with_columns(
            **{name: _as_long_as(name, length) for name in arrays},
            index=pl.int_ranges(length.cast(pl.Int64)),
        )
        .explode([*arrays, "index"])
    )
    counts = [pl.when(pl.col(name) >= 0).then(name).alias(name) for name in s.STEP_COUNTS]
    return rows.select(
        "source",
        "worker",
        pl.col(s.STEP_RANK).alias("rank"),
        (pl.col(s.STEP_FIRST_SEQ) + pl.col("index")).alias("seq"),
        "elapsed_ns",
        (pl.col("start_ns") + pl.col("offset")).alias("start_ns"),
        *counts,
        pl.when(pl.col("kv_usage_ratio") >= 0).then("kv_usage_ratio").alias("kv_usage_ratio"),
        pl.lit("full").alias("capture"),
    )


def members(mine: pl.DataFrame) -> pl.DataFrame:
    """Rows of the table step_members."""
    arrays = {f"member_{name}": _numbers(key) for name, key in s.STEP_MEMBERS.items()}
    ids = arrays_of(s.STEP_MEMBER_IDS, pl.String)
    length = pl.col("member_step").list.len()
    rows = (
        _runs(mine)
        .filter(
            pl.col(s.STEP_MEMBER_IDS).is_not_null(), pl.col(s.STEP_MEMBERS["step"]).is_not_null()
        )
        .with_columns(ids=ids, **arrays)
        .with_columns(**{name: _as_long_as(name, length) for name in arrays})
        .explode(list(arrays))
        .filter(pl.col("member_step") >= 0, pl.col("member_request") >= 0)
    )
    return rows.select(
        "source",
        "worker",
        pl.col(s.STEP_RANK).alias("rank"),
        (pl.col(s.STEP_FIRST_SEQ) + pl.col("member_step")).alias("seq"),
        pl.col("ids").list.get(pl.col("member_request"), null_on_oob=True).alias("request_id"),
        *(
            pl.when(pl.col(f"member_{name}") >= 0).then(f"member_{name}").alias(name)
            for name in ("prefill_tokens", "decode_tokens", "context_tokens")
        ),
    )


def _runs(mine: pl.DataFrame) -> pl.DataFrame:
    return mine.filter(pl.col("name") == s.SPAN_STEPS)


def _numbers(key: str) -> pl.Expr:
    return arrays_of(key, pl.Int64)


def arrays_of(key: str, kind: type[pl.DataType]) -> pl.Expr:
    """Lists out of JSON texts; NULL where a text is something else, as others may send."""
    return pl.col(key).map_batches(lambda texts: _decoded(texts, kind), return_dtype=pl.List(kind))


def _decoded(texts: pl.Series, kind: type[pl.DataType]) -> pl.Series:
    try:
        return texts.str.json_decode(pl.List(kind))
    except pl.exceptions.ComputeError:
        return pl.Series(
            texts.name, [_list(text, _PLAIN[kind]) for text in texts], dtype=pl.List(kind)
        )


_PLAIN: dict[type[pl.DataType], tuple[type, ...]] = {
    pl.Int64: (int,),
    pl.Float64: (int, float),
    pl.String: (str,),
}


def _list(text: str | None, kinds: tuple[type, ...]) -> list[Any] | None:
    try:
        found = orjson.loads(text or "null")
    except orjson.JSONDecodeError:
        return None
    plain = isinstance(found, list) and all(type(item) in kinds for item in found)
    return found if plain else None


def _as_long_as(name: str, length: pl.Expr) -> pl.Expr:
    """A list cut or filled with NULL to the length of its run; a missing one becomes NULLs."""
    positions = pl.int_ranges(length.cast(pl.Int64))
    return pl.col(name).fill_null([]).list.gather(positions, null_on_oob=True)
