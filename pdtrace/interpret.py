"""Gives whole traces to the collectors that know what their spans mean, in bounded batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import polars as pl

from pdtrace import model, registry, spans
from pdtrace.model import Claims
from pdtrace.sink import RowSink
from pdtrace.store import Store

BATCH_SPANS = 250_000  # whole traces of about this many spans are interpreted at once
_POLARS = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}

# What OpenTelemetry's resource attributes say of a worker's identity.
RESOURCE_ALIASES: Mapping[str, str] = {
    "service.instance.id": "instance",
    "k8s.pod.uid": "pod",
    "k8s.pod.name": "pod",
    "process.pid": "pid",
    "service.name": "service",
}


def run(store: Store) -> pl.DataFrame:
    """Interpret log records, then spans; name_resources() and workers.resolve() come first.

    Returns the copies of spans that were removed (spans.deduplicate), for log records may hold spans too.
    """
    _interpret_logs(store)
    store.execute("DROP TABLE IF EXISTS temp.log_records")
    copies = spans.deduplicate(store.connection)
    if store.count("spans"):
        _assign_owners(store)
        facts = store.sql("SELECT worker, key, value FROM facts")
        for name in registry.claims():
            _interpret_spans(store, name, facts)
        store.execute("DROP TABLE span_owners")
    store.execute("DROP TABLE IF EXISTS resource_workers")
    return copies


def _interpret_spans(store: Store, name: str, facts: pl.DataFrame) -> None:
    """Give one collector the traces that hold its spans."""
    module = registry.collectors()[name]
    owned = store.scalar(f"SELECT count(*) FROM span_owners WHERE owner = '{name}'")
    if not owned or not hasattr(module, "interpret"):
        return
    batches = max(1, -(-store.count("spans") // BATCH_SPANS))
    for batch in range(batches):
        frame = _frame(store, name, registry.claims()[name], batch, batches)
        if frame.height:
            sink = RowSink(store)
            module.interpret(frame, facts, sink)
            sink.close()


def name_resources(store: Store) -> None:
    """Declare a worker for every OpenTelemetry resource: temp table resource_workers(resource, worker)."""
    aliases = dict(RESOURCE_ALIASES)
    for claims in registry.claims().values():
        aliases.update(claims.resource_aliases)
    columns = ", ".join(f'{spans.resource_attribute_sql(key)} AS "{key}"' for key in aliases)
    rows = store.connection.sql(
        f"""SELECT r.resource, attributes['host.name'] AS host, t.start_ns, t.end_ns, s.path, {columns}
            FROM resources r
            LEFT JOIN (SELECT resource, min(start_ns) AS start_ns, max(end_ns) AS end_ns, min(source) AS source
                       FROM spans GROUP BY resource) t USING (resource)
            LEFT JOIN sources s USING (source)"""
    ).pl()
    sink = RowSink(store)
    named = []
    for row in rows.iter_rows(named=True):
        found: dict[str, str | None] = {}
        for key, kind in aliases.items():
            found.setdefault(kind, row[key])
            found[kind] = found[kind] or row[key]
        scope = row["host"] or (str(PurePosixPath(row["path"]).parent) if row["path"] else "")
        worker = model.worker_id(found, scope)
        sink.declare(
            {
                "worker": worker, "name": found.get("service"), "host": row["host"],
                "start_ns": row["start_ns"], "end_ns": row["end_ns"],
            },
            found,
        )  # fmt: skip
        named.append({"resource": row["resource"], "worker": worker})
    sink.close()
    store.temporary(
        "resource_workers", pl.DataFrame(named, schema={"resource": pl.String, "worker": pl.String})
    )


def _interpret_logs(store: Store) -> None:
    """Give OTLP log records to the collectors that claim their scopes."""
    if store.count("log_records") == 0:
        return
    records = store.sql(
        f"""SELECT l.*, r.service_name, {_resolved("l.resource")} AS worker
            FROM log_records l LEFT JOIN resources r USING (resource)"""
    )
    facts = store.sql("SELECT worker, key, value FROM facts")
    for name, claims in registry.claims().items():
        module = registry.collectors()[name]
        if not claims.log_scopes or not hasattr(module, "interpret_logs"):
            continue
        tests = [
            pl.col("scope_name").str.starts_with(scope[:-1])
            if scope.endswith("*")
            else pl.col("scope_name") == scope
            for scope in claims.log_scopes
        ]
        mine = records.filter(pl.any_horizontal(tests))
        if mine.height:
            sink = RowSink(store)
            module.interpret_logs(mine, facts, sink)
            sink.close()


def _resolved(resource: str) -> str:
    """SQL for the worker of a resource after aliases were resolved."""
    return (
        f"(SELECT coalesce(any_value(m.canonical), any_value(w.worker)) FROM resource_workers w"
        f" LEFT JOIN worker_map m USING (worker) WHERE w.resource = {resource})"
    )


def _assign_owners(store: Store) -> None:
    """Temp table span_owners(scope_name, name, owner): every span has exactly one owner."""
    groups = store.rows(
        f"""SELECT scope_name, name, list_distinct(flatten(array_agg(DISTINCT {spans.keys_sql()}))) AS keys
           FROM spans GROUP BY ALL"""
    )
    rows = [
        {
            "scope_name": scope,
            "name": name,
            "owner": registry.owner(scope, name or "", frozenset(keys or ())),
        }
        for scope, name, keys in groups
    ]
    kinds = {"scope_name": pl.String, "name": pl.String, "owner": pl.String}
    store.temporary("span_owners", pl.DataFrame(rows, schema=kinds))


def _frame(store: Store, name: str, claims: Claims, batch: int, batches: int) -> pl.DataFrame:
    """Whole traces that hold spans of this collector, with the columns that it asked for."""
    attributes = ", ".join(
        f'{spans.attribute_sql(key, kind)} AS "{key}"' for key, kind in claims.attributes.items()
    )
    resource = ", ".join(
        f'r.{spans.resource_attribute_sql(key)} AS "resource.{key}"'
        for key in claims.resource_attributes
    )
    part = f"hash(t.trace_id) % {batches} = {batch}" if batches > 1 else "true"
    others = store.scalar(f"SELECT count(*) FROM span_owners WHERE owner IS DISTINCT FROM '{name}'")
    whole = (
        f"""AND t.trace_id IN (SELECT trace_id FROM spans JOIN span_owners o
              ON spans.scope_name IS NOT DISTINCT FROM o.scope_name AND spans.name = o.name
              WHERE o.owner = '{name}')"""
        if others
        else ""
    )
    return store.sql(
        f"""SELECT t.source, t.trace_id, t.span_id, t.parent_span_id, t.start_ns, t.end_ns, t.name, t.kind,
                   t.status_code, t.status_message, t.scope_name, t.resource, r.service_name, w.worker,
                   t.resolution_ns, t.events, t.links,
                   coalesce(o.owner = '{name}', false) AS mine
                   {"," if attributes else ""} {attributes} {"," if resource else ""} {resource}
            FROM spans t
            LEFT JOIN resources r USING (resource)
            LEFT JOIN resource_workers w USING (resource)
            LEFT JOIN span_owners o ON t.scope_name IS NOT DISTINCT FROM o.scope_name AND t.name = o.name
            WHERE {part} {whole}"""
    )
