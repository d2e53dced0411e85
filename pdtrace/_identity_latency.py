"""Requests and what each observer saw of them: windows, latencies, tokens.

One frame per observer with one row per request; the request takes each value from the outermost
observer that has it. Latencies are never mixed from two observers.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from pdtrace._identity_halves import (
    lone_halves,
    with_mode,
    without_wholes,
    write_modes,
    write_roles,
)
from pdtrace._identity_headline import TOO_COARSE_NS, headline, with_headline
from pdtrace._identity_legs import narrow
from pdtrace._identity_observations import (
    COARSE_NS,
    OUTCOMES,
    moving,
    observed,
    prepared,
    timed,
    with_fronts,
    with_roles,
)
from pdtrace.model import OBSERVERS
from pdtrace.store import Store

HOSTS_NS = 10**9  # so much may clocks of hosts differ where an end is laid beside another's
DEFINITIONS = {
    "client": "client: request sent -> first token received",
    "gateway": "gateway: request received -> first chunk sent on",
    "router": "router: request received -> first chunk sent on",
    "frontend": "frontend: request received -> first token sent",
    "engine": "engine: request arrived -> first token made",
}
_COLUMNS = (
    "leg", "source", "worker", "deployment", "request", "observer", "role", "role_basis", "trace_id",
    "external_id", "bootstrap_room", "session", "turn", "attempt", "stream", "clock", "start_ns", "first_token_ns",
    "last_token_ns", "end_ns", "tenant", "route", "streaming", "resolution_ns", "ttft_ms", "e2e_ms", "tpot_ms",
    "ttft_definition", "first_token_delivered", "model", "prompt_tokens", "cached_tokens", "output_tokens",
    "max_tokens", "status", "error", "note", "container",
)  # fmt: skip
_JUDGED = ("r", "row", "request", "worker", "observer", "status", "failed", "plike", "duty")
_TOLD = (
    "r", "request", "deployment", "leg", "begin", "first", "finish", "first_token_ns", "last_token_ns", "end_ns",
    "ttft", "e2e", "tpot_ms", "ttft_definition", "output_tokens", "streams", "composite", "clock", "resolution_ns",
)  # fmt: skip
_FIRST_KNOWN = (
    "deployment", "external_id", "trace_id", "session", "turn", "model", "prompt_tokens",
    "cached_tokens", "output_tokens", "note", "tenant", "route", "streaming",
)  # fmt: skip


def build(store: Store) -> None:
    """Fill requests, observations, roles of legs and workers, mode and headline of deployments."""
    legs = narrow(store, _COLUMNS, of_requests=True)
    counted = _counted(store)
    legs, inferred = with_roles(prepared(legs))
    legs = with_fronts(legs, _carried(store, legs))
    there = {"engine", *legs["observer"].unique()}
    observers = {name: observed(legs, name) for name in OBSERVERS if name in there}
    requests = gathered(legs, observers)
    found = _found_for_prompts(legs)
    # What nobody reads any more is let go: of a million requests these columns are a gigabyte.
    legs = legs.select(_JUDGED)
    observers = {name: timed(o.select(_TOLD), requests) for name, o in observers.items()}
    requests = _told_by_routers(store, requests)
    requests = _attempts(requests, legs, counted)
    requests = _cached_for_prompts(with_mode(requests, moving(store, legs)), found)
    halves = lone_halves(legs, requests)
    observers["engine"] = without_wholes(observers["engine"], halves)
    inferred = pl.concat([inferred, halves.filter("new").select(inferred.columns)])
    observations = pl.concat([_observation_rows(o, name) for name, o in observers.items()])
    observers.clear()
    headlines = headline(observations, requests)
    requests = with_headline(requests, observations, headlines)
    store.fill("requests", requests.select(_REQUEST_COLUMNS))
    store.replace("observations", observations.drop("r", "own_clock"))
    write_roles(store, inferred, legs, requests)
    write_modes(store, requests, headlines)
    if store.path is not None:  # a transaction begun before the last row is there sees none
        store.settle_filling()


_REQUEST_COLUMNS = [
    "request", "deployment", "start_ns", "end_ns", "first_token_ns", "window_observer",
    "first_token_observer", "resolution_ns", "ttft_ms", "e2e_ms", "tpot_ms", "prefill_worker",
    "decode_worker", "mode", "model", "prompt_tokens", "cached_tokens", "output_tokens", "streams",
    "attempts", "first_token_origin", "outcome", "error", "session", "turn", "tenant",
    "route", "streaming", "external_id", "trace_id", "note",
]  # fmt: skip


def _observation_rows(seen: pl.DataFrame, observer: str) -> pl.DataFrame:
    instants = pl.col("begin").is_not_null() & (
        pl.col("first").is_not_null() | pl.col("finish").is_not_null()
    )
    return seen.select(
        "r",
        "request",
        "deployment",
        pl.lit(observer).alias("observer"),
        "leg",
        pl.col("begin").alias("start_ns"),
        pl.col("ttft").alias("ttft_ms"),
        pl.col("e2e").alias("e2e_ms"),
        pl.col("tpot").alias("tpot_ms"),
        pl.coalesce("ttft_definition", pl.lit(DEFINITIONS[observer])).alias("definition"),
        pl.when(instants).then(pl.lit("measured")).otherwise(pl.lit("reported")).alias("basis"),
        pl.when(instants).then(pl.lit("B")).otherwise(pl.lit("C")).alias("level"),
        (
            pl.col("tpot").is_not_null()
            & pl.any_horizontal(pl.col("first", "finish").is_null())
            & pl.any_horizontal(pl.col("ttft", "e2e").is_null())
        ).alias("tpot_stated"),
        "resolution_ns",
        # Durations on a clock of one's own are as good as that clock, wherever it is placed.
        (pl.col("clock").fill_null("wall") != "wall").alias("own_clock"),
    )


def gathered(legs: pl.DataFrame, observers: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """One row per request, each value from the outermost observer that has it."""
    names = [name for name, seen in observers.items() if seen.height]
    if not names:
        names = ["engine"]
    take = [
        "r", "request", *_FIRST_KNOWN, "begin", "finish", "first", "resolution_ns",
        "streams", "outcome", "error", "prefill_worker", "decode_worker", "first_token_origin",
        "ran_on", "ran",
    ]  # fmt: skip
    parts = {name: observers[name].select(take) for name in names}
    named = {n: p.rename({c: f"{c}:{n}" for c in take[1:]}) for n, p in parts.items()}
    wide = named[names[0]]
    if len(names) > 1:
        wide = pl.concat([p.select("r") for p in parts.values()]).unique()
        for part in named.values():
            wide = wide.join(part, on="r", how="left")

    def outermost(column: str) -> pl.Expr:
        return pl.coalesce(f"{column}:{n}" for n in names)

    fine = {n: pl.col(f"resolution_ns:{n}").fill_null(1) < TOO_COARSE_NS for n in names}
    begun = {n: pl.col(f"begin:{n}").is_not_null() for n in names}
    whole = {n: begun[n] & pl.col(f"finish:{n}").is_not_null() for n in names}
    # Log lines of one second resolution give a window only where nothing better does.
    window = pl.coalesce(
        *(pl.when(whole[n] & fine[n]).then(pl.lit(n)) for n in names),
        *(pl.when(whole[n]).then(pl.lit(n)) for n in names),
        *(pl.when(begun[n]).then(pl.lit(n)) for n in names),
    )
    token = {n: pl.col(f"first:{n}").is_not_null() for n in names}
    saw_first = pl.coalesce(
        *(pl.when(token[n] & fine[n]).then(pl.lit(n)) for n in names),
        *(pl.when(token[n]).then(pl.lit(n)) for n in names),
    )
    wide = wide.with_columns(
        window.alias("window_observer"), saw_first.alias("first_token_observer")
    )

    def of(observer: str, column: str) -> pl.Expr:
        return pl.coalesce(pl.when(pl.col(observer) == n).then(f"{column}:{n}") for n in names)

    engine = "engine" in names
    disaggregated = pl.lit(value=False)
    if engine:
        disaggregated = (
            pl.col("prefill_worker:engine").is_not_null()
            & pl.col("decode_worker:engine").is_not_null()
        )

    def tokens(column: str) -> pl.Expr:
        """P/D: prompt and cached tokens as P counted them, output as D did."""
        if not engine:
            return outermost(column)
        return (
            pl.when(disaggregated)
            .then(pl.coalesce(f"{column}:engine", outermost(column)))
            .otherwise(outermost(column))
        )

    # Only observers outside the engines can tell whose first token was delivered.
    outside = [n for n in names if n != "engine"]
    origin = outermost("first_token_origin")
    if engine and outside:
        origin = pl.coalesce(origin, pl.when(disaggregated).then(_made_by(outside)))
    outcome = outermost("outcome")
    if engine and outside:
        broken = _broken_behind_a_status(outside, of)
        outcome = pl.when(broken).then("outcome:engine").otherwise(outcome)
    # The word of who saw it end so: an engine's failed attempt is not why a client left.
    error = pl.coalesce(
        pl.when(pl.col(f"outcome:{n}").fill_null(outcome) == outcome).then(f"error:{n}")
        for n in names
    )
    return wide.select(
        "r",
        outermost("request").alias("request"),
        *(outermost(c).alias(c) for c in _FIRST_KNOWN if not c.endswith("_tokens")),
        *(tokens(c).alias(c) for c in _FIRST_KNOWN if c.endswith("_tokens")),
        of("window_observer", "begin").alias("start_ns"),
        of("window_observer", "finish").alias("end_ns"),
        of("first_token_observer", "first").alias("first_token_ns"),
        of("window_observer", "resolution_ns").alias("resolution_ns"),
        "window_observer",
        "first_token_observer",
        pl.max_horizontal(f"streams:{n}" for n in names).alias("streams"),
        outcome.replace_strict(
            {v: k for k, v in OUTCOMES.items()}, default="unknown", return_dtype=pl.String
        )
        .fill_null("unknown")
        .alias("outcome"),
        pl.when(outcome != 0).then(error).alias("error"),
        outermost("prefill_worker").alias("prefill_worker"),
        outermost("decode_worker").alias("decode_worker"),
        origin.alias("first_token_origin"),
        outermost("ran_on").alias("ran_on"),
        pl.any_horizontal(pl.col(f"ran:{n}").fill_null(value=False) for n in names).alias("ran"),
    )


def _made_by(outside: list[str]) -> pl.Expr:
    """Who made the first token that was delivered, by when it was seen and when D made its first one.

    No answer is seen to end before D made its last token, and none is made before it was asked for: clocks
    that say so are apart by as much. Where that would turn the answer, nobody knows it.
    """
    seen, begun, over = (
        pl.coalesce(f"{c}:{n}" for n in outside) for c in ("first", "begin", "finish")
    )
    made = pl.col("first:engine")
    ahead = (pl.col("finish:engine") - over).clip(0).fill_null(0)
    behind = (begun - pl.col("begin:engine")).clip(0).fill_null(0)
    return (
        pl.when((seen < made - COARSE_NS) & (seen < made - ahead - COARSE_NS))
        .then(pl.lit("prefill"))
        .when((seen >= made - COARSE_NS) & (seen >= made + behind - COARSE_NS))
        .then(pl.lit("decode"))
    )


def _broken_behind_a_status(outside: list[str], of: Callable[[str, str], pl.Expr]) -> pl.Expr:
    """Whether an engine says that it broke off what a router or front end calls fine, as its last act.

    An HTTP status goes out before the body: it is no proof that the answer was completed. Counted tokens are,
    and so is what the client says. Where the request went on after the engine's end, another attempt that is not
    on record may have completed it.
    """
    fine = pl.coalesce(f"outcome:{n}" for n in outside) == 0
    if "client" in outside:
        fine &= pl.col("outcome:client").is_null()
    uncounted = pl.coalesce(f"output_tokens:{n}" for n in outside).is_null()
    late = of("window_observer", "finish") - pl.col("finish:engine")
    slack = pl.col("resolution_ns:engine").fill_null(1) + HOSTS_NS
    last = (late <= slack).fill_null(value=True)
    return (fine & uncounted & (pl.col("outcome:engine") > 0) & last).fill_null(value=False)


def _told_by_routers(store: Store, requests: pl.DataFrame) -> pl.DataFrame:
    """Workers that only a router's choices name (no engine leg was recorded)."""
    missing = pl.col("prefill_worker").is_null() & pl.col("decode_worker").is_null()
    requests = requests.with_columns(pl.lit(None, pl.String).alias("chosen"))
    if store.count("decisions") == 0 or not requests.select(missing.any()).item():
        return requests
    told = store.sql(
        """SELECT l.request, arg_max(d.worker, d.time_ns) FILTER (d.phase = 'prefill') AS p,
                  arg_max(d.worker, d.time_ns) FILTER (d.phase = 'decode') AS d,
                  bool_or(d.phase = 'aggregated') AS a,
                  arg_max(d.worker, d.time_ns) FILTER (d.phase = 'aggregated') AS w
           FROM decisions d JOIN legs l USING (leg)
           WHERE d.phase IS NOT NULL AND l.request IS NOT NULL GROUP BY l.request"""
    )
    if told.height == 0:
        return requests
    both = pl.col("p").is_not_null() & pl.col("d").is_not_null()
    joined = requests.join(told, on="request", how="left", maintain_order="left")
    return joined.with_columns(
        pl.when(missing & both).then("p").otherwise("prefill_worker").alias("prefill_worker"),
        pl.when(missing & both).then("d").otherwise("decode_worker").alias("decode_worker"),
        pl.when("a").then(pl.coalesce("w", pl.lit(""))).alias("chosen"),
    ).drop("p", "d", "a", "w")


