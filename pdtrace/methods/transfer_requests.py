"""How much of each request's KV movements was hidden behind its own prefill, how much it waited for.

The movements of a request are a union: layers or chunks that overlap count once. Hidden is what lies
inside steps of its own prefill (detail prefill_exec); exposed is what the partition gives to kv_transfer
and kv_load. What is neither lies under other work, or outside the request's window.
"""

from __future__ import annotations

import polars as pl

MOVES = """
SELECT deployment, request, start_ns, end_ns, bytes
FROM transfer_times
WHERE request IS NOT NULL AND end_ns > start_ns AND direction IS DISTINCT FROM 'store'
"""
PHASES = """
SELECT p.request, p.detail, p.start_ns, p.end_ns
FROM phases AS p
WHERE (p.phase = 'prefill' OR p.detail IN ('kv_transfer', 'kv_load'))
  AND p.request IN (SELECT request FROM transfer_times WHERE end_ns > start_ns)
"""
SCHEMA = {
    "deployment": pl.String, "request": pl.String, "movements": pl.Int64, "bytes": pl.Int64,
    "moved_ms": pl.Float64, "hidden_ms": pl.Float64, "exposed_ms": pl.Float64,
}  # fmt: skip


def requests(moves: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """A row of `transfer_requests` for each request with a movement of known start and end."""
    length = pl.col("end_ns") - pl.col("start_ns")
    moved = moves.group_by("deployment", "request").agg(
        movements=pl.len().cast(pl.Int64),
        bytes=pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()),
        first_ns=pl.col("start_ns").min(),
    )
    pieces = _union(moves)
    under_way = pieces.group_by("request").agg(moved_ms=length.sum() / 1e6)
    exposed = (
        phases.filter(pl.col("detail").is_in(["kv_transfer", "kv_load"]))
        .group_by("request")
        .agg(exposed_ms=length.sum() / 1e6)
    )
    rows = (
        moved.join(under_way, on="request", how="left")
        .join(exposed, on="request", how="left")
        .join(_hidden(moved, pieces, phases), on="request", how="left")
        .with_columns(pl.col("exposed_ms").fill_null(0.0))
    )
    return rows.select(*SCHEMA).cast(SCHEMA).sort("deployment", "request")  # type: ignore[arg-type]


def _union(moves: pl.DataFrame) -> pl.DataFrame:
    """What each movement of a request adds to those that began before it."""
    covered = pl.col("end_ns").shift(1).cum_max().over("request")
    return (
        moves.select("request", "start_ns", "end_ns")
        .sort("request", "start_ns", "end_ns")
        .with_columns(start_ns=pl.max_horizontal("start_ns", covered))
        .filter(pl.col("end_ns") > pl.col("start_ns"))
    )


def _hidden(moved: pl.DataFrame, pieces: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """hidden_ms of requests where it can be told.

    A prefill known as wall time that ends where the movement begins was cut there by it, or ended there:
    cannot tell. Nor can a request whose prefill nobody states.
    """
    prefill = phases.filter(pl.col("detail").str.starts_with("prefill"))
    wall = pl.col("end_ns").filter(pl.col("detail") == "prefill_wall").max()
    told = (
        prefill.join(moved.select("request", "first_ns"), on="request")
        .group_by("request")
        .agg(met_wall=(wall >= pl.col("first_ns").first()).fill_null(value=False))
        .filter(~pl.col("met_wall"))
    )
    shared = (
        prefill.filter(pl.col("detail") == "prefill_exec")
        .join(pieces, on="request", suffix="_move")
        .select(
            "request",
            ms=(
                pl.min_horizontal("end_ns", "end_ns_move")
                - pl.max_horizontal("start_ns", "start_ns_move")
            ).clip(0)
            / 1e6,
        )
        .group_by("request")
        .agg(hidden_ms=pl.col("ms").sum())
    )
    return told.join(shared, on="request", how="left").select(
        "request", pl.col("hidden_ms").fill_null(0.0)
    )
