"""Names that must mean the same worker once deployments are known: a log and its service, metrics and their server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field

import polars as pl

from pdtrace._worker_names import plain, rename
from pdtrace.model import ALIAS_KINDS
from pdtrace.records import dataclass
from pdtrace.store import Store
from pdtrace.workers import merged_rows

_FRONT = ("frontend", "router", "gateway")
_LOCAL = {"file", "address", "process"}  # kinds of names that a scrape or a file gives to a process
_SECOND_NS = 1_000_000_000
_MOST = 0.9  # share of its requests that the other saw too


@dataclass
class _Known:
    """What is known of one worker of a deployment."""

    worker: str
    deployment: str
    role: str | None
    engine: str | None
    start_ns: int | None
    end_ns: int | None
    logged: bool = False  # a log of its own tells of it
    observers: set[str] = field(default_factory=set)  # as whom its legs saw requests
    stepped: bool = False
    aliases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    started: set[float] = field(default_factory=set)  # process start as its metrics state it

    @property
    def seen(self) -> bool:
        """Whether it did work on record: requests or steps."""
        return bool(self.observers) or self.stepped


def unite(store: Store) -> dict[str, str]:
    """Make one worker of names of a deployment that leave no other choice; returns old name -> new name.

    A log file that names its service is the service, where no other file does. Metrics of a frontend are the
    only frontend's that was seen; metrics files without a name are the only engine process of that software, those
    of one side of a P/D pair the only worker of that side.
    """
    places: dict[str, list[_Known]] = defaultdict(list)
    for known in _known(store).values():
        places[known.deployment].append(known)
    names: dict[str, str] = {}
    for members in places.values():
        if len(members) > 1:
            names |= (
                _named(_services(members))
                | _named(_fronts(members))
                | _named(_sides(members))
                | _named(_metrics(members))
            )
    names |= _tables(store, places, {*names, *names.values()})
    names = {old: _last(names, old) for old in names}
    if names:
        _rewrite(store, names)
    return names


def _known(store: Store) -> dict[str, _Known]:
    """The workers of deployments; none where all are alone in theirs."""
    rows = store.rows(
        "SELECT worker, deployment, role, engine, start_ns, end_ns FROM workers WHERE deployment IS NOT NULL ORDER BY worker"
    )
    found = {row[0]: _Known(*row) for row in rows}
    apart = len({known.deployment for known in found.values()}) == len(found)
    if apart and not any(worker.startswith("file:") for worker in found):
        return {}  # nobody has another name to be one with
    for worker, observer in store.rows(
        "SELECT DISTINCT worker, observer FROM legs WHERE container IS NOT TRUE AND worker IS NOT NULL"
    ):
        if worker in found:
            found[worker].observers.add(observer)
    for (worker,) in store.rows(
        """SELECT DISTINCT worker FROM (SELECT worker, source FROM samples UNION ALL SELECT worker, source FROM events)
           JOIN sources USING (source) WHERE record_unit = 'line'"""
    ):
        if worker in found:
            found[worker].logged = True
    for (worker,) in store.rows("SELECT DISTINCT worker FROM steps"):
        if worker in found:
            found[worker].stepped = True
    for worker, kind, value in store.rows(
        "SELECT DISTINCT worker, kind, value FROM worker_aliases"
    ):
        if worker in found:
            found[worker].aliases[kind].add(value)
    for worker, value in store.rows(
        "SELECT DISTINCT worker, TRY_CAST(value AS DOUBLE) FROM facts WHERE key = 'process_start_time_s'"
    ):
        if worker in found and value is not None:
            found[worker].started.add(value)
    return found


def _services(members: list[_Known]) -> list[tuple[_Known, _Known]]:
    """A split service name and the only file that says it belongs to that service."""
    pairs = []
    for service in members:
        if not service.worker.startswith("service:"):
            continue
        name = plain(service.worker).partition(":")[2]
        others = [m for m in members if m is not service and name in m.aliases["service"]]
        if len(others) == 1 and not others[0].worker.startswith("service:"):
            pairs.append((service, others[0]))
    return pairs


def _fronts(members: list[_Known]) -> list[tuple[_Known, _Known]]:
    """The only silent frontend (its metrics) and the only one that saw requests."""
    pairs = []
    for role in _FRONT:
        silent = [m for m in members if m.role == role and not m.seen]
        active = [m for m in members if role in m.observers and m.seen]
        if len(silent) == len(active) == 1 and _may_be_one(silent[0], active[0]):
            pairs.append((silent[0], active[0]))
    return pairs


def _sides(members: list[_Known]) -> list[tuple[_Known, _Known]]:
    """Metrics whose counters tell prefill from decode, and the only worker of that side."""
    pairs = []
    for side in ("prefill", "decode"):
        of_side = [m for m in members if m.role == side]
        silent = [m for m in of_side if not m.seen and set(m.aliases) <= _LOCAL]
        active = [m for m in of_side if m.seen]
        if len(silent) == len(active) == 1 and _may_be_one(silent[0], active[0]):
            pairs.append((silent[0], active[0]))
    return pairs


def _metrics(members: list[_Known]) -> list[tuple[_Known, _Known]]:
    """Metrics files of one process, where only one process of that software can be meant."""
    pairs = []
    for engine in sorted({m.engine for m in members if m.engine}):
        nameless = [
            m for m in members
            if m.engine == engine and not m.seen and m.role is None and set(m.aliases) <= _LOCAL
        ]  # fmt: skip
        others = [
            m
            for m in members
            if m.engine == engine and m not in nameless and "client" not in m.observers
        ]
        starts = {value for m in nameless for value in m.started}
        nameless = [m for m in nameless if not any(_logged_at_once(m, other) for other in others)]
        if not nameless or len(others) != 1 or len(starts | others[0].started) > 1:
            continue
        end = others[0].end_ns
        if end is None or all(start * _SECOND_NS <= end + _SECOND_NS for start in starts):
            pairs += [(m, others[0]) for m in nameless]
    return pairs


def _logged_at_once(a: _Known, b: _Known) -> bool:
    """Whether two logs, or two containers' lines in one, go on at the same time: then they are two processes."""
    if not (a.logged and b.logged) or None in (a.start_ns, a.end_ns, b.start_ns, b.end_ns):
        return False
    return a.start_ns < b.end_ns and b.start_ns < a.end_ns  # type: ignore[operator]


