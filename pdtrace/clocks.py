"""Puts instants on one clock: perf counters by matched requests, hosts by their messages."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from pdtrace import _clock_messages as messages
from pdtrace._clock_tree import Link, span
from pdtrace._clock_windows import LEAST_PAIRS, Offsets, offsets
from pdtrace.model import OBSERVERS
from pdtrace.store import Store

LOW_QUANTILE = 0.05  # of (arrival - client's start): the request that was least delayed
CLEAR_NS = 200_000  # a bound this far from zero is skew, nearer may be rounding
TIGHT = (
    10  # late ends beside late starts look like an offset: so much closer both must agree to be one
)
LATE_NS = 2_000_000  # so long after its answer a server may stamp its end
_SCHEMA = {
    "deployment": pl.String, "domain": pl.String, "reference": pl.String, "offset_ns": pl.Int64,
    "half_width_ns": pl.Int64, "lower_ns": pl.Int64, "upper_ns": pl.Int64, "drift_ppm": pl.Float64, "pairs": pl.Int64,
    "residual_p50_ns": pl.Int64, "residual_p95_ns": pl.Int64, "windows": pl.Int64,
    "infeasible_windows": pl.Int64, "method": pl.String,
}  # fmt: skip
SHIFTED = "hop bounds; instants of this worker shifted by the midpoint, minute by minute"


# Legs by the worker that stamped their instants. One record has one clock, that of its writer: where
# it tells of several observers (a frontend's request trace), the outermost of them wrote it.
_STAMPED = f"""
WITH written AS (
  SELECT source, record,
    arg_min({{'worker': worker}}, list_position({list(OBSERVERS)}, observer)) AS writer
  FROM legs
  WHERE record IS NOT NULL
  GROUP BY source, record
  HAVING count(DISTINCT observer) > 1
)
SELECT leg, start_ns
FROM legs
LEFT JOIN written USING (source, record)
WHERE CASE WHEN writer IS NULL THEN worker ELSE writer.worker END = $w
"""


def align(store: Store) -> None:
    """Fill clocks; give instants to legs on other clocks; shift workers that are clearly off."""
    known = store.short("FROM clocks")
    before = known.filter(pl.col("method") == SHIFTED)
    has = _to_align(store)
    found = _hosts(store, has) if has.hops or has.halves or has.clients or has.rooms else []
    found += _domains(store) if has.domains else []
    if not found and known.is_empty():
        return
    rows = pl.DataFrame(found, schema=_SCHEMA)
    # What an earlier run has shifted shows no skew any more: its row stays.
    rows = rows.join(before, on=["domain", "reference"], how="anti")
    store.replace("clocks", pl.concat([rows, before.select(rows.columns)]))


class _ToAlign(NamedTuple):
    """What legs there are to align by: scans that end here spare joins that find nothing."""

    hops: bool  # from worker to worker, on record
    halves: bool  # engines below another observer's record
    clients: bool  # on the wall clock, beside a server
    domains: bool  # instants on other clocks
    rooms: bool  # P and D of a request that meet in a room
    layers: bool  # several observers above the engines


def _to_align(store: Store) -> _ToAlign:
    hops, outside, rooms, layers, domains = store.rows(
        """SELECT bool_or(container), bool_or(observer <> 'engine'), bool_or(bootstrap_room IS NOT NULL),
                  count(DISTINCT observer) FILTER (observer NOT IN ('client', 'engine') AND container IS NOT TRUE) > 1,
                  bool_or(clock <> 'wall' AND clock_start_ns IS NOT NULL AND request IS NOT NULL) FROM legs"""
    )[0]
    if not outside:
        return _ToAlign(
            bool(hops), halves=False, clients=False, domains=bool(domains), rooms=bool(rooms), layers=False,
        )  # fmt: skip
    halves, clients = store.rows(
        """WITH placed AS (
             SELECT observer, output_tokens, role, worker FROM legs
             WHERE start_ns IS NOT NULL AND request IS NOT NULL AND coalesce(clock, 'wall') = 'wall')
           SELECT bool_or(observer NOT IN ('client', 'engine')) OR bool_or(observer = 'engine' AND (
                    output_tokens = 1 OR role = 'prefill' OR worker IN (SELECT worker FROM workers WHERE role = 'prefill'))),
                  bool_or(observer = 'client') AND bool_or(observer <> 'client') FROM placed"""
    )[0]
    return _ToAlign(*map(bool, (hops, halves, clients, domains, rooms, layers)))


def _domains(store: Store) -> list[dict[str, object]]:
    """Domains without epoch: offset = low quantile of (arrival at the server - start there).

    Arrivals in log lines of whole seconds would pull it down by up to a second: they count only
    where few others are there.
    """
    pairs = store.sql(
        """WITH mine AS (
             SELECT leg, clock, deployment, request, clock_start_ns FROM legs
             WHERE clock IS NOT NULL AND clock <> 'wall' AND clock_start_ns IS NOT NULL
               AND request IS NOT NULL
           ), servers AS (
             SELECT request, bool_or(coalesce(resolution_ns, 1) <= 1000000) AS fine,
               max(resolution_ns) AS resolution_ns,
               coalesce(min(start_ns) FILTER (coalesce(resolution_ns, 1) <= 1000000),
                                      min(start_ns)) AS arrival FROM legs
             WHERE container IS NOT TRUE AND observer <> 'client' AND start_ns IS NOT NULL
               AND coalesce(clock, 'wall') = 'wall' AND request IN (SELECT request FROM mine)
             GROUP BY request)
           SELECT clock, deployment, arrival - clock_start_ns AS offset_ns,
             CASE WHEN fine THEN 0 ELSE resolution_ns END AS coarse_ns
           FROM mine JOIN servers USING (request)
           QUALIFY fine OR count(*) FILTER (fine) OVER (PARTITION BY clock, deployment) < $least
           ORDER BY ALL""",
        least=LEAST_PAIRS,
    )
    if pairs.height == 0:
        return []
    rows = [
        domain_offset(
            str(key[0]),
            None if key[1] is None else str(key[1]),
            part["offset_ns"].to_numpy(),
            coarse=int(part["coarse_ns"].max() or 0),  # type: ignore[arg-type]
        )
        for key, part in pairs.group_by(["clock", "deployment"], maintain_order=True)
    ]
    offsets = (
        pl.DataFrame(rows, schema=_SCHEMA).sort("domain", "pairs").unique("domain", keep="last")
    )
    store.connection.register("_offsets", offsets.to_arrow())
    store.execute(
        """UPDATE legs SET start_ns = clock_start_ns - o.offset_ns,
             first_token_ns = clock_start_ns - o.offset_ns + TRY_CAST(round(ttft_ms * 1e6) AS BIGINT),
             end_ns = clock_start_ns - o.offset_ns + TRY_CAST(round(e2e_ms * 1e6) AS BIGINT),
             resolution_ns = greatest(coalesce(resolution_ns, 1), o.half_width_ns)
           FROM _offsets o WHERE legs.clock = o.domain AND legs.clock_start_ns IS NOT NULL"""
    )
    store.execute(
        """UPDATE streams SET first_ns = l.first_token_ns FROM legs l
           WHERE streams.leg = l.leg AND streams.clock IN (SELECT domain FROM _offsets)
             AND l.first_token_ns IS NOT NULL"""
    )
    store.connection.unregister("_offsets")
    return rows


def domain_offset(
    domain: str, deployment: str | None, offsets: npt.NDArray[np.int64], coarse: int = 0
) -> dict[str, object]:
    """One row of clocks: the offset and how far the matched requests scatter above it.

    Arrivals cut to whole seconds (`coarse`) are early by up to that: the earliest of them bounds the offset
    from above, the latest from below, save for a few that were late.
    """
    base = int(np.quantile(offsets, LOW_QUANTILE, method="lower"))
    method = "matched requests: 5 % quantile of arrival minus start in the domain"
    low, high = int(np.quantile(offsets, 1 - LOW_QUANTILE)), int(offsets.min()) + coarse
    bounded = coarse > 0 and low <= high
    if bounded:
        base = (low + high) // 2
        method = (
            f"matched requests: arrivals in steps of {coarse / 1e9:g} s minus start in the domain"
        )
    residual = offsets - base
    p50, p95 = (int(np.quantile(residual, q)) for q in (0.5, 0.95))
    half = max(p50, -int(residual.min()))
    if coarse:
        # Arrivals lie up to one step below, however late they are. The earliest of n is short of a whole step by
        # at most 3 / n of it (95 %), more where some are late.
        short = max(0, int(offsets.max()) - high) + 3 * coarse // offsets.size
        half = (high - low) // 2 + 1 + short if bounded else max(half, high - base)
    return {
        "deployment": deployment,
        "domain": domain,
        "reference": "wall",
        "offset_ns": -base,
        "half_width_ns": half,
        "lower_ns": -base - half,
        "upper_ns": -base + half,
        "pairs": int(offsets.size),
        "residual_p50_ns": p50,
        "residual_p95_ns": p95,
        "method": method,
    }


def _hosts(store: Store, has: _ToAlign) -> list[dict[str, object]]:
    """Bounds on the clock offset between workers that exchange requests, and between them and clients."""
    none = pl.DataFrame()
    hops = messages.recorded(store) if has.hops else none
    paired = hops.height < LEAST_PAIRS
    if paired:
        hops = messages.halves(store) if has.halves else none
    links = _between(hops, wide=paired)
    if has.layers:
        links += _between(messages.layers(store), wide=True)
    if has.clients:
        links += _between(messages.clients(store), wide=True)
    rooms = _between(messages.rooms(store), wide=True) if has.rooms else []
    way = span([one for one in links + rooms if one.row["offset_ns"] is not None])
    by_room = {frozenset((one.domain, one.reference)) for one in rooms}
    told = [one for one in links if one.told]
    told += [one for one in way if one.told and frozenset((one.domain, one.reference)) in by_room]
    moving = [one for one in way if one.windows is not None]
    if moving:
        _shift(store, way)
        known = store.sql("FROM clock_windows")
        store.replace(
            "clock_windows",
            pl.concat([known, *(w for one in told if (w := one.windows) is not None)]),
        )
    return [one.row for one in told]


def _between(hops: pl.DataFrame, *, wide: bool) -> list[Link]:
    """What messages tell of pairs of clocks; `wide` ones tell of an offset only where they lie clear of none."""
    links: list[Link] = []
    if hops.height < LEAST_PAIRS:
        return links
    for key, part in hops.group_by(["deployment", "a", "b"], maintain_order=True):
        if part.height < LEAST_PAIRS:
            continue
        deployment, a, b = (None if k is None else str(k) for k in key)
        bounds, moving = hop_bounds(part)
        alone = "ends_alone" in part.columns and bool(part["ends_alone"].any())
        told = not wide or _clear(moving, TIGHT if alone else 1)
        name: dict[str, object] = {"deployment": deployment, "domain": b, "reference": a}
        windows = _windows(name, moving) if told and moving is not None else None
        row = {**name, **bounds, "pairs": part.height}
        half = bounds["half_width_ns"]
        links.append(
            Link(
                str(b),
                str(a),
                half if isinstance(half, int) else 0,
                part.height,
                row,
                windows,
                told,
            )
        )
    return links


def _clear(found: Offsets | None, times: int) -> bool:
    """Whether an offset lies farther from none than its bounds lie from each other, or so many times as far."""
    if found is None:
        return False
    near = np.maximum(found.low, -found.high)
    return bool((near > times * (found.high - found.low))[found.feasible].all())


def hop_bounds(hops: pl.DataFrame) -> tuple[dict[str, object], Offsets | None]:
    """Row of clocks for the server's clock against the client's, and the offset stretch by stretch.

    From hops (sent, received, answered, back). Ends that come before the server's own (clients that
    stop at the response headers) make the bounds cross everywhere; then only the upper bound is
    known and nothing is shifted, unless they cross by little beside a large offset. Bounds that cross
    in some stretches mark these.
    """
    closed = hops.filter(pl.col("back").is_not_null() & pl.col("answered").is_not_null())
    sent, received = (hops[n].to_numpy().astype(np.int64) for n in ("sent", "received"))
    answered, back = (closed[n].to_numpy().astype(np.int64) for n in ("answered", "back"))
    found = offsets(sent, received, answered, back)
    coarse = int(hops["resolution"].max() or 1) if "resolution" in hops.columns else 1  # type: ignore[arg-type]
    margin = max(CLEAR_NS, 2 * coarse)
    # Servers that stamp their end a little after their answer has gone make the bounds cross by that
    # little. Beside a large offset the starts tell enough: their bound holds, and the offset lies
    # below it by no more than the ends are late.
    late = float((found.low - found.high).max()) if closed.height else np.inf
    if 0 < late <= LATE_NS and float(np.abs(found.offsets).min()) > 5 * late + margin:
        found = replace(found, low=found.low - 2 * late - CLEAR_NS)
    good = found.feasible
    counts: dict[str, object] = {
        "windows": len(good), "infeasible_windows": int((~good).sum()) if closed.height else None,
    }  # fmt: skip
    if 2 * good.sum() < len(good):
        # without the drift: ends that are no ends say nothing of it
        high = int((received - sent).min())
        method = "hop starts only: upper bound, nothing shifted"
        if closed.height:
            method = (
                "hop bounds cross (hops end before their server): upper bound only, nothing shifted"
            )
        one_way = {"offset_ns": None, "half_width_ns": None, "lower_ns": None, "upper_ns": high}
        return {**one_way, "method": method, **counts}, None
    clear = bool(((found.low > margin) | (found.high < -margin))[good].any())
    method = SHIFTED if clear else "hop bounds; compatible with no offset, nothing shifted"
    middle = int(np.median(found.offsets))
    half = int(((found.high - found.low)[good] / 2).max()) + 1
    row = {
        "offset_ns": middle,
        "half_width_ns": half,
        "lower_ns": middle - half,
        "upper_ns": middle + half,
        "drift_ppm": found.drift * 1e6 if found.drift else None,
        "method": method,
    }
    return {**row, **counts}, found if clear else None


def _windows(row: dict[str, object], found: Offsets) -> pl.DataFrame:
    """Rows of clock_windows: the offset of each stretch; half width NULL where bounds cross."""
    good = found.feasible
    half = np.where(good, (found.high - found.low) / 2 + 1, np.nan)
    starts = (found.edges + found.origin).astype(np.int64)
    return pl.DataFrame(
        {
            "deployment": [row["deployment"]] * len(good),
            "domain": [row["domain"]] * len(good),
            "reference": [row["reference"]] * len(good),
            "start_ns": starts,
            "middle_ns": (found.middles + found.origin).astype(np.int64),
            "offset_ns": np.round(found.offsets).astype(np.int64),
            "half_width_ns": pl.Series(half).fill_nan(None).round().cast(pl.Int64),
            "drift_ppm": np.full(len(good), found.drift * 1e6),
            "feasible": good,
        },
        schema_overrides={"deployment": pl.String},
    )


def _shift(store: Store, way: list[Link]) -> None:
    """Move what the skewed workers stamped onto the clock of the outermost worker before them.

    Link after link of the chain router -> engine, the innermost first: each takes off the offset of
    the stretch and the drift inside it.
    """
    before = {one.domain: one for one in way}
    for worker in sorted(before):
        link: Link | None = before[worker]
        while link is not None:
            if link.windows is not None:
                _move(store, worker, link.windows)
            link = before.get(link.reference)


def _move(store: Store, worker: str, link: pl.DataFrame) -> None:
    """Take one link's offset off everything that a worker stamped."""
    spans = link.sort("start_ns").select(
        "offset_ns", "middle_ns", drift=pl.col("drift_ppm") / 1e6,
        # the first stretch reaches back, the last one on
        low=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(-(2**62))).otherwise("start_ns"),
        high=pl.col("start_ns").shift(-1).fill_null(2**62),
    )  # fmt: skip
    store.connection.register("_spans", spans.to_arrow())
    mine = store.sql(_STAMPED, w=worker)
    store.connection.register("_mine", mine.to_arrow())
    store.execute(
        """CREATE OR REPLACE TEMP TABLE _moved AS SELECT m.leg, s.* FROM _mine m
           JOIN _spans s ON coalesce(m.start_ns, s.middle_ns) >= s.low
             AND coalesce(m.start_ns, s.middle_ns) < s.high
           QUALIFY row_number() OVER (PARTITION BY m.leg ORDER BY s.low) = 1"""
    )
    by_leg = "_moved s WHERE {0}.leg = s.leg"
    name = worker.replace("'", "''").replace("{", "{{").replace("}", "}}")
    by_time = "_spans s WHERE {0}.worker = '" + name + "' AND {1} >= s.low AND {1} < s.high"
    for table, which, at, columns in (
        ("intervals", by_leg, "", ("start_ns",)),
        ("intervals", "_moved s WHERE coalesce({0}.end_leg, {0}.leg) = s.leg", "", ("end_ns",)),
        ("streams", by_leg, "", ("first_ns",)),
        ("legs", by_leg, "", ("start_ns", "first_token_ns", "last_token_ns", "end_ns")),
        ("transfers", by_leg, "", ("start_ns", "end_ns")),
        ("decisions", by_leg, "", ("time_ns",)),
        ("steps", by_time, "coalesce(steps.start_ns, steps.start_lower_ns)",
         ("start_ns", "start_lower_ns", "start_upper_ns")),
        ("samples", by_time, "samples.time_ns", ("time_ns",)),
        ("events", by_time, "events.time_ns", ("time_ns",)),
    ):  # fmt: skip
        moves = ", ".join(
            f"{c} = {table}.{c} - s.offset_ns - round(s.drift * ({table}.{c} - s.middle_ns))::BIGINT"
            for c in columns
        )
        store.execute(f"UPDATE {table} SET {moves} FROM {which.format(table, at)}")
    store.execute("DROP TABLE _moved")
    for view in ("_spans", "_mine"):
        store.connection.unregister(view)
