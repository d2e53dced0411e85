"""A run as a timeline for Perfetto: workers, requests, engine steps, KV movements, counters, in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import IO, Any

import orjson
import polars as pl

from pdtrace import __version__, numbers
from pdtrace import _perfetto_sql as sql
from pdtrace.diagnosis import iso
from pdtrace.errors import PdtraceError
from pdtrace.explain import find
from pdtrace.methods.lanes import lanes
from pdtrace.model import ROLES
from pdtrace.options import duration_ms, parse_instant
from pdtrace.outputs import writing
from pdtrace.phrases import worker_names
from pdtrace.records import dataclass
from pdtrace.store import Store

LIMIT = 20_000  # requests; some 300,000 events, which a browser still scrolls
BATCH = 20_000  # lines at a time
MARGIN = 0.05  # of the window of a named request, before and after it
_SECOND = 1_000_000_000
_PER_TRACK = 1_000_000  # thread numbers of a process: its number times this, and on
_SECTIONS = {
    "requests": sql.REQUEST_SLICES, "phases": sql.REQUEST_PHASES, "first tokens": sql.FIRST_TOKENS,
    "phases on workers": sql.WORKER_PHASES, "engine steps": sql.STEP_SLICES, "KV movements": sql.MOVE_SLICES,
    "counter values": sql.COUNTERS, "events": sql.EVENTS, "routing decisions": sql.DECISIONS, "parts of flows": sql.FLOWS,
    "token deliveries": sql.TOKENS,
}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Which part of a run: what touches a stretch of time, or what ran while these requests did."""

    start: str | None = None  # instant, or +30s after the first request
    end: str | None = None
    requests: tuple[str, ...] = ()
    limit: int = LIMIT  # requests; 0 all


