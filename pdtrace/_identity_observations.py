"""What one observer saw of each request: roles of engine legs, streams, attempts together."""

from __future__ import annotations

import polars as pl

from pdtrace._identity_edges import STREAM_NS
from pdtrace._identity_legs import weak
from pdtrace._lookup import repeated
from pdtrace.store import Store

COARSE_NS = 10**6  # instants coarser than this come from log lines
OUTCOMES = {"completed": 0, "aborted": 1, "failed": 2}
_ASKED = ("tenant", "route", "streaming")  # who asked for what


def prepared(legs: pl.DataFrame) -> pl.DataFrame:
    """Adds lo and hi (window), first (token), ttft, e2e, plike, failed, coarse and r (request)."""
    failed = pl.col("status").is_in(["failed", "aborted"]).fill_null(value=False)
    short = (pl.col("max_tokens") == 1) | ((pl.col("output_tokens") <= 1) & ~failed)
    aligned = pl.col("start_ns").is_not_null()
    e2e_ns = (pl.col("e2e_ms") * 1e6).cast(pl.Int64, strict=False)
    return legs.with_columns(
        pl.col("start_ns").alias("lo"),
        pl.when(aligned)
        .then(pl.coalesce("end_ns", pl.col("start_ns") + e2e_ns, "last_token_ns"))
        .alias("hi"),
        pl.when(aligned).then("first_token_ns").alias("first"),
        pl.coalesce("ttft_ms", (pl.col("first_token_ns") - pl.col("start_ns")) / 1e6).alias("ttft"),
        pl.coalesce("e2e_ms", (pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("e2e"),
        (
            (pl.col("role") == "prefill").fill_null(value=False)
            | ((pl.col("observer") == "engine") & short & pl.col("role").is_null()).fill_null(
                value=False
            )
        ).alias("plike"),
        failed.alias("failed"),
        (pl.col("resolution_ns").fill_null(1) > COARSE_NS).alias("coarse"),
        pl.col("request").hash().alias("r"),
    )


def with_roles(legs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Column `duty` (prefill or decode) for engine legs of P/D requests; rows newly inferred.

    A worker did the prefill when its leg made at most one token while another worker of the same
    request made the rest.
    """
    engine = chosen(legs, legs["observer"] == "engine")
    several = chosen(engine, repeated(engine["r"]))
    schema = {"row": pl.Int64, "duty": pl.String}
    if several.height == 0:
        duty = engine.filter(pl.col("role").is_in(["prefill", "decode"])).select("row", duty="role")
        empty = pl.DataFrame(schema=schema)
        if duty.height == 0:
            return legs.with_columns(pl.lit(None, pl.String).alias("duty")), empty
        return legs.join(duty, on="row", how="left", maintain_order="left"), empty
    prefills = pl.col("plike").any().over("r", "worker") & pl.col("worker").is_not_null()
    prefills = pl.when(_two_behind_one_name()).then("plike").otherwise(prefills)
    told = pl.col("role").is_in(["prefill", "decode"])
    judged = several.with_columns(
        pl.when(told)
        .then("role")
        .when(prefills)
        .then(pl.lit("prefill"))
        .when(pl.col("role").is_null())
        .then(pl.lit("decode"))
        .alias("duty")
    )
    both = (pl.col("duty") == "prefill").any().over("r") & (pl.col("duty") == "decode").any().over(
        "r"
    )
    judged = judged.filter(both)
    alone = engine.filter(told & ~pl.col("row").is_in(judged["row"].implode())).select(
        "row", duty="role"
    )
    duty = pl.concat([judged.select("row", "duty"), alone])
    inferred = judged.filter(pl.col("role").is_null()).select("row", "duty")
    return legs.join(duty, on="row", how="left", maintain_order="left"), inferred


def with_fronts(legs: pl.DataFrame, carried: pl.DataFrame) -> pl.DataFrame:
    """Front ends of the engines that share a request (their API servers) have the engine's duty: none saw it all.

    `carried` names the legs: row of the front end, row_below of the engine.
    """
    duty = legs.filter(pl.col("duty").is_not_null()).select("r", row_below="row", front_duty="duty")
    told = carried.join(duty, on="row_below").unique(["row", "front_duty"])
    told = told.filter(
        ~pl.col("row").is_duplicated() & (pl.col("front_duty").n_unique().over("r") > 1)
    )
    if told.height == 0:
        return legs
    return (
        legs.join(told.select("row", "front_duty"), on="row", how="left", maintain_order="left")
        .with_columns(pl.coalesce("duty", "front_duty").alias("duty"))
        .drop("front_duty")
    )


def _two_behind_one_name() -> pl.Expr:
    """Whether a name that several processes may bear did a prefill and, apart from it, a decode.

    Streams of one answer (n > 1) have the same limit and start, whatever each of them made.
    """
    limit = pl.col("max_tokens")
    alone = pl.col("plike") & (limit.is_null() | (limit == 1))
    rest = (pl.col("output_tokens") > 1) & limit.ne_missing(1)
    apart = (pl.col("lo").max() - pl.col("lo").min()).over("r", "worker") > STREAM_NS
    both = alone.any().over("r", "worker") & rest.any().over("r", "worker")
    return (weak() & both & apart).fill_null(value=False)


def moving(store: Store, legs: pl.DataFrame) -> list[str]:
    """Workers that count KV movements from other workers, and those that most of their requests share with them.

    Which half they do the counts do not say, but they do not do the whole.
    """
    found = store.rows(
        """SELECT DISTINCT worker FROM samples
           WHERE metric IN ('log:kv_num_successful_transfers', 'vllm:nixl_xfer_time_seconds_count')
             AND value > 0 AND worker IS NOT NULL"""
    )
    counting = [worker for (worker,) in found]
    if not counting:
        return []
    engine = legs.filter((pl.col("observer") == "engine") & pl.col("worker").is_not_null())
    theirs = engine.filter(pl.col("worker").is_in(counting))["r"].unique()
    others = (
        engine.filter(~pl.col("worker").is_in(counting))
        .group_by("worker")
        .agg(pl.col("r").is_in(theirs.implode()).mean().alias("shared"))
    )
    return [*counting, *others.filter(pl.col("shared") >= 0.5)["worker"].to_list()]


def chosen(rows: pl.DataFrame, which: pl.Series) -> pl.DataFrame:
    """These rows; all or none of them are not copied."""
    if which.all(ignore_nulls=False):
        return rows
    return rows.filter(which) if which.any() else rows.clear()


def observed(legs: pl.DataFrame, observer: str) -> pl.DataFrame:
    """What one observer saw: one row per request, from its outermost leg, streams together."""
    rows = chosen(legs, legs["observer"] == observer)
    engine = pl.lit(observer == "engine")
    whole = pl.col("duty").is_null() & engine
    rows = rows.with_columns(
        pl.lit(1, pl.Int64).alias("streams"),
        pl.col("lo").alias("begin"),
        pl.col("hi").alias("finish"),
        pl.lit(False).alias("composite"),
        pl.col("status")
        .replace_strict(OUTCOMES, default=None, return_dtype=pl.Int8)
        .alias("outcome"),
        pl.when(engine & (pl.col("duty") == "prefill")).then("worker").alias("prefill_worker"),
        pl.when(engine & (pl.col("duty") == "decode")).then("worker").alias("decode_worker"),
        pl.when(whole).then("worker").alias("ran_on"),
        whole.alias("ran"),
        pl.lit(None, pl.String).alias("first_token_origin"),
    )
    shared = repeated(rows["r"])
    single, several = chosen(rows, ~shared), chosen(rows, shared)
    if several.height == 0:
        return single
    pairs = (pl.col("duty") == "prefill").any().over("r") & (pl.col("duty") == "decode").any().over(
        "r"
    )
    split = several.filter(pairs)
    parts = [_merged(several.filter(~pairs.fill_null(value=False)))]
    if split.height:
        parts.append(_pair(split))
    return pl.concat([single, *parts], how="diagonal")


def _merged(rows: pl.DataFrame) -> pl.DataFrame:
    """The outermost leg of several, with its parallel streams and the attempts before it."""
    if rows.height == 0:
        return rows
    # Coarser records of it ended as the finest says, see below.
    finest = _fineness() == _fineness().min().over("r")
    verdict = pl.when(finest).then("outcome").min().over("r")
    rows = rows.with_columns(
        # an earlier attempt's error is not why the client left
        pl.when(pl.col("outcome").fill_null(verdict).eq_missing(verdict))
        .then("error")
        .alias("error"),
        pl.when(finest.fill_null(value=True) | verdict.is_null())
        .then("failed")
        .otherwise(verdict > 0)
        .alias("failed"),
    )
    # Where two records tell the same start, the finer one tells it.
    grain = pl.col("resolution_ns").fill_null(1)
    widest = grain.filter(~pl.col("coarse")).max().over("r")
    inner = (pl.col("lo") - pl.col("lo").min().over("r") > widest).fill_null(value=True)
    ordered = rows.sort(
        "r", "failed", pl.col("ttft").is_null(), "coarse", inner, grain, "lo", "leg",
        nulls_last=True,
    )  # fmt: skip
    first = {c: pl.col(c).first().over("r") for c in ("lo", "worker", "source", "coarse")}
    first_stream = pl.col("stream").first().over("r")
    beside = pl.when(pl.col("stream").is_null() & first_stream.is_null())
    twins = beside.then((pl.col("observer") == "engine") & (pl.col("lo") == first["lo"])).otherwise(
        pl.col("stream").ne_missing(first_stream)
        & ((pl.col("lo") - first["lo"]).abs() <= STREAM_NS)
    )
    stream = (
        twins.fill_null(value=False)
        & pl.col("worker").eq_missing(first["worker"])
        & pl.col("source").eq_missing(first["source"])
    ) | (pl.col("leg") == pl.col("leg").first().over("r"))
    fine = ~pl.col("coarse") | first["coarse"]
    begin = pl.col("lo").filter(fine & pl.col("failed")).min().over("r")
    marked = ordered.with_columns(stream.alias("_stream"), begin.alias("_tried"))
    streams = (
        marked.filter("_stream")
        .group_by("r")
        .agg(
            pl.len().cast(pl.Int64).alias("streams"),
            pl.col("first", "first_token_ns").min(),
            pl.col("hi", "last_token_ns", "end_ns").max(),
            pl.col("ttft").min(),
            pl.col("e2e").max(),
            pl.when(pl.col("output_tokens").is_not_null().all())
            .then(pl.col("output_tokens").sum())
            .first()
            .alias("output_tokens"),
        )
    )
    known = ordered.group_by("r").agg(
        pl.col("prompt_tokens", "cached_tokens", "output_tokens").max().name.suffix("_any"),
        # Attempts are told by one kind of record; of several kinds the finest knows how it ended (Dynamo's
        # request trace has the same row for a request that its client left).
        pl.col("outcome")
        .filter(pl.col("outcome").is_not_null() & (_fineness() == _fineness().min()))
        .min(),
        pl.col("model", "session", "external_id", "trace_id", "note", "error", *_ASKED)
        .drop_nulls()
        .first()
        .name.suffix("_any"),
    )
    chosen = marked.unique("r", keep="first", maintain_order=True).drop(
        "streams",
        "first",
        "first_token_ns",
        "hi",
        "last_token_ns",
        "end_ns",
        "ttft",
        "e2e",
        "outcome",
    )
    out = (
        chosen.drop("output_tokens")
        .join(streams, on="r", how="left")
        .join(known, on="r", how="left")
    )
    delay = (pl.col("lo") - pl.col("_tried")) / 1e6
    tried = (pl.col("_tried") < pl.col("lo")).fill_null(value=False)
    return out.with_columns(
        *(pl.coalesce(c, f"{c}_any").alias(c) for c in (
            "prompt_tokens", "cached_tokens", "output_tokens", "model", "session", "external_id",
            "trace_id", "note", "error", *_ASKED,
        )),
        pl.col("streams").fill_null(1),
        pl.when(tried).then("_tried").otherwise("lo").alias("begin"),
        pl.col("hi").alias("finish"),
        pl.when(tried).then(pl.col("ttft") + delay).otherwise("ttft").alias("ttft"),
        pl.when(tried).then(pl.col("e2e") + delay).otherwise("e2e").alias("e2e"),
    ).select(rows.columns)  # fmt: skip


def _fineness() -> pl.Expr:
    """Resolution of the records that tell an outcome; NULL for the others."""
    return pl.when(pl.col("outcome").is_not_null()).then(pl.col("resolution_ns").fill_null(1))


def _pair(rows: pl.DataFrame) -> pl.DataFrame:
    """The engines of a P/D request: P's prompt, D's answer; a TTFT only if one leg saw it all."""
    prefill = _merged(rows.filter(pl.col("duty") == "prefill"))
    decode = _merged(rows.filter(pl.col("duty") == "decode"))
    p = prefill.select(
        "r", "lo", "hi", "first", "ttft", "prompt_tokens", "cached_tokens", "leg",
        "first_token_delivered",
        "ttft_definition", "coarse", "prefill_worker", "bootstrap_room",
    ).rename(lambda c: c if c == "r" else f"p_{c}")  # fmt: skip
    both = decode.join(p, on="r", how="inner")
    by_prefill = pl.col("p_first_token_delivered").fill_null(value=False)
    # Sent to both at once. An earlier start on D alone may be its host's clock: no proof.
    together = ((pl.col("lo") - pl.col("p_lo")).abs() <= STREAM_NS).fill_null(value=False)
    # Who meets in a room was asked at once, whatever the hosts' clocks say: P waits there for D's answer.
    together = together | (pl.col("bootstrap_room") == pl.col("p_bootstrap_room")).fill_null(
        value=False
    )
    by_decode = ~by_prefill & together
    begin = pl.min_horizontal("lo", "p_lo")
    return both.with_columns(
        pl.when(by_prefill).then("p_ttft").when(by_decode).then("ttft").alias("ttft"),
        pl.when(by_decode).then("e2e").alias("e2e"),
        pl.when(by_prefill).then("p_first").otherwise("first").alias("first"),
        begin.alias("begin"),
        pl.max_horizontal("hi", "p_hi").alias("finish"),
        pl.coalesce("p_prompt_tokens", "prompt_tokens").alias("prompt_tokens"),
        pl.col("p_cached_tokens").alias("cached_tokens"),
        pl.when(by_decode).then("leg").otherwise("p_leg").alias("leg"),
        pl.when(by_prefill)
        .then("p_ttft_definition")
        .otherwise("ttft_definition")
        .alias("ttft_definition"),
        pl.col("p_prefill_worker").alias("prefill_worker"),
        (~by_prefill & ~by_decode).alias("composite"),
        pl.when(by_prefill)
        .then(pl.lit("prefill"))
        .when(~pl.col("p_first_token_delivered"))
        .then(pl.lit("decode"))
        .alias("first_token_origin"),
        # Between the engine's own first and last token, whoever's start it was.
        pl.coalesce("tpot_ms", _span_ms("first_token_ns") / _after_first()).alias("tpot_ms"),
    ).select(rows.columns)


FINE_NS = 1_000_000  # stamps no coarser than this tell one token from the next


def _span_ms(first: str) -> pl.Expr:
    return (pl.coalesce("last_token_ns", "end_ns") - pl.col(first)) / 1e6


def _after_first() -> pl.Expr:
    """Tokens after the first one of a stream; NULL where there is none."""
    tokens = pl.col("output_tokens") / pl.col("streams")
    return pl.when(tokens > 1).then(tokens - 1)


def timed(seen: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Adds tpot: mean time per token after the first; several streams are as fast as the slowest.

    Tokens are the observer's own count, else the request's. Who counts the tokens of all streams in one
    (a client by the usage that it is told) has as many as the request.
    """
    if seen["output_tokens"].null_count() or (requests["streams"] > 1).any():
        counted = requests.select("r", all_tokens="output_tokens", all_streams="streams")
        unknown = pl.col("output_tokens").is_null()
        in_one = (pl.col("streams") == 1) & (pl.col("output_tokens") == pl.col("all_tokens"))
        in_one = (in_one & (pl.col("all_streams") > 1)).fill_null(value=False)
        seen = seen.join(counted, on="r", how="left", maintain_order="left").with_columns(
            pl.when(unknown).then("all_tokens").otherwise("output_tokens").alias("output_tokens"),
            pl.when(unknown | in_one).then("all_streams").otherwise("streams").alias("streams"),
            pl.when(~in_one).then("tpot_ms").alias("tpot_ms"),  # its own is that of all tokens
        )
    by_durations = pl.col("e2e") - pl.col("ttft")
    # Several tokens at one instant of a fine clock came in one chunk: nobody knows their pace.
    fine = pl.col("resolution_ns").fill_null(1) <= FINE_NS
    at_once = (fine & (pl.col("last_token_ns") == pl.col("first"))).fill_null(value=False)
    spread = pl.when(~pl.col("composite") & ~at_once).then(
        pl.coalesce(_span_ms("first"), by_durations)
    )
    return seen.with_columns(pl.coalesce("tpot_ms", spread / _after_first()).alias("tpot"))