def _counted(store: Store) -> pl.DataFrame:
    """Attempts of requests as their legs and hops count them: request, counted."""
    if (kept := store.kept_aside("legs")) is None:
        return store.sql(
            """SELECT request, max(attempt) + 1 AS counted FROM legs
               WHERE attempt > 0 AND request IS NOT NULL GROUP BY request"""
        )
    tried = kept.select("request", "attempt").filter(pl.col("attempt") > 0).drop_nulls("request")
    return tried.group_by("request").agg((pl.col("attempt").max() + 1).alias("counted"))


def _attempts(requests: pl.DataFrame, legs: pl.DataFrame, counted: pl.DataFrame) -> pl.DataFrame:
    """Attempts as counted by any leg or hop, else failed legs before the one that answered."""
    requests = requests.with_columns(pl.lit(1, pl.Int64).alias("attempts"))
    failed = pl.col("failed") & (pl.col("status") == "failed")
    engine = legs.filter(pl.col("observer") == "engine")
    if engine["failed"].any():
        engine = engine.filter(pl.col("failed").any().over("r"))
    else:
        engine = engine.clear()
    # A prefill that ended well is no second attempt of the decode that failed after it.
    tries = (
        engine.group_by("request", "duty")
        .agg(
            failed.sum().cast(pl.Int64) + 1, (pl.col("status") == "completed").any().alias("ended")
        )
        .filter((pl.col("failed") > 1) & pl.col("ended"))
        .group_by("request")
        .agg(tries=pl.col("failed").max())
    )
    if counted.height == 0 and tries.height == 0:
        return requests
    return (
        requests.join(counted, on="request", how="left", maintain_order="left")
        .join(tries, on="request", how="left", maintain_order="left")
        .with_columns(pl.coalesce("counted", "tries", "attempts").alias("attempts"))
        .drop("counted", "tries")
    )


