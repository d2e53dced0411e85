"""Gives whole traces to the collectors that know what their spans mean, in bounded batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath

import polars as pl
import pyarrow as pa

from pdtrace import _span_batches, decisions, episodes, model, registry, spans
from pdtrace.errors import PROBLEM, REPORT, in_one_line, reraise_stop
from pdtrace.records import dataclass
from pdtrace.sink import RowSink
from pdtrace.store import Store

BATCH_SPANS = 250_000  # whole traces of about this many spans are interpreted at once
FOREIGN_LOG = "log record of a scope that no collector reads"
UNUSED = {"source": pl.Int32, "record": pl.Int64, "reason": pl.String}
# What interpret() gets of every span, beside the attributes that its collector asked for.
SPAN_COLUMNS = (
    "source", "trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "name", "kind", "status_code",
    "status_message", "scope_name", "resource", "service_name", "worker", "resolution_ns", "events", "links", "mine",
)  # fmt: skip
_log = logging.getLogger(__name__)
_POLARS = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}

# What OpenTelemetry's resource attributes say of a worker's identity.
RESOURCE_ALIASES: Mapping[str, str] = {
    "service.instance.id": "instance",
    "k8s.pod.uid": "pod",
    "k8s.pod.name": "pod",
    "process.pid": "pid",
    "service.name": "service",
}


@dataclass(frozen=True)
class _Survey:
    """What is known of all spans before any is handed out."""

    total: int
    owners: Mapping[tuple[str | None, str | None], str | None]  # by scope and name
    held: Mapping[str, Mapping[str, int | None]]  # spans.keys_held()
    laid_out: pl.DataFrame | None = None  # _attributes() of the only owner

    def alone(self, owner: str) -> bool:
        """Whether no span has another owner."""
        return all(it == owner for it in self.owners.values())

    @property
    def named(self) -> bool:
        """Whether all spans have a name; one without is nobody's."""
        return all(name is not None for _, name in self.owners)


class Begun:
    """Spans that another thread surveys, and lays out where they are all of one collector: of use while they stay as they are."""

    def __init__(self, batches: Sequence[pa.Table]) -> None:
        self._batches = batches
        pool = ThreadPoolExecutor(1, "pdtrace-spans")
        self._survey = pool.submit(_laid_out, batches)
        pool.shutdown(wait=False)

    def take(self, batches: Sequence[pa.Table]) -> _Survey | None:
        """What is known of these spans, if they are the same; it is let go here."""
        before, self._batches = self._batches, ()
        if not before or [*map(id, batches)] != [*map(id, before)]:
            return None
        found = self._survey.result()
        del self._survey
        return found


def begin(store: Store) -> Begun | None:
    """Begin with spans that are kept aside, while copies are sought and workers named: hardly ever that changes them."""
    batches = list(store.batches_aside("spans"))
    if not batches or sum(table.num_rows for table in batches) > BATCH_SPANS:
        return None
    return Begun(batches)


def _laid_out(batches: Sequence[pa.Table]) -> _Survey | None:
    kinds = _span_batches.kinds(batches)
    if kinds is None:
        return None
    survey = _survey(kinds, sum(table.num_rows for table in batches))
    name = next(iter(survey.owners.values()), None)
    if name is None or not survey.alone(name) or not survey.named:
        return survey
    laid_out = _attributes(batches, name, survey)
    return _Survey(survey.total, survey.owners, survey.held, laid_out)


def run(store: Store, *, deduplicated: bool = False, begun: Begun | None = None) -> pl.DataFrame:
    """Interpret log records, then spans; name_resources() and workers.resolve() come first.

    Returns what gave no row, with the reasons, in the shape of spans.deduplicate: log records that say nothing
    new, copies of spans (log records may hold spans too), choices that a span and a log line tell.
    `deduplicated`: deduplicate() has just been here. `begun`: what begin() gave.
    """
    logs = store.count("log_records") > 0
    given = [_interpret_logs(store)] if logs else []
    store.execute("DROP TABLE IF EXISTS temp.log_records")
    if logs or not deduplicated:
        given.insert(0, deduplicate(store))
    again = episodes.find(store)
    if total := store.count("spans"):
        survey = _surveyed(store, total, begun)
        facts = store.short("SELECT worker, key, value FROM facts")
        for name in registry.claims():
            if name in survey.owners.values() and hasattr(registry.collectors()[name], "interpret"):
                _interpret_spans(store, name, facts, survey, again=again)
        store.execute("DROP TABLE span_owners")
    if again:
        episodes.forget(store)
    store.execute("DROP TABLE IF EXISTS resource_workers")
    return pl.concat([*given, decisions.unite(store)])