@dataclass
class Timeline:
    """What was drawn and what was not."""

    base_ns: int = 0
    from_ns: int | None = None
    to_ns: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The same in words."""
        drawn = ", ".join(f"{name} {n:,}" for name, n in self.counts.items() if n)
        return [
            f"drawn: {drawn or 'nothing'}",
            f"time 0 is {iso(self.base_ns)}; all clocks as pdtrace aligned them (table clocks)",
            *(f"left out: {text}" for text in self.left_out),
        ]


def export(
    store: Store, output: str, selection: Selection | None = None, *, force: bool = False
) -> Timeline:
    """Write the timeline into a new file (.gz: gzipped); says what it holds and what was left out.

    Raises PdtraceError when there is nothing to draw, or when the file exists.
    """
    wanted = selection or Selection()
    plan = _plan(store, wanted)
    tracks = _tracks(store, plan)
    with writing(output, force=force) as stream:
        stream.write(_head(plan))
        for row in tracks:
            stream.write(orjson.dumps(row) + b",\n")
        for name, query in _SECTIONS.items():
            plan.counts[name] = _stream(store, query, plan, stream)
        stream.write(orjson.dumps(_about(plan)) + b"\n]}\n")
    return plan


def _plan(store: Store, wanted: Selection) -> Timeline:
    """Choose the requests and the stretch of time; they become temporary tables."""
    plan = Timeline()
    named = [find(store, request) for request in wanted.requests]
    store.temporary("_named", pl.DataFrame({"request": named}, schema={"request": pl.String}))
    plan.from_ns, plan.to_ns = _window(store, wanted)
    limit = wanted.limit or 2**62
    given = {"from": plan.from_ns, "to": plan.to_ns}
    drawn = store.sql(sql.CHOSEN, **given, limit=limit + 1 if wanted.limit else limit)
    if drawn.height > limit:  # the stretch ends where the first one is left out
        plan.to_ns = max(int(drawn["start_ns"][limit]), int(drawn["start_ns"][0]) + 1)
        drawn = drawn.head(limit)
        plan.left_out.append(
            f"everything from {iso(plan.to_ns)} on: {limit:,} requests are drawn at most (--limit; --from and --to choose another stretch)"
        )
    store.temporary("_drawn", drawn)
    _count_left(store, plan, drawn.height)
    return plan


def _window(store: Store, wanted: Selection) -> tuple[int | None, int | None]:
    """The stretch of time asked for; around the requests that were named."""
    origin = store.scalar("SELECT min(start_ns) FROM requests")
    start, end = (_moment(text, origin) for text in (wanted.start, wanted.end))
    if wanted.requests:
        low, high = store.rows(
            "SELECT min(start_ns), max(end_ns) FROM requests WHERE request IN (FROM _named)"
        )[0]
        if low is not None and high is not None:
            margin = int(MARGIN * (high - low)) + 1
            start = low - margin if start is None else start
            end = high + margin if end is None else end
    if start is not None and end is not None and start >= end:
        raise PdtraceError("--from is not before --to", "exchange them; the end is exclusive")
    return start, end


def _moment(text: str | None, origin: int | None) -> int | None:
    if text is None:
        return None
    if text.startswith("+"):
        return (origin or 0) + round(duration_ms(text[1:]) * 1e6)
    return parse_instant(text)


def _count_left(store: Store, plan: Timeline, drawn: int) -> None:
    total, without, backwards = store.rows(sql.REFUSED)[0]
    outside = total - without - backwards - drawn
    steps = store.scalar(
        "SELECT count(*) FROM steps WHERE start_ns IS NULL OR elapsed_ns IS NULL OR worker IS NULL"
    )
    moves = store.scalar(
        "SELECT count(*) FROM transfers WHERE start_ns IS NULL OR end_ns IS NULL OR end_ns < start_ns"
    )
    for n, text in (
        (outside, "requests outside of the stretch drawn"),
        (without, "requests without start or end"),
        (backwards, "requests that end before they start"),
        (steps, "engine steps whose start is not known well enough for a line (what they count is drawn)"),
        (moves, "KV movements without start and end"),
    ):  # fmt: skip
        if n:
            plan.left_out.append(f"{text}: {n:,}")


def _tracks(store: Store, plan: Timeline) -> list[dict[str, Any]]:
    """Lay everything out on lanes, as temporary tables; the names of processes and threads."""
    given = {"from": plan.from_ns, "to": plan.to_ns}
    requests = store.sql("FROM _drawn").with_columns(key=_key("requests", "deployment"))
    visits = store.sql(sql.VISITS).with_columns(key=pl.col("worker"))
    steps = store.sql(sql.STEPS, **given).with_columns(key=pl.col("worker"))
    store.temporary("_move", store.sql(sql.MOVES, **given))
    moves = store.sql("FROM _move").with_columns(key=_key("moves", "deployment"))
    groups = _groups(store)
    plan.base_ns = _base(store, plan, requests, steps, moves)
    early = store.sql(sql.BEFORE, **{"base": plan.base_ns, "from": plan.from_ns}).item()
    if early:
        plan.left_out.append(
            f"events and routing decisions before the first thing drawn, or without instant or worker: {early:,}"
        )
    rows: list[dict[str, Any]] = []
    for kind, frame, name, lane_key in (
        ("request", requests, "requests", "key"), ("visit", visits, "requests", "key"),
        ("step", steps, "engine steps", "rank"), ("move", moves, "KV", "link"),
    ):  # fmt: skip
        if kind == "move":
            frame = frame.with_columns(link=pl.format("{} → {}", *(_end(c, groups) for c in ("source_worker", "destination_worker"))))  # fmt: skip
        laid = _laid(frame, lane_key, groups, kind)
        store.temporary(
            f"_{kind}_lane", laid.drop("source", "record", "key", "lane", "part", strict=False)
        )
        rows += _thread_names(laid, name, kind)
    used = {row["pid"] for row in rows}
    store.temporary("_track", groups.select("key", "pid"))
    for statement in sql.MACROS:
        store.connection.execute(statement)
    counted = store.rows(
        "SELECT DISTINCT pid FROM _track JOIN load_points ON key = worker UNION SELECT pid FROM _track JOIN events ON key = worker UNION SELECT pid FROM _track JOIN decisions ON key = router"
    )
    used |= {pid for (pid,) in counted}
    return [*_process_names(groups.filter(pl.col("pid").is_in(sorted(used)))), *rows]


def _key(kind: str, column: str) -> pl.Expr:
    return pl.format(f"{kind}\x1f{{}}", pl.col(column).fill_null(""))


def _end(column: str, groups: pl.DataFrame) -> pl.Expr:
    """The short name of the worker at one end of a link."""
    names = dict(groups.select("key", "short").iter_rows())
    return pl.col(column).replace_strict(names, default=pl.col(column)).fill_null("unknown")


def _groups(store: Store) -> pl.DataFrame:
    """Processes of the timeline: each deployment's requests, its workers by role, its KV movements."""
    workers = store.sql("SELECT worker, deployment, name, role FROM workers ORDER BY worker")
    names = store.rows("SELECT deployment, name FROM deployments ORDER BY start_ns, deployment")
    known = [row[0] for row in names]
    apart = store.rows(
        "SELECT DISTINCT deployment FROM _drawn UNION SELECT DISTINCT deployment FROM _move UNION SELECT DISTINCT deployment FROM workers"
    )
    names += [(d, d) for (d,) in sorted(apart, key=str) if d not in known]
    rows = []
    for deployment, name in names:
        before = f"{name or deployment or 'unknown deployment'} · " if len(names) > 1 else ""
        mine = workers.filter(pl.col("deployment").eq_missing(pl.lit(deployment))).to_dicts()
        short = worker_names(mine)
        rows.append((f"requests\x1f{deployment or ''}", f"{before}requests", ""))
        order = {role: place for place, role in enumerate(ROLES)}
        for row in sorted(
            mine, key=lambda w: (order.get(w["role"], len(order)), short[w["worker"]], w["worker"])
        ):
            role = f" ({row['role']})" if row["role"] and row["role"] not in short[row["worker"]] else ""  # fmt: skip
            rows.append(
                (row["worker"], f"{before}{short[row['worker']]}{role}", short[row["worker"]])
            )
        rows.append((f"moves\x1f{deployment or ''}", f"{before}KV movements", ""))
    return pl.DataFrame(rows, schema=["key", "name", "short"], orient="row").unique("key", keep="first", maintain_order=True).with_row_index("pid", offset=2).with_columns(pl.col("pid").cast(pl.Int64))  # fmt: skip