def _found_for_prompts(legs: pl.DataFrame) -> pl.DataFrame:
    """Cached tokens of the prompt (r, of_prompt) as who computed it says, else what a router saw of its answer."""
    engine = pl.col("observer") == "engine"
    known = legs.filter(
        pl.col("cached_tokens").is_not_null()
        & ((engine & pl.col("duty").ne_missing("decode")) | (pl.col("observer") == "router"))
    )
    return known.group_by("r").agg(
        pl.coalesce(
            pl.col("cached_tokens").filter(engine).max(),
            pl.col("cached_tokens").filter(~engine).max(),
        ).alias("of_prompt")
    )


def _cached_for_prompts(requests: pl.DataFrame, found: pl.DataFrame) -> pl.DataFrame:
    """Behind a split the answer is the decode side's: its count (0, or all that was pulled) is not the prompt's."""
    split = pl.col("mode") == "disaggregated"
    if not requests.select((split & pl.col("cached_tokens").is_not_null()).any()).item():
        return requests
    joined = requests.join(found, on="r", how="left", maintain_order="left")
    return joined.with_columns(
        pl.when(split).then("of_prompt").otherwise("cached_tokens").alias("cached_tokens")
    ).drop("of_prompt")


def _carried(store: Store, legs: pl.DataFrame) -> pl.DataFrame:
    """Front ends and the engine's legs right below them; none where only one front end is there."""
    fronts = legs.filter(pl.col("observer") == "frontend")["worker"].drop_nulls()
    if fronts.n_unique() < 2:
        return pl.DataFrame(schema={"row": pl.Int64, "row_below": pl.Int64})
    columns = ("observer", "trace_id", "span_id", "parent_span_id", "request")
    rows = narrow(store, columns, of_requests=True)
    above = rows.filter(pl.col("observer") == "frontend").drop("observer", "parent_span_id")
    below = rows.filter(pl.col("observer") == "engine").select(
        "trace_id", "request", row_below="row", span_id="parent_span_id"
    )
    return above.join(below, on=["trace_id", "span_id", "request"]).select("row", "row_below")
