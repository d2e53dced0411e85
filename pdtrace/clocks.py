"""Puts instants on one clock: perf counters by matched requests, hosts by their messages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from pdtrace.store import Store

LOW_QUANTILE = 0.05  # of (arrival - client's start): the request that was least delayed
WINDOW_NS = 60 * 10**9
LEAST_PAIRS = 5  # hops between two workers, fewer say nothing of their clocks
CLEAR_NS = 2 * 10**6  # a bound this far from zero is skew, nearer may be rounding
_SCHEMA = {
    "deployment": pl.String, "domain": pl.String, "reference": pl.String, "offset_ns": pl.Int64,
    "half_width_ns": pl.Int64, "drift_ppm": pl.Float64, "pairs": pl.Int64,
    "residual_p50_ns": pl.Int64, "residual_p95_ns": pl.Int64, "method": pl.String,
}  # fmt: skip
SHIFTED = "hop bounds; instants of this worker shifted by the midpoint"


def align(store: Store) -> None:
    """Fill clocks; give instants to legs on other clocks; shift workers that are clearly off."""
    before = store.sql("FROM clocks").filter(pl.col("method") == SHIFTED)
    rows = pl.DataFrame(_hosts(store) + _domains(store), schema=_SCHEMA)
    # What an earlier run has shifted shows no skew any more: its row stays.
    rows = rows.join(before, on=["domain", "reference"], how="anti")
    store.replace("clocks", pl.concat([rows, before.select(rows.columns)]))


def _domains(store: Store) -> list[dict[str, object]]:
    """Domains without epoch: offset = low quantile of (arrival at the server - start there)."""
    pairs = store.sql(
        """WITH mine AS (
             SELECT leg, clock, deployment, request, clock_start_ns FROM legs
             WHERE clock IS NOT NULL AND clock <> 'wall' AND clock_start_ns IS NOT NULL
               AND request IS NOT NULL
           ), servers AS (
             SELECT request, coalesce(min(start_ns) FILTER (coalesce(resolution_ns, 1) <= 1000000),
                                      min(start_ns)) AS arrival FROM legs
             WHERE container IS NOT TRUE AND observer <> 'client' AND start_ns IS NOT NULL
               AND coalesce(clock, 'wall') = 'wall' AND request IN (SELECT request FROM mine)
             GROUP BY request)
           SELECT clock, deployment, arrival - clock_start_ns AS offset_ns
           FROM mine JOIN servers USING (request) ORDER BY ALL"""
    )
    if pairs.height == 0:
        return []
    rows = [
        domain_offset(
            str(key[0]), None if key[1] is None else str(key[1]), part["offset_ns"].to_numpy()
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
    domain: str, deployment: str | None, offsets: npt.NDArray[np.int64]
) -> dict[str, object]:
    """One row of clocks: the offset and how far the matched requests scatter above it."""
    base = int(np.quantile(offsets, LOW_QUANTILE, method="lower"))
    residual = offsets - base
    p50, p95 = (int(np.quantile(residual, q)) for q in (0.5, 0.95))
    return {
        "deployment": deployment,
        "domain": domain,
        "reference": "wall",
        "offset_ns": -base,
        "half_width_ns": max(p50, -int(residual.min())),
        "pairs": int(offsets.size),
        "residual_p50_ns": p50,
        "residual_p95_ns": p95,
        "method": "matched requests: 5 % quantile of arrival minus start in the domain",
    }


def _hosts(store: Store) -> list[dict[str, object]]:
    """Bounds on the clock offset between workers that exchange requests through recorded hops."""
    if not store.sql("SELECT 1 FROM legs WHERE container LIMIT 1").height:
        return []
    hops = store.sql(
        """SELECT p.deployment, p.worker AS a, c.worker AS b, p.start_ns AS sent, p.end_ns AS back,
                  c.start_ns AS received, c.end_ns AS answered
           FROM legs c JOIN legs p ON p.trace_id = c.trace_id AND p.span_id = c.parent_span_id
             AND p.request IS NOT DISTINCT FROM c.request
           LEFT JOIN workers wa ON wa.worker = p.worker LEFT JOIN workers wb ON wb.worker = c.worker
           WHERE p.container AND p.worker <> c.worker
             AND p.start_ns IS NOT NULL AND c.start_ns IS NOT NULL
             AND coalesce(p.clock, 'wall') = 'wall' AND coalesce(c.clock, 'wall') = 'wall'
             AND coalesce(greatest(p.resolution_ns, c.resolution_ns), 1) <= 1000000
             AND coalesce(wa.host <> wb.host, true)
           ORDER BY ALL"""
    )
    if hops.height < LEAST_PAIRS:
        return []
    found: list[dict[str, object]] = []
    for key, part in hops.group_by(["deployment", "a", "b"], maintain_order=True):
        if part.height < LEAST_PAIRS:
            continue
        deployment, a, b = (None if k is None else str(k) for k in key)
        found.append(
            {
                "deployment": deployment,
                "domain": b,
                "reference": a,
                **hop_bounds(part),
                "pairs": part.height,
            }
        )
    _shift(store, [row for row in found if row["method"] == SHIFTED])
    return found


def hop_bounds(hops: pl.DataFrame) -> dict[str, object]:
    """Offset of the server's clock against the client's from hops (sent, received, answered, back).

    theta <= received - sent and theta >= answered - back for every hop, after a linear drift is
    taken out. Ends that come before the server's own (clients that stop at the response headers)
    make the bounds cross; then only the upper bound is known and nothing is shifted.
    """
    sent = hops["sent"].to_numpy().astype(np.int64)
    upper = (hops["received"] - hops["sent"]).to_numpy().astype(np.float64)
    closed = hops.with_row_index("i").filter(
        pl.col("back").is_not_null() & pl.col("answered").is_not_null()
    )
    at = closed["i"].to_numpy()
    lower = (closed["answered"] - closed["back"]).to_numpy().astype(np.float64)
    drift = _drift(sent, upper, at, lower)
    middle = float(sent.mean())
    upper = upper - drift * (sent - middle)
    lower = lower - drift * (sent[at] - middle)
    high = float(upper.min())
    low = float(lower.max()) if lower.size else -np.inf
    if not np.isfinite(low) or low > high:
        method = (
            "hop bounds cross (hops end before their server): upper bound only, nothing shifted"
        )
        if not np.isfinite(low):
            method = "hop starts only: upper bound, nothing shifted"
        return {"offset_ns": int(high), "half_width_ns": None, "method": method}
    offset, half = int((low + high) / 2), int((high - low) / 2) + 1
    clear = low > max(CLEAR_NS, high - low) or high < -CLEAR_NS
    method = SHIFTED if clear else "hop bounds; compatible with no offset, nothing shifted"
    return {
        "offset_ns": offset,
        "half_width_ns": half,
        "drift_ppm": drift * 1e6 if drift else None,
        "method": method,
    }


def _drift(
    sent: npt.NDArray[np.int64],
    upper: npt.NDArray[np.float64],
    at: npt.NDArray[np.uint32],
    lower: npt.NDArray[np.float64],
) -> float:
    """Slope of the midpoints of the bounds over windows of 60 s; 0 with too few windows."""
    window = (sent - sent.min()) // WINDOW_NS
    times, middles = [], []
    for w in np.unique(window):
        ups, lows = upper[window == w], lower[window[at] == w]
        if ups.size >= LEAST_PAIRS and lows.size >= LEAST_PAIRS:
            times.append(float(sent[window == w].mean()))
            middles.append((float(ups.min()) + float(lows.max())) / 2)
    if len(times) < 3:
        return 0.0
    x = np.asarray(times) - np.mean(times)
    return float((x * (np.asarray(middles) - np.mean(middles))).sum() / (x * x).sum())


def _shift(store: Store, skewed: list[dict[str, object]]) -> None:
    """Move what the skewed workers stamped onto the clock of the outermost worker before them."""
    total: dict[str, int] = {}
    before = {
        str(row["domain"]): row
        for row in sorted(skewed, key=lambda r: (str(r["domain"]), -_pairs(r)))[::-1]
    }
    for worker in before:
        total[worker] = _chain_offset(worker, before)
    if not total:
        return
    frame = pl.DataFrame({"worker": list(total), "theta": list(total.values())})
    store.connection.register("_theta", frame.to_arrow())
    store.execute(
        """CREATE OR REPLACE TEMP TABLE _skewed AS
           SELECT l.leg, t.theta FROM legs l JOIN _theta t USING (worker)"""
    )
    for table, key, other, columns in (
        ("intervals", "leg", "_skewed", ("start_ns", "end_ns")),
        ("streams", "leg", "_skewed", ("first_ns",)),
        ("legs", "leg", "_skewed", ("start_ns", "first_token_ns", "last_token_ns", "end_ns")),
        ("transfers", "leg", "_skewed", ("start_ns", "end_ns")),
        ("decisions", "router", "_theta", ("time_ns",)),
        ("steps", "worker", "_theta", ("start_ns", "start_lower_ns", "start_upper_ns")),
        ("samples", "worker", "_theta", ("time_ns",)),
        ("events", "worker", "_theta", ("time_ns",)),
    ):
        moves = ", ".join(f"{column} = {column} - t.theta" for column in columns)
        theirs = "leg" if other == "_skewed" else "worker"
        store.execute(f"UPDATE {table} SET {moves} FROM {other} t WHERE {table}.{key} = t.{theirs}")
    store.execute("DROP TABLE _skewed")
    store.connection.unregister("_theta")


def _pairs(row: dict[str, object]) -> int:
    return int(str(row["pairs"]))


def _chain_offset(worker: str, before: dict[str, dict[str, object]]) -> int:
    """Offset against the first worker of the chain router -> engine; circles stop."""
    offset, seen = 0, set()
    while worker in before and worker not in seen:
        seen.add(worker)
        offset += int(str(before[worker]["offset_ns"]))
        worker = str(before[worker]["reference"])
    return offset