def _base(store: Store, plan: Timeline, *frames: pl.DataFrame) -> int:
    """Time 0: the full second before the first thing drawn."""
    starts = [int(f["start_ns"].min()) for f in frames if f.height]  # type: ignore[arg-type]
    if not starts:
        first = store.scalar("SELECT min(time_ns) FROM load_points")
        starts = [] if first is None else [max(int(first), plan.from_ns or 0)]
    if not starts:
        raise PdtraceError(
            "nothing to draw: no request with start and end, no engine step, no metric with a time"
            + (" in this stretch" if plan.from_ns is not None or plan.to_ns is not None else ""),
            "`pdtrace coverage PATH` says what the data hold",
        )
    return min(starts) // _SECOND * _SECOND


def _laid(frame: pl.DataFrame, part: str, groups: pl.DataFrame, kind: str) -> pl.DataFrame:
    """Rows with the process and the thread that they stand on."""
    frame = frame.join(groups.select("key", "pid"), on="key", how="inner")
    frame = frame.with_columns(part=pl.col(part).fill_null(""))
    number = frame.select(n=pl.struct("pid", "part").rank("dense")).to_series().cast(pl.Int64)
    lane = lanes(
        number.to_numpy(), frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    )  # fmt: skip
    frame = frame.with_columns(lane=pl.Series(lane, dtype=pl.Int64), part_number=number)
    within = pl.struct("part_number", "lane").rank("dense").over("pid").cast(pl.Int64)
    first = {"step": 10, "visit": 100_000, "request": 100_000, "move": 100_000}[kind]
    return frame.with_columns(tid=pl.col("pid") * _PER_TRACK + first + within)


def _thread_names(laid: pl.DataFrame, name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Names of the threads: one for each lane, of which there are as many as things at a time."""
    found = laid.select("pid", "tid", "part", "lane").unique().sort("tid")
    parts = dict(found.group_by("pid").agg(pl.col("part").n_unique()).iter_rows())
    for pid, tid, part, lane in found.iter_rows():
        text = name
        if kind == "move":
            text = part
        elif kind == "step" and part and parts[pid] > 1:
            text = f"{name} of rank {part}"
        yield from _named(pid, tid, f"{text} {lane + 1}" if kind != "step" or lane else text)


def _named(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}  # fmt: skip


def _process_names(groups: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Names of the processes, and of the threads that hold instants."""
    yield from _process(1, "pdtrace: what this is")
    yield from _named(1, 1, "time zero")
    for pid, name in groups.select("pid", "name").iter_rows():
        yield from _process(pid, name)
        yield from _named(pid, pid * _PER_TRACK, "events")
        yield from _named(pid, pid * _PER_TRACK + 1, "routing decisions")


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}  # fmt: skip


def _stream(store: Store, query: str, plan: Timeline, out: IO[bytes]) -> int:
    """Write the lines of one query, batch by batch as they lie in memory; how many."""
    values = {"base": plan.base_ns, "from": plan.from_ns, "to": plan.to_ns}
    store.prepare(query)
    given = {name: value for name, value in values.items() if f"${name}" in query}
    reader = store.connection.sql(f"SELECT column0 || ',\n' AS line FROM ({query}) AS t(column0)", params=given).to_arrow_reader(BATCH)  # fmt: skip
    n = 0
    for batch in reader:
        n += batch.num_rows
        out.write("".join(batch.column(0).to_pylist()).encode())
    return n


def _head(plan: Timeline) -> bytes:
    about: Mapping[str, Any] = {
        "made_by": f"pdtrace {__version__}", "time_zero": iso(plan.base_ns), "time_zero_ns": str(plan.base_ns),
        "clocks": "all instants on one clock, as pdtrace aligned them", "left_out": plan.left_out,
    }  # fmt: skip
    return b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(about) + b',"traceEvents":[\n'


def _about(plan: Timeline) -> dict[str, Any]:
    """An instant at the beginning that says when it was and what is missing."""
    left: Sequence[str] = plan.left_out or ["nothing"]
    return {
        "ph": "i", "s": "t", "name": f"0 s is {iso(plan.base_ns)}", "ts": 0, "pid": 1, "tid": 1,
        "args": {"left_out": "; ".join(left), "made_by": f"pdtrace {__version__}", "drawn": numbers.plural(plan.counts["requests"], "request")},
    }  # fmt: skip
