"""The legs as the identity rules see them: numbered, with windows and kinds of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from pdtrace import _rotated
from pdtrace._lookup import repeated
from pdtrace.model import OBSERVERS, UNDATED
from pdtrace.store import Store

ENGINE = OBSERVERS.index("engine")
CLIENT = OBSERVERS.index("client")
NEAR_NS = 60 * 10**9  # legs further apart are never one request
_COLUMNS = (
    "leg", "source", "record", "worker", "observer", "role", "container", "trace_id", "span_id", "parent_span_id",
    "request_id", "external_id", "remote_id", "bootstrap_room", "transfer_id", "row_index", "id_prefix", "attempt",
    "stream", "clock", "clock_start_ns", "start_ns", "end_ns", "first_token_ns", "last_token_ns", "resolution_ns",
    "e2e_ms", "prompt_tokens", "output_tokens", "max_tokens", "status",
)  # fmt: skip
_SAMPLE = 1000  # rows that show which columns may say the same of all


def read(store: Store) -> pl.DataFrame:
    """All legs with the columns that identity needs."""
    return narrow(store, _COLUMNS)


def numbered(rows: pl.DataFrame, paths: Mapping[int, str | None]) -> pl.DataFrame:
    """These legs with their number `n` and what the rules ask of them; `paths` of the sources.

    `part` is the source, or the first one of the recording that it is a piece of.
    """
    legs = described(rows)
    named = {source: path for source, path in paths.items() if path is not None}
    if len(named) < 2:  # nothing is a piece of anything
        return legs
    ends = legs.select("source", "hi").drop_nulls("hi").group_by("source").agg(
        pl.col("hi").min().alias("first"), pl.col("hi").max().alias("last")
    )  # fmt: skip
    rotated = _rotated.parts(named, {s: (a, b) for s, a, b in ends.iter_rows() if s is not None})
    traces = legs.select("source", "trace_id").drop_nulls("trace_id").group_by("source").agg(
        pl.col("trace_id").n_unique()
    )  # fmt: skip
    single = _rotated.one_trace_a_file(named, dict(traces.iter_rows()))
    if not rotated and not single:
        return legs
    return legs.with_columns(pl.col("part").replace(rotated).replace(single))


def narrow(
    store: Store, columns: Sequence[str], *, of_requests: bool = False, hops: bool = False
) -> pl.DataFrame:
    """These columns of legs, and `row`: rowid, or the place among legs that are kept aside.

    `of_requests`: only those that have a request, and are no hops unless these are asked for.
    """
    kept = store.kept_aside("legs")
    if kept is None:
        no_hops = "" if hops else " AND container IS NOT TRUE"
        which = f"request IS NOT NULL{no_hops}" if of_requests else "true"
        return _from_table(store, columns, which)
    real = kept["request"].is_not_null()
    if not hops:
        real &= ~kept["container"].fill_null(value=False)
    kept = kept.with_row_index("row").select(pl.col("row").cast(pl.Int64), *columns)
    return kept.filter(real) if of_requests and not real.all() else kept


def _from_table(store: Store, columns: Sequence[str], which: str) -> pl.DataFrame:
    """What says the same of all legs takes no memory: of a million requests most columns are empty or constant."""
    found = store.sql(
        f"SELECT rowid AS row, {', '.join(columns)} FROM legs WHERE {which} LIMIT {_SAMPLE}"
    )
    if found.height < _SAMPLE:
        return found  # these are all
    alike = [name for name in columns if found[name].n_unique() <= 1]
    said = ", ".join(f"count({name}), min({name}), max({name})" for name in alike)
    ((total, *seen),) = store.rows(
        f"SELECT {', '.join(filter(None, ['count(*)', said]))} FROM legs WHERE {which}"
    )
    same = {
        name: low
        for name, count, low, high in zip(alike, seen[::3], seen[1::3], seen[2::3], strict=True)
        if count == 0 or (count == total and low == high)
    }
    others = ", ".join(["rowid AS row", *(name for name in columns if name not in same)])
    return (
        store.sql(f"SELECT {others} FROM legs WHERE {which}")
        .with_columns(
            pl.lit(value, dtype=found.schema[name]).alias(name) for name, value in same.items()
        )
        .select("row", *columns)
    )


def described(legs: pl.DataFrame) -> pl.DataFrame:
    """Adds n, lo, hi (window), res, obs (rank of the observer), plike, failed, traced."""
    # Clocks without a date are those of hosts: what is near on them was near, and nothing on them is near a date.
    wall = (
        pl.col("clock").is_null()
        | (pl.col("clock") == "wall")
        | pl.col("clock").str.starts_with(UNDATED)
    )
    lo = pl.when(wall).then(pl.col("start_ns"))
    length = (pl.col("e2e_ms") * 1e6).cast(pl.Int64, strict=False)
    hi = pl.max_horizontal(
        lo, pl.coalesce("end_ns", "last_token_ns", lo + length, "first_token_ns")
    )
    engine = pl.col("observer") == "engine"
    failed = pl.col("status").is_in(["failed", "aborted"]).fill_null(value=False)
    short = (pl.col("max_tokens") == 1) | ((pl.col("output_tokens") <= 1) & ~failed)
    return (
        legs.with_columns(
            pl.col("container").fill_null(value=False),
            lo.alias("lo"),
            pl.when(wall & pl.col("start_ns").is_not_null()).then(hi).alias("hi"),
            pl.col("resolution_ns").fill_null(1).alias("res"),
            pl.col("observer")
            .replace_strict(
                list(OBSERVERS), list(range(len(OBSERVERS))), default=ENGINE, return_dtype=pl.Int8
            )
            .alias("obs"),
            (
                (pl.col("role") == "prefill").fill_null(value=False)
                | (engine & short & pl.col("role").is_null()).fill_null(value=False)
            ).alias("plike"),
            failed.alias("failed"),
            pl.col("source").alias("part"),
            # By hashes: two traces of one hash are only looked at in vain.
            (repeated(legs["trace_id"].hash()) & legs["trace_id"].is_not_null()).alias("traced"),
        )
        .with_row_index("n")
        .with_columns(pl.col("n").cast(pl.Int64))
    )


def weak() -> pl.Expr:
    """Whether the name of a leg's worker is one that several processes may bear."""
    return pl.col("worker").is_null() | _named("service:", "address:", "unknown:")


def loose() -> pl.Expr:
    """Whether the worker may be one that another source knows by a better name."""
    return weak() | _named("file:", "pid:")


def _named(*kinds: str) -> pl.Expr:
    """Whether the worker's name begins so; a pattern takes several times as long."""
    return pl.any_horizontal(pl.col("worker").str.starts_with(kind) for kind in kinds)
