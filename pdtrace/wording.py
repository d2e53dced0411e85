"""Says the diagnosis in words: overview, verdicts, findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import (
    _words_figures,
    _words_health,
    _words_interference,
    _words_kv,
    _words_latency,
    _words_routing,
    _words_table,
    _words_time,
)
from pdtrace._words import Row, Words, phase
from pdtrace._words_latency import MAY_HOLD_QUEUE
from pdtrace.model import Finding
from pdtrace.numbers import duration, plural, share, short

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment

MANY = 100  # so many values have a 99th percentile to speak of
_ROOMS = (
    _words_latency,
    _words_health,
    _words_interference,
    _words_kv,
    _words_routing,
    _words_time,
)
# In the order in which a finding may carry the verdict; the others only add.
_VERDICT_CAUSES = (
    "engine_failure", "engine_stall", "kv_alarm", "failed_requests", "prefill_interference", "engine_queue", "kv_transfer", "router_queue",
    "waiting_with_room", "preemption", "slow_worker", "slow_first_token", "slow_stream", "unattributed_time", "long_output",
    "log_warning",
)  # fmt: skip
# Phases that a finding is about: with them in the first sentence its title would only repeat it.
_SAME = {
    "engine_queue": ("queue", "decode_queue"),
    "kv_transfer": ("kv_wait", "kv_transfer", "kv_load"),
    "router_queue": ("router",),
    "unattributed_time": ("unattributed",),
}


def finding(name: str, row: Row, window: Row | None = None) -> Finding:
    """A row of a finding query as a Finding; `window` is the stretch it is concentrated in, if any."""
    words = _words_of(name, row)
    low, high = row["interval_low"], row["interval_high"]
    return Finding(
        id=name,
        deployment=row["deployment"],
        severity=row["severity"],
        title=words.title,
        detail=f"{words.detail} {_words_time.concentrated(window)}" if window else words.detail,
        when=(window["start_ns"], window["end_ns"], window["weight_ratio"]) if window else None,
        level=row["level"],
        value=row["value"],
        unit=row["unit"] or "",
        interval=None if low is None or high is None else (low, high),
        share=row["share"],
        requests=row["requests"],
        cost_s=row["cost_s"],
        workers=tuple(row["workers"] or ()),
        culprits=tuple((c["request"], c["value"]) for c in row["culprits"] or ()),
        sources=tuple(row["sources"] or ()),
        assumptions=words.assumptions,
        suggestions=words.suggestions,
    )


def _words_of(name: str, row: Row) -> Words:
    """The words for a finding; a stranger's finding gets its own columns as detail."""
    for room in _ROOMS:
        function: Callable[[Row], Words] | None = getattr(room, name, None)
        if function is not None:
            return function(row)
    return Words(name.replace("_", " "), ", ".join(f"{key} {value}" for key, value in row.items()))


def overview(deployments: Sequence[Deployment], sources: Sequence[Row]) -> str:
    """One or two sentences over everything that was read."""
    used = sum(1 for s in sources if s["used"])
    requests = sum(d.requests["count"] for d in deployments)
    several = (
        f" They belong to {plural(len(deployments), 'deployment')}, judged apart."
        if len(deployments) > 1
        else ""
    )
    kept = sum(s["rows_kept"] for s in sources)
    skipped = sum(s["rows_skipped"] for s in sources)
    return (
        f"Read {plural(len(sources), 'source')} ({used:,} used): {kept:,} records kept, {skipped:,} not, "
        f"{plural(requests, 'request')}.{several}"
    )


def verdict(deployment: Deployment, rows: Mapping[str, Row]) -> str:
    """The answer in two or three sentences: how it was, what explains it, what to do next.

    `rows` are the deployment's finding rows by id.
    """
    if not deployment.requests["count"]:
        return _without_requests(deployment)
    if only_refused(deployment):
        return _refused(deployment, rows)
    parts = [_first_tokens(deployment)]
    if phases_known(deployment) or not deployment.latency:
        parts.append(_cause(deployment) or ("" if deployment.latency else _words_table.NO_TIMES))
    else:
        failed = rows.get("failed_requests")
        dead = next((f for f in deployment.findings if f.id == "engine_failure"), None)
        parts += [
            _capital(dead.title) + "." if dead else "",
            _words_table.failures(failed) if failed else "",
            _words_table.closing(deployment, rows),
        ]
    return " ".join(part for part in parts if part)


def only_refused(deployment: Deployment) -> bool:
    """Whether the requests known are only those that a log names because their answer was an error."""
    counts = deployment.requests
    return deployment.calls is not None and 0 < counts["count"] == counts["failed"]


def _refused(deployment: Deployment, rows: Mapping[str, Row]) -> str:
    """What can be told where a log names no request that went well: an engine that died comes first."""
    dead = next((f for f in deployment.findings if f.id == "engine_failure"), None)
    failed = rows.get("failed_requests")
    told = "steps and metrics stand below" if deployment.figures else ""
    parts = [
        _capital(dead.title) + "." if dead else "",
        _words_table.failures(failed) if failed else "",
        f"The log names no request that went well, so nothing is known of their times{f'; {told}' if told else ''}.",
        "" if dead else _cause(deployment),
    ]
    return " ".join(part for part in parts if part)


def phases_known(deployment: Deployment) -> bool:
    """Whether anything tells where inside the requests the time went."""
    return any(p["detail"] != "unattributed" for p in deployment.phases)


models = _words_table.models
dependence = _words_table.dependence
interference = _words_interference.judged
survivors = _words_latency.survivors
metric_rows, step_rows = _words_figures.metric_rows, _words_figures.step_rows