def deduplicate(store: Store) -> pl.DataFrame:
    """Keep one of the spans that stand in two files, see spans.deduplicate."""
    batches = store.batches_aside("spans")
    if batches and not _span_batches.repeat(batches):
        store.temporary("span_twins", pl.DataFrame(schema={"twin": pl.UInt64}))
        return spans.NO_DUPLICATES
    store.prepare("FROM spans")
    return spans.deduplicate(store.connection, lambda: store.settle_aside("spans"))


def _interpret_spans(
    store: Store, name: str, facts: pl.DataFrame, survey: _Survey, *, again: bool
) -> None:
    """Give one collector the traces that hold its spans."""
    module = registry.collectors()[name]
    batches = max(1, -(-survey.total // BATCH_SPANS))
    for batch in range(batches):
        frame = _frame(store, name, survey, (batch, batches), again=again)
        if frame.height:
            sink = RowSink(store)
            with _told(store, name):
                module.interpret(frame, facts, sink)
                sink.close()


@contextmanager
def _told(store: Store, name: str) -> Iterator[None]:
    """A collector that breaks down over spans or log records leaves those of the others alone; it is told."""
    try:
        yield
    except BaseException as error:
        reraise_stop(error)
        _log.debug("collector %s failed to interpret", name, exc_info=True)
        problem = (
            f"collector {name} failed to say what its records mean: {in_one_line(error)}; {REPORT}"
        )
        store.append("facts", [{"key": PROBLEM, "value": problem}])


def name_resources(store: Store) -> None:
    """Declare a worker for every OpenTelemetry resource: temp table resource_workers(resource, worker)."""
    aliases = dict(RESOURCE_ALIASES)
    for claims in registry.claims().values():
        aliases.update(claims.resource_aliases)
    columns = ", ".join(f'{spans.resource_attribute_sql(key)} AS "{key}"' for key in aliases)
    rows = store.short(
        f"""SELECT r.resource, attributes['host.name'] AS host, t.start_ns, t.end_ns, s.path, {columns}
            FROM resources r
            LEFT JOIN (SELECT resource, min(start_ns) AS start_ns, max(end_ns) AS end_ns, min(source) AS source
                       FROM spans GROUP BY resource) t USING (resource)
            LEFT JOIN sources s USING (source)"""
    )
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


def _interpret_logs(store: Store) -> pl.DataFrame:
    """Give OTLP log records to the collectors that claim their scopes; returns those that gave nothing, and why."""
    records = store.sql(
        f"""SELECT l.*, r.service_name, {_resolved("l.resource")} AS worker
            FROM log_records l LEFT JOIN resources r USING (resource)"""
    )
    facts = store.sql("SELECT worker, key, value FROM facts")
    unused = []
    claimed = pl.lit(value=False)
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
        claimed = claimed | pl.any_horizontal(tests)
        mine = records.filter(pl.any_horizontal(tests))
        if mine.height:
            sink = RowSink(store)
            with _told(store, name):
                unused.append(module.interpret_logs(mine, facts, sink))
                sink.close()
    foreign = records.filter(~claimed.fill_null(value=False)).select("source", "record")
    unused.append(foreign.with_columns(reason=pl.lit(FOREIGN_LOG)))
    return _reasons([frame for frame in unused if frame is not None])


def _reasons(unused: list[pl.DataFrame]) -> pl.DataFrame:
    """Records (source, record, reason) counted by source and reason, as spans.deduplicate counts copies."""
    schema = pl.Schema(UNUSED)
    rows = pl.concat([schema.to_frame(), *(f.select(*UNUSED).cast(schema) for f in unused)])
    return rows.group_by("source", "reason", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("records"),
        pl.lit(0, pl.Int64).alias("conflicts"),
        pl.col("record").sort().head(5).alias("positions"),
    )


def _resolved(resource: str) -> str:
    """SQL for the worker of a resource after aliases were resolved."""
    return (
        f"(SELECT coalesce(any_value(m.canonical), any_value(w.worker)) FROM resource_workers w"
        f" LEFT JOIN worker_map m USING (worker) WHERE w.resource = {resource})"
    )


def _surveyed(store: Store, total: int, begun: Begun | None) -> _Survey:
    """Temp table span_owners(scope_name, name, owner): every span has exactly one owner."""
    batches = store.batches_aside("spans")
    survey = None if begun is None else begun.take(batches)
    if survey is None:
        kinds = _span_batches.kinds(batches)
        if kinds is None:
            store.prepare("FROM spans")
            kinds = spans.kinds(store.connection)
        survey = _survey(kinds, total)
    rows = [(scope, name, owner) for (scope, name), owner in survey.owners.items()]
    columns = {"scope_name": pl.String, "name": pl.String, "owner": pl.String}
    store.temporary("span_owners", pl.DataFrame(rows, schema=columns, orient="row"))
    return survey


def _survey(kinds: Iterable[Sequence[str | None]], total: int) -> _Survey:
    keys: dict[tuple[str | None, str | None], set[str]] = {}
    held = []
    for scope, name, *texts in kinds:
        keys.setdefault((scope, name), set()).update(spans.keys_of(texts))
        held.append(texts)
    owners = {
        (scope, name): registry.owner(scope, name or "", frozenset(its))
        for (scope, name), its in keys.items()
    }
    return _Survey(total, owners, spans.keys_held(held))


def _column(key: str) -> str:
    """The column of an attribute: its key, or attribute.<key> where every span has such a column itself."""
    return f"attribute.{key}" if key in SPAN_COLUMNS else key


def _frame(
    store: Store, name: str, survey: _Survey, batches: tuple[int, int], *, again: bool
) -> pl.DataFrame:
    """Whole traces that hold spans of this collector, with the columns that it asked for.

    `batches` = (which, of how many). With `again`, a trace whose ids were used twice counts as two.
    """
    alone = survey.alone(name) and survey.named
    if alone and batches[1] == 1 and not again:
        found = survey.laid_out
        if found is None:
            found = _attributes(store.batches_aside("spans"), name, survey)
        if found is not None:
            return _with_resources(store, name, survey, found)
    claims = registry.claims()[name]
    held = survey.held
    present = [
        f'{spans.attribute_sql(key, kind, held[key])} AS "{_column(key)}"'
        for key, kind in claims.attributes.items()
        if key in held
    ]
    asked = "".join(f", {column}" for column in (*present, *_of_resources(claims)))
    batch, of = batches
    part = f"hash(t.trace_id) % {of} = {batch}" if of > 1 else "true"
    trace = episodes.trace_sql() if again else "t.trace_id"
    runs = "LEFT JOIN span_episodes e ON e.span = t.rowid" if again else ""
    mine, owned, whole = "true", "", ""
    if not alone:
        mine = f"coalesce(o.owner = '{name}', false)"
        owned = "LEFT JOIN span_owners o ON t.scope_name IS NOT DISTINCT FROM o.scope_name AND t.name = o.name"
    if not survey.alone(name):
        whole = f"""AND t.trace_id IN (SELECT trace_id FROM spans JOIN span_owners o
              ON spans.scope_name IS NOT DISTINCT FROM o.scope_name AND spans.name = o.name
              WHERE o.owner = '{name}')"""
    return store.sql(
        f"""SELECT t.source, {trace} AS trace_id, t.span_id, t.parent_span_id, t.start_ns, t.end_ns, t.name, t.kind,
                   t.status_code, t.status_message, t.scope_name, t.resource, r.service_name, w.worker,
                   t.resolution_ns, t.events, t.links, {mine} AS mine {asked}
            FROM spans t {runs}
            LEFT JOIN resources r USING (resource)
            LEFT JOIN resource_workers w USING (resource)
            {owned}
            WHERE {part} {whole}"""
    ).with_columns(**_absent(claims, held))


def _attributes(batches: Sequence[pa.Table], name: str, survey: _Survey) -> pl.DataFrame | None:
    """The same of spans that are kept aside and are all of this collector, but for what their resources say.

    None where that needs SQL.
    """
    if not batches:
        return None
    columns = [c for c in SPAN_COLUMNS if c not in {"service_name", "worker", "mine"}]
    asked = {
        _column(key): (key, kind, spans.pairs(kind, survey.held[key]))
        for key, kind in registry.claims()[name].attributes.items()
        if key in survey.held
    }
    return _span_batches.frame(batches, columns, asked)


def _with_resources(store: Store, name: str, survey: _Survey, found: pl.DataFrame) -> pl.DataFrame:
    claims = registry.claims()[name]
    known = store.sql(
        f"""SELECT r.resource, {", ".join(("r.service_name", "w.worker", *_of_resources(claims)))}
            FROM resources r LEFT JOIN resource_workers w USING (resource)"""
    )
    of_resource = (
        pl.col("resource")
        .replace_strict(known["resource"], column, default=None, return_dtype=pl.String)
        .alias(column.name)
        for column in known.iter_columns()
        if column.name != "resource"
    )
    mine = pl.lit(value=True).alias("mine")
    return found.with_columns(mine, *of_resource, **_absent(claims, survey.held))


def _absent(claims: model.Claims, held: Mapping[str, object]) -> dict[str, pl.Expr]:
    """The attributes that a collector asks for and no span has."""
    return {
        _column(key): pl.lit(None, dtype=_POLARS[kind])
        for key, kind in claims.attributes.items()
        if key not in held
    }


def _of_resources(claims: model.Claims) -> list[str]:
    """SQL for the attributes of resources `r` that a collector asks for."""
    return [
        f'r.{spans.resource_attribute_sql(key)} AS "resource.{key}"'
        for key in claims.resource_attributes
    ]
