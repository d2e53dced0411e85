"""Tables of requests, batch by batch: which layout and columns, and the rows that come of them."""

from __future__ import annotations

import re
from collections import Counter

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from . import span_tables
from ._table_extras import SAID_OF_THE_REQUEST
from ._table_layouts import Layout, batches, find_layout
from ._table_legs import EMPTY_ROW, SUMMARY_ROW, Rows, build, observer_of
from ._table_plan import Plan, extend_plan, make_plan, tell
from ._table_runs import RUNS, is_sweep, is_table_of_runs

_HEAD_BYTES = 65_536
_PLAN_ROWS = 20_000  # meaning and units are decided on so many rows
_COUNT_WORDS = {
    "zero_ttft": "rows with a first-token time of 0: taken as missing",
    "ttft_equals_total": "rows whose first-token time equals the total (answers that were not streamed?): taken as missing",
    "pace_from_rate": "rows state only tokens per second: the time per token is their inverse; whether the wait for the first token is in it is not known",
    "long_notes_not_stored": "notes of more than 200 characters: not stored",
}


def sniff(head: Head) -> Match | None:
    """A table with at least two request columns, one of them a latency or a token count."""
    layout = find_layout(head)
    if layout is None:
        return None
    if is_table_of_runs(layout.names):
        return Match("generic", ignore=RUNS)
    kinds = {
        "delimited": "table of requests",
        "jsonl": "JSON lines of requests",
        "json": "JSON array of requests",
    }
    return Match("generic", kinds.get(layout.kind, "Parquet table"))


def read(source: Source, out: Sink) -> None:
    """Rows as legs of the observer that wrote the table."""
    with source.open() as stream:
        data = stream.read(_HEAD_BYTES)
        complete = len(data) < _HEAD_BYTES
    if data[:4] == b"PAR1" and not complete and _are_spans(source):
        span_tables.read(source, out)
        return
    out.unit("row")
    layout = find_layout(Head(source.path, source.name, data, complete)) or Layout("jsonl")
    plan: Plan | None = None
    runs: bool | None = None
    observer, worker = "client", ""
    counts: Counter[str] = Counter()
    servers: dict[str, str] = {}
    for record, frame in batches(source, layout, out):
        if not frame.height or not frame.width:
            if len(record):
                out.skip(record.to_list(), EMPTY_ROW)
            continue
        runs = is_sweep(frame) if plan is None and runs is None else runs
        if runs:
            out.skip(record.to_list(), RUNS)
            continue
        if plan is None:
            plan = make_plan(frame.head(_PLAN_ROWS), semicolons=layout.delimiter == ";")
            observer = observer_of(source.name, frame.columns, plan)
            worker = out.worker(
                {"file": source.path}, role=observer, role_basis="log", name=source.name
            )
            tell(plan, out)
            if plan.wall() is False:
                out.clock(f"perf:{source.path}")
        extend_plan(plan, frame)
        rows = build(plan, frame, record, source.path, observer, worker)
        _store(rows, out, servers)
        counts.update(rows.counts)
    for key, n in counts.items():
        out.fact(None, key, f"{n} {_COUNT_WORDS[key]}")


def _are_spans(source: Source) -> bool:
    columns = span_tables.columns_of(source)
    return columns is not None and not columns.lacks


def _store(rows: Rows, out: Sink, servers: dict[str, str]) -> None:
    if rows.summaries:
        out.skip(rows.summaries, SUMMARY_ROW)
    if rows.empty:
        out.skip(rows.empty, EMPTY_ROW)
    if rows.legs.height:
        out.add("legs", rows.legs)
    for table, frames in (("intervals", rows.intervals), ("reported", rows.reported)):
        for frame in frames:
            if frame.height:
                out.add(table, frame)
    if rows.streams is not None and rows.streams.height:
        out.add("streams", rows.streams)
    if rows.blocks is not None and rows.blocks.height:
        out.add("prefix_blocks", rows.blocks)
    if rows.served is not None and rows.served.height:
        _add_served(rows.served, out, servers)


def _add_served(served: pl.DataFrame, out: Sink, servers: dict[str, str]) -> None:
    """A second leg for the worker that the row names; its times are not known."""
    for name in served["worker"].unique().sort():
        if name not in servers:
            servers[name] = out.worker({_alias_kind(name): name}, name=name)
    out.add(
        "legs",
        served.select(
            pl.format("{}/served", "leg").alias("leg"),
            "record",
            pl.col("worker").replace_strict(servers).alias("worker"),
            pl.lit("engine").alias("observer"),
            pl.lit(value=False).alias("container"),
            "rank",
            *SAID_OF_THE_REQUEST,
        ),
    )


def _alias_kind(name: str) -> str:
    if re.fullmatch(r"\d{10,20}", name):
        return "worker_id"
    return "address" if re.fullmatch(r"[\w.\-]+:\d{2,5}", name) else "service"
