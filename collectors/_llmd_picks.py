"""What llm-d's picker and sidecar chose and how long they took: decisions, intervals and reported values.

Source: llm-d/llm-d-router pkg/epp/scheduling (run_scheduler_profile, pick_endpoints), pkg/epp/requestcontrol, pkg/sidecar/proxy.
"""

from __future__ import annotations

import polars as pl

from pdtrace.model import WALL

from ._llmd_names import ADDRESS, POD

_EPP = "llm_d.epp."
_PROXY = "llm_d.pd_proxy."
TEXTS = (
    _EPP + "scheduling.profile.name", _EPP + "picker.top_endpoints", _EPP + "picker.top_scores",
    _EPP + "pd.prefill_pod_address", _EPP + "pd.prefill_pod_port", _EPP + "scorer.type",
)  # fmt: skip
COUNTS = (_EPP + "picker.candidate_endpoints",)
# whole milliseconds that the sidecar states of a request
SUMMARY = (
    "total_duration_ms", "true_ttft_ms", "prefill_duration_ms", "decode_duration_ms", "coordinator_overhead_ms",
)  # fmt: skip
_DEFINITIONS = {
    "total_duration_ms": "request at the sidecar to the end of the answer",
    "true_ttft_ms": "request at the sidecar to the moment decode is sent: without KV transfer and first step",
    "prefill_duration_ms": "the call of the prefill server: its queue, the prompt, one token, HTTP",
    "decode_duration_ms": "the call of the decode server",
    "coordinator_overhead_ms": "prefill's answer to the moment decode is sent: handling of JSON, no KV transfer",
}
_CHOICE = "gateway.request_orchestration"
_PROFILES = ("run_scheduler_profile",)
_PICKS = ("pick_endpoints",)
_PRODUCERS = r"^produce_|^tokenize"


def _first_of_list(key: str) -> pl.Expr:
    """The first element of an array attribute, as text."""
    return pl.col(key).str.json_path_match("$[0]")