def _tables(store: Store, places: Mapping[str, list[_Known]], united: set[str]) -> dict[str, str]:
    """A table of requests that a component wrote is that component, where one saw the same requests as the same.

    A table names no software; what it saw as a router, the only router of its requests saw. So is the log of a
    component in front of the engines, beside the spans of one of the same software.
    """
    members = {m.worker: m for place in places.values() for m in place}
    able = [
        m.worker for m in members.values()
        if m.worker.startswith("file:") and m.worker not in united
        and (m.engine is None or m.role in _FRONT) and m.observers and "client" not in m.observers
    ]  # fmt: skip
    names = {}
    for table in able:
        rows = store.rows(
            """WITH mine AS (SELECT DISTINCT request, observer FROM legs
                             WHERE worker = ? AND request IS NOT NULL AND container IS NOT TRUE)
               SELECT l.worker, count(DISTINCT l.request), (SELECT count(DISTINCT request) FROM mine)
               FROM legs l JOIN mine USING (request, observer)
               WHERE l.worker <> ? AND l.container IS NOT TRUE GROUP BY l.worker""",
            [table, table],
        )
        if len(rows) != 1 or rows[0][1] < _MOST * rows[0][2] or rows[0][0] in able:
            continue
        other, software = members.get(rows[0][0]), members[table].engine
        if software is None or (other is not None and other.engine == software):
            names[table] = rows[0][0]
    return names


def _may_be_one(a: _Known, b: _Known) -> bool:
    """Whether no name of one kind, nor the software, tells them apart."""
    if a.engine and b.engine and a.engine != b.engine:
        return False
    strong = ("instance", "engine_id", "worker_id", "pod")
    return not any(
        a.aliases[k] and b.aliases[k] and not a.aliases[k] & b.aliases[k] for k in strong
    )


def _named(pairs: list[tuple[_Known, _Known]]) -> dict[str, str]:
    """Old name -> the stronger of the two names; where equally strong, that of the one that saw requests."""
    order = {kind: n for n, kind in enumerate(ALIAS_KINDS)}
    names = {}
    for a, b in pairs:
        best = min((b, a), key=lambda m: order.get(m.worker.partition(":")[0], len(order)))
        if (
            not best.seen
        ):  # a silent name says less to people than the one that stands at the requests
            best = b if b.seen else a
        other = a if best is b else b
        names[other.worker] = best.worker
    return names


def _last(names: Mapping[str, str], worker: str) -> str:
    seen = {worker}
    while worker in names and names[worker] not in seen:
        worker = names[worker]
        seen.add(worker)
    return worker


def _rewrite(store: Store, names: Mapping[str, str]) -> None:
    """Write the new names everywhere and make one row of each worker."""

    rows = store.short("SELECT * FROM workers")
    mapping = {worker: names.get(worker, worker) for worker in rows["worker"].drop_nulls()}
    nameless = rows.filter(pl.col("worker").is_null())
    store.replace("workers", pl.concat([merged_rows(rows, mapping).select(rows.columns), nameless]))
    rename(store, names)
