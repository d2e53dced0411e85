"""Logs stamped in local time: their zone, where spans tell the same requests in UTC.

A log without zone is read as UTC. Where request ids stand in its lines and in spans, and nearly all
of them are apart by the same multiple of a quarter of an hour, that is the zone: everything the log
said is moved. Without shared ids nothing is known, and the log stays as assumed.
"""

from __future__ import annotations

import polars as pl

from pdtrace import spans
from pdtrace.store import Store

ASSUMED = "assumed UTC"
QUARTER_NS = 900 * 10**9
LARGEST = 14 * 4  # quarters of an hour: no zone is further from UTC
SLACK_NS = 5 * 10**9  # a line is written soon after the request has arrived, and stamped in seconds
LEAST = 3  # requests that must agree
AGREE = 0.8  # part of the shared ids that must
_ID_KEYS = ("gen_ai.request.id", "request.id", "request_id", "rid")
_MOVED = {
    "legs": ("start_ns", "first_token_ns", "last_token_ns", "end_ns"),
    "intervals": ("start_ns", "end_ns"),
    "streams": ("first_ns",),
    "events": ("time_ns",),
    "samples": ("time_ns",),
    "steps": ("start_ns", "start_lower_ns", "start_upper_ns"),
    "transfers": ("start_ns", "end_ns"),
    "decisions": ("time_ns",),
}


def align(store: Store) -> None:
    """Move what logs in another zone said; facts `log_time_zone` tell what was found."""
    if not {"facts", "spans", "legs"} <= store.filled():
        return
    logs = store.sql(
        f"""SELECT DISTINCT source, worker FROM facts
            WHERE key = 'log_time_zone' AND value = '{ASSUMED}' AND source IS NOT NULL"""
    )
    if not logs.height or not store.count("spans") or not store.count("legs"):
        return
    store.temporary("zone_logs", logs)
    for source, quarters, agreeing in quarters_off(_pairs(store)):
        workers = logs.filter(pl.col("source") == source)["worker"].drop_nulls().to_list()
        _move(store, source, workers, quarters, agreeing)
    store.execute("DROP TABLE zone_logs")


def _pairs(store: Store) -> pl.DataFrame:
    """source of a log, apart_ns (line minus span) for every request that both tell."""
    found = [f"({spans.attribute_sql(key, str)})" for key in _ID_KEYS]
    return store.sql(
        f"""WITH loaded AS (
              -- lines that tell of a request's cache and not of its arrival: a load comes soon after that
              SELECT leg, min(start_ns) AS load_ns FROM intervals SEMI JOIN zone_logs USING (source)
              WHERE detail = 'kv_load' GROUP BY leg
            ), told AS (
              SELECT source, request_id, min(coalesce(start_ns, load_ns)) AS start_ns
              FROM legs SEMI JOIN zone_logs USING (source) LEFT JOIN loaded USING (leg)
              WHERE request_id IS NOT NULL
                AND CASE WHEN start_ns IS NULL THEN load_ns IS NOT NULL ELSE resolution_ns >= 1000000000 END
              GROUP BY source, request_id HAVING count(*) = 1
            ), spanned AS (
              SELECT coalesce({", ".join(found)}) AS request_id, start_ns FROM spans
              WHERE start_ns IS NOT NULL AND contains(string_keys, 'id')
            )
            SELECT told.source, told.request_id, told.start_ns - spanned.start_ns AS apart_ns
            FROM told JOIN spanned USING (request_id)"""
    )


def quarters_off(pairs: pl.DataFrame) -> list[tuple[int, int, int]]:
    """(source, quarters of an hour ahead of UTC, requests that agree) of logs that are not in UTC."""
    quarter = (pl.col("apart_ns") / QUARTER_NS).round().cast(pl.Int64)
    near = pairs.with_columns(quarter.alias("quarters")).filter(
        ((pl.col("apart_ns") - pl.col("quarters") * QUARTER_NS).abs() <= SLACK_NS)
        & (pl.col("quarters").abs() <= LARGEST)
    )
    asked = pairs.group_by("source").agg(pl.col("request_id").n_unique().alias("asked"))
    votes = near.group_by("source", "quarters").agg(
        pl.col("request_id").n_unique().alias("agreeing")
    )
    fitting = votes.join(asked, on="source").filter(
        (pl.col("agreeing") >= LEAST) & (pl.col("agreeing") >= AGREE * pl.col("asked"))
    )
    # Two runs of a seeded load whole hours apart fit twice; then the log stays as assumed.
    single = fitting.filter((pl.len().over("source") == 1) & (pl.col("quarters") != 0))
    return list(single.sort("source").select("source", "quarters", "agreeing").iter_rows())


def _move(store: Store, source: int, workers: list[str], quarters: int, agreeing: int) -> None:
    shift = quarters * QUARTER_NS
    for table, columns in _MOVED.items():
        moves = ", ".join(f"{c} = {c} - {shift}" for c in columns)
        store.execute(f"UPDATE {table} SET {moves} WHERE source = {source}")
    names = ", ".join("'" + worker.replace("'", "''") + "'" for worker in workers)
    if names:
        store.execute(
            f"UPDATE workers SET start_ns = start_ns - {shift}, end_ns = end_ns - {shift}"
            f" WHERE worker IN ({names})"
        )
    hours, rest = divmod(abs(quarters) * 15, 60)
    zone = f"UTC{'-' if quarters < 0 else '+'}{hours:02d}:{rest:02d}"
    store.execute(
        f"""UPDATE facts SET value = '{zone} (found from {agreeing} requests that spans tell too)'
            WHERE source = {source} AND key = 'log_time_zone'"""
    )