def decisions(tree: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Choices by the picker's spans where they are on record, else whom the sidecar called.

    The picker's span lists the best scored endpoints; which one it took depends on the picker. The worker is the engine that
    the request reached, else the sidecar's target, else the only candidate; else nobody is named.
    """
    profiles = tree.filter(pl.col("name").is_in(_PROFILES)).select(
        "trace_id", parent_span_id="span_id", profile=_EPP + "scheduling.profile.name",
        took_ms=(pl.col("end_ns") - pl.col("start_ns")) / 1e6,
    )  # fmt: skip
    found = tree.filter(pl.col("name").is_in(_PICKS) & pl.col("owner").is_not_null()).join(
        profiles, on=["trace_id", "parent_span_id"], how="left", maintain_order="left"
    )
    profile = pl.coalesce("profile", _EPP + "scheduling.profile.name").str.to_lowercase()
    only = pl.when(pl.col(_EPP + "picker.candidate_endpoints") == 1).then(_first_of_list(_EPP + "picker.top_endpoints"))  # fmt: skip
    calls, engines = _called(tree, spans), _engines(spans)
    halves = pl.col("trace_id").is_in(calls["trace_id"].implode())
    phase = (
        pl.when(profile.str.contains("prefill"))
        .then(pl.lit("prefill"))
        .when(profile.str.contains("decode") & (halves | pl.col("split")))
        .then(pl.lit("decode"))
        .otherwise(pl.lit("aggregated"))
    )
    split = found.filter(profile.str.contains("prefill")).select("trace_id").unique()
    picked = found.with_columns(split=pl.col("trace_id").is_in(split["trace_id"].implode())).select(
        "source", "trace_id", leg="owner", router="worker", time_ns=pl.col("end_ns"), duration_ms=pl.col("took_ms"),
        phase=phase, policy=pl.col("profile"), only=_named(only),
        candidates=pl.col(_EPP + "picker.candidate_endpoints"), request_id=pl.col("gen_ai.request.id"),
    )  # fmt: skip
    reached = calls.group_by("trace_id", "phase").agg(_single("worker"))
    served = engines.group_by("trace_id").agg(_single("worker").alias("served"))
    whole = pl.when(pl.col("phase") == "aggregated").then("served")
    by_picker = (
        picked.join(reached, on=["trace_id", "phase"], how="left", maintain_order="left")
        .join(served, on="trace_id", how="left", maintain_order="left")
        .with_columns(worker=pl.coalesce("worker", whole, "only"))
        .drop("served", "only")
    )
    others = calls.join(by_picker.select("trace_id").unique(), on="trace_id", how="anti")
    return pl.concat([by_picker, others.drop_nulls("worker")], how="diagonal")


def _engines(spans: pl.DataFrame) -> pl.DataFrame:
    """Requests at engines in the same traces, which their own collector reads."""
    return spans.filter(~pl.col("mine") & (pl.col("name") == "llm_request")).select(
        "trace_id", "parent_span_id", "start_ns", "worker",
        leg=pl.concat_str(["trace_id", "span_id"], separator="/"),
    )  # fmt: skip


def _single(column: str) -> pl.Expr:
    """The value that all rows of a group have, NULL where there are several."""
    known = pl.col(column).drop_nulls().unique()
    return pl.when(known.len() == 1).then(known.first()).alias(column)


def _called(tree: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Whom the sidecar called: the engine below the call, else the target it names."""
    target = pl.coalesce(
        pl.when(pl.col("half") == "prefill").then(_PROXY + "prefill_target"),
        pl.when(pl.col("half") == "decode").then(_PROXY + "decode.target"),
    )
    below = _engines(spans).select("trace_id", span_id="parent_span_id", engine="worker")
    below = below.drop_nulls().group_by("trace_id", "span_id").agg(_single("engine"))
    calls = tree.filter((pl.col("place") == "call") & pl.col("owner").is_not_null()).join(
        below, on=["trace_id", "span_id"], how="left", maintain_order="left"
    )
    # A decode target is the pod that the sidecar stands beside, by a name of that pod only.
    beyond = pl.when(~target.str.contains(r"^(?:[a-z]+://)?(?:localhost|127\.|0\.0)")).then(target)  # fmt: skip
    return calls.select(
        "source", "trace_id", leg="owner", router="worker", time_ns=pl.col("start_ns"), phase=pl.col("half"),
        worker=pl.coalesce("engine", _named(beyond)), request_id=pl.col(_PROXY + "request_id"),
    )  # fmt: skip


def _named(endpoint: pl.Expr) -> pl.Expr:
    """A worker's id from an endpoint: its address or its pod."""
    bare = endpoint.str.replace(r"^[a-z]+://", "")
    return (
        pl.when(bare.str.contains(ADDRESS))
        .then(pl.lit("address:") + bare)
        .otherwise(pl.lit("pod:") + bare.str.extract(POD, 1))
    )


def pods(chosen: pl.DataFrame) -> pl.DataFrame:
    """Pods among the chosen, so that their own records are known as theirs."""
    chosen = chosen.drop_nulls("worker").filter(pl.col("worker").str.starts_with("pod:"))
    return chosen.select(
        "worker", kind=pl.lit("pod"), value=pl.col("worker").str.strip_prefix("pod:")
    ).unique(maintain_order=True)


_SHAPE = {
    "leg": pl.String, "detail": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "basis": pl.String,
    "clock": pl.String, "resolution_ns": pl.Int64, "censored": pl.Boolean, "semantics": pl.String, "end_leg": pl.String,
}  # fmt: skip


def _rows(frame: pl.DataFrame, leg: str, detail: str, start: str, end: str, semantics: str, end_leg: str | None = None) -> pl.DataFrame:  # fmt: skip
    return frame.drop_nulls([start, end]).select(
        leg=pl.col(leg),
        detail=pl.lit(detail),
        start_ns=pl.col(start),
        end_ns=pl.col(end),
        basis=pl.lit("measured"),
        clock=pl.lit(WALL),
        resolution_ns=pl.col("resolution_ns").cast(pl.Int64),
        censored=pl.lit(value=False),
        semantics=pl.lit(semantics),
        end_leg=pl.lit(None, pl.String) if end_leg is None else pl.col(end_leg),
    )


def intervals(tree: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The picker's wait and choice, the sidecar's handling, and the ways from one to the next."""
    parts = [_picking(tree), _handling(tree), _ways(tree, spans)]
    return pl.concat(parts) if parts else pl.DataFrame(schema=_SHAPE)


def _picking(tree: pl.DataFrame) -> pl.DataFrame:
    """Body, admission, data producers, choice; without the scheduler's own spans (before 0.10) the choice holds the wait."""
    choice = tree.filter(pl.col("name") == _CHOICE).with_columns(
        owner=pl.coalesce("owner", pl.when(pl.col("place") == "picker").then("leg"))
    ).drop_nulls("owner")  # fmt: skip
    within = tree.drop_nulls("owner").filter(pl.col("end_ns").is_not_null())
    scheduling = within.filter(pl.col("name").is_in(_PROFILES)).group_by("owner").agg(scheduling_ns=pl.col("start_ns").min())  # fmt: skip
    producing = within.filter(pl.col("name").str.contains(_PRODUCERS)).group_by("owner").agg(
        producing_ns=pl.col("start_ns").min(), produced_ns=pl.col("end_ns").max()
    )  # fmt: skip
    received = tree.filter(pl.col("place") == "picker").select(owner="leg", received_ns="start_ns")
    whole = (
        choice.select("owner", "start_ns", "end_ns", "resolution_ns")
        .join(scheduling, on="owner", how="left")
        .join(producing, on="owner", how="left")
        .join(received, on="owner", how="left")
    )
    early = (pl.col("produced_ns") <= pl.col("scheduling_ns")).fill_null(value=False)
    split = whole.filter(pl.col("scheduling_ns").is_not_null())
    plain = whole.filter(pl.col("scheduling_ns").is_null())
    produced, straight = split.filter(early), split.filter(~early)
    waits = "admission and flow control of the endpoint picker"
    return pl.concat([
        _rows(whole, "owner", "frontend", "received_ns", "start_ns", "headers to the whole body at the endpoint picker"),
        _rows(straight, "owner", "router_queue", "start_ns", "scheduling_ns", waits),
        _rows(produced, "owner", "router_queue", "start_ns", "producing_ns", waits),
        _rows(produced, "owner", "router_decide", "producing_ns", "produced_ns", "data producers: tokens and cached prefixes"),
        _rows(produced, "owner", "router_queue", "produced_ns", "scheduling_ns", waits),
        _rows(split, "owner", "router_decide", "scheduling_ns", "end_ns", "filters, scores, pick"),
        _rows(plain, "owner", "router_decide", "start_ns", "end_ns", "choice of an endpoint, flow control's wait within"),
    ])  # fmt: skip


def _handling(tree: pl.DataFrame) -> pl.DataFrame:
    """What the sidecar did itself: until it calls prefill, and from prefill's answer until it calls decode."""
    calls = tree.filter((pl.col("place") == "call") & pl.col("owner").is_not_null())
    of = {half: calls.filter(pl.col("half") == half).group_by("owner").agg(
        pl.col("start_ns").min().alias(f"{half}_ns"), pl.col("end_ns").max().alias(f"{half}_end_ns"),
    ) for half in ("prefill", "decode")}  # fmt: skip
    sidecars = tree.filter(pl.col("place") == "sidecar").select(owner="leg", start_ns="start_ns", resolution_ns="resolution_ns")  # fmt: skip
    whole = sidecars.join(of["prefill"], on="owner", how="left").join(of["decode"], on="owner", how="left")  # fmt: skip
    first = whole.with_columns(first_ns=pl.min_horizontal("prefill_ns", "decode_ns"))
    serial = whole.filter(pl.col("prefill_end_ns") <= pl.col("decode_ns"))  # else both at once
    return pl.concat([
        _rows(first, "owner", "dispatch", "start_ns", "first_ns", "sidecar: received to its first call"),
        _rows(serial, "owner", "dispatch", "prefill_end_ns", "decode_ns", "sidecar: prefill's answer to the call of decode"),
    ])  # fmt: skip


def _ways(tree: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """From the choice to the sidecar or engine that the request reached next, and from a call to its engine."""
    engines = _engines(spans)
    sidecars = tree.filter(pl.col("place") == "sidecar").select("trace_id", "parent_span_id", "start_ns", "leg")  # fmt: skip
    chosen = tree.filter((pl.col("name") == _CHOICE) & pl.col("end_ns").is_not_null()).select(
        "trace_id", "resolution_ns", chosen_ns="end_ns", owner=pl.coalesce("owner", "leg"),
    )  # fmt: skip
    # One choice a trace: in a trace of several requests it is not known whose the next leg is.
    alone = chosen.filter(pl.len().over("trace_id") == 1)
    reached = pl.concat([
        sidecars,
        engines.join(sidecars.select("trace_id").unique(), on="trace_id", how="anti").select(sidecars.columns),
    ])  # fmt: skip
    reached = reached.sort("start_ns").unique("trace_id", keep="first", maintain_order=True)
    onwards = alone.join(reached.select("trace_id", reached_ns="start_ns", end_leg="leg"), on="trace_id")  # fmt: skip
    calls = tree.filter((pl.col("place") == "call") & pl.col("owner").is_not_null()).select(
        "trace_id", "owner", "resolution_ns", parent_span_id="span_id", called_ns="start_ns"
    )  # fmt: skip
    inward = calls.join(engines.select("trace_id", "parent_span_id", reached_ns="start_ns", end_leg="leg"), on=["trace_id", "parent_span_id"])  # fmt: skip
    return pl.concat([
        _rows(onwards, "owner", "dispatch", "chosen_ns", "reached_ns", "endpoint chosen to the next component (proxy and network within)", "end_leg"),
        _rows(inward, "owner", "dispatch", "called_ns", "reached_ns", "sidecar's call to the engine", "end_leg"),
    ])  # fmt: skip


def reported(tree: pl.DataFrame) -> pl.DataFrame:
    """What the sidecar states of a request, and the best score at each choice."""
    calls = tree.filter((pl.col("place") == "call") & pl.col("owner").is_not_null())
    stated = [
        calls.filter(pl.col(_PROXY + name).is_not_null()).select(
            "source", leg="owner", quantity=pl.lit(name), value=pl.col(_PROXY + name), unit=pl.lit("ms"),
            definition=pl.lit(f"llm-d sidecar, whole milliseconds: {_DEFINITIONS[name]}"),
        )
        for name in SUMMARY
    ]  # fmt: skip
    score = _first_of_list(_EPP + "picker.top_scores").cast(pl.Float64, strict=False)
    scored = tree.filter(pl.col("name").is_in(_PICKS) & pl.col("owner").is_not_null())
    best = scored.select(
        "source", leg="owner", quantity=pl.lit("best_score"), value=score, unit=pl.lit("1"),
        definition=pl.lit("llm-d endpoint picker: weighted sum of the scorers for the best candidate, more is better"),
    ).drop_nulls("value")  # fmt: skip
    return pl.concat([*stated, best])