def _without_requests(deployment: Deployment) -> str:
    """What there is instead, what it says, and what it cannot say."""
    kinds = {row["kind"] for row in deployment.figures}
    there = [
        words
        for kind, words in (("steps", "engine steps"), ("mean", "histograms"), ("range", "gauges"))
        if kind in kinds
    ]
    # access lines count calls, and name none of them
    none = "No requests in these data" if deployment.calls is None else "No single request is known"
    if not there and not deployment.findings:
        return f"{none}: nothing can be said of latency."
    held = f"{none}, only {_joined(there)}" if there else none
    cause = _cause(deployment)
    means = (
        "means stand below, but no percentile and no cause of a slow request can be had from them"
        if kinds and kinds <= {"mean", "range"}
        else "latency of requests cannot be told from them"
    )
    if not cause and deployment.findings:
        cause = _capital(deployment.findings[0].title) + "."
    return f"{held}: {means}." + (f" {cause}" if cause else "")


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _first_tokens(deployment: Deployment) -> str:
    """TTFT and its largest part, else the whole duration."""
    row = _headline(deployment, "ttft_ms")
    if row is None:
        whole = _headline(deployment, "e2e_ms")
        if whole is None and any(p["share_of_ttft"] for p in deployment.phases):
            return (
                "Nobody saw a request both start and deliver its first token"
                f"{_parts_seen(deployment)}: there is no TTFT to tell."
            )
        pace = _headline(deployment, "tpot_ms")
        if whole is None and pace is not None:
            return f"Time per output token as the {pace['observer']} saw it: {spread(pace)}; first tokens and whole durations are not in these data."
        if whole is None:
            return "Neither first tokens nor durations of whole requests are in these data."
        return (
            f"Whole requests took {spread(whole)} as the {whole['observer']} saw them; "
            "first tokens are not in these data."
        )
    # Whose outcome nobody tells may have been answered too.
    counted = deployment.requests["completed"] + deployment.requests["unknown"]
    part = (
        f" on {row['count']:,} of {plural(counted, 'request')}"
        if row["count"] < 0.9 * counted
        else ""
    )
    text = f"TTFT as the {row['observer']} saw it{part}: {spread(row)}"
    shares = _ttft_shares(deployment)
    if not shares or not phases_known(deployment):
        return text + "."
    top, most_share = max(shares.items(), key=lambda item: item[1])
    bounds = {p["phase"] for p in deployment.phases if p["basis"] == "upper_bound"}
    if top == "unattributed":
        return f"{text}; nobody accounts for {share(most_share)} of it."
    most = "at most " if top in bounds else ""
    apart = any(p["phase"] == "queue" or p["detail"] == "prefill_exec" for p in deployment.phases)
    holds = f" {MAY_HOLD_QUEUE}" if top == "prefill" and not apart else ""
    return f"{text}; {phase(top)}{holds} took {most}{share(most_share)} of it."


def _parts_seen(deployment: Deployment) -> str:
    """Why no observer saw a whole first token, where the set-up tells it."""
    split = deployment.mode == "disaggregated"
    return " (prefill and decode worker saw a part each)" if split else " by one clock"


def _ttft_shares(deployment: Deployment) -> dict[str, float]:
    """Share of the time before first tokens, by phase."""
    shares: dict[str, float] = {}
    for p in deployment.phases:
        if p["share_of_ttft"]:
            shares[p["phase"]] = shares.get(p["phase"], 0.0) + p["share_of_ttft"]
    return shares


def spread(row: Row) -> str:
    """Median and tail; below 100 values the largest stands for a 99th percentile that they cannot have."""
    step = row.get("resolution_ms")
    coarse = f" (each to within {short(step)})" if step is not None else ""
    if row["count"] == 1:
        return f"{duration(row['max'])} (one request{f', to within {short(step)}' if step is not None else ''})"
    if row["count"] < MANY:
        return f"p50 {duration(row['p50'])}, p90 {duration(row['p90'])}, at most {duration(row['max'])}{coarse}"
    return f"p50 {duration(row['p50'])}, p99 {duration(row['p99'])}{coarse}"


def _headline(deployment: Deployment, metric: str) -> Mapping[str, Any] | None:
    rows = [row for row in deployment.latency if row["metric"] == metric and row["count"]]
    marked = next((row for row in rows if row["headline"]), None)
    if marked is not None or metric == "ttft_ms":
        return marked or (rows[0] if len(rows) == 1 else None)
    # Whole durations need no first token: the outermost observer that saw nearly all of them.
    enough = 0.9 * deployment.requests["completed"]
    return next((row for row in rows if row["count"] >= enough), None)


def _cause(deployment: Deployment) -> str:
    """The finding that matters most, in one sentence; what to try where the first sentence has said the rest."""
    found = {f.id: f for f in deployment.findings}
    shares = _ttft_shares(deployment)
    said = max(shares, key=shares.__getitem__, default="")
    for name in _VERDICT_CAUSES:
        cause = found.get(name)
        if cause is not None and (cause.severity != "info" or name == _VERDICT_CAUSES[-1]):
            # A handful of failures is a finding, not the answer to where the time went.
            if name == "failed_requests" and cause.severity != "critical":
                continue
            if said in _SAME.get(name, ()) and cause.suggestions:
                return f"Worth a look: {cause.suggestions[0].rstrip('.')}."
            return _capital(cause.title) + "."
    return "Nothing stands out." if not found and deployment.latency else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
