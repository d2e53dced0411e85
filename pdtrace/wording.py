"""Says the diagnosis in words: overview, verdicts, findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import _words_health, _words_latency
from pdtrace._words import Row, Words, phase
from pdtrace._words_latency import PROMPT_ADVICE
from pdtrace.model import Finding
from pdtrace.numbers import duration, plural, share

if TYPE_CHECKING:
    from pdtrace.diagnose import Deployment

_ROOMS = (_words_latency, _words_health)
# In the order in which a finding may carry the verdict; the others only add.
_VERDICT_CAUSES = (
    "kv_alarm", "failed_requests", "prefill_interference", "engine_queue", "kv_transfer", "router_queue",
    "preemption", "slow_first_token", "slow_stream", "unattributed_time", "long_output",
)  # fmt: skip


def finding(name: str, row: Row) -> Finding:
    """A row of a finding query as a Finding."""
    words = _words_of(name, row)
    low, high = row["interval_low"], row["interval_high"]
    return Finding(
        id=name,
        deployment=row["deployment"],
        severity=row["severity"],
        title=words.title,
        detail=words.detail,
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


def verdict(deployment: Deployment) -> str:
    """The answer in one or two sentences: how it was, and what explains it."""
    if not deployment.requests["count"]:
        return _without_requests(deployment)
    return " ".join(part for part in (_first_tokens(deployment), _cause(deployment)) if part)


def _without_requests(deployment: Deployment) -> str:
    if deployment.findings:
        return f"No requests in these data; {deployment.findings[0].title}."
    return "No requests in these data: nothing can be said of latency."


def _first_tokens(deployment: Deployment) -> str:
    """TTFT and its largest part, else the whole duration."""
    row = _headline(deployment, "ttft_ms")
    if row is None:
        whole = _headline(deployment, "e2e_ms")
        if whole is None and any(p["share_of_ttft"] for p in deployment.phases):
            return (
                "Nobody saw a request both start and deliver its first token"
                " (prefill and decode worker saw a part each): there is no TTFT to tell."
            )
        if whole is None:
            return "Neither first tokens nor durations of whole requests are in these data."
        return f"Requests took p50 {duration(whole['p50'])}, p99 {duration(whole['p99'])}; first tokens are not in these data."
    text = f"The {row['observer']} waited p50 {duration(row['p50'])}, p99 {duration(row['p99'])} for the first token"
    shares: dict[str, float] = {}
    bounds: set[str] = set()
    for p in deployment.phases:
        if p["share_of_ttft"]:
            shares[p["phase"]] = shares.get(p["phase"], 0.0) + p["share_of_ttft"]
            if p["basis"] == "upper_bound":
                bounds.add(p["phase"])
    if not shares:
        return text + "."
    top, part = max(shares.items(), key=lambda item: item[1])
    most = " at most" if top in bounds else ""
    return f"{text}, of which {phase(top)} took{most} {share(part)}."


def _headline(deployment: Deployment, metric: str) -> Mapping[str, Any] | None:
    rows = [row for row in deployment.latency if row["metric"] == metric and row["count"]]
    return next((row for row in rows if row["headline"]), rows[0] if len(rows) == 1 else None)


def _cause(deployment: Deployment) -> str:
    """The finding that matters most, in one sentence; for small tables the sentence that says what to do next."""
    found = {f.id: f for f in deployment.findings}
    if not any(p["detail"] != "unattributed" for p in deployment.phases):
        return _table_advice(found)
    for name in _VERDICT_CAUSES:
        cause = found.get(name)
        if cause is not None and (cause.severity != "info" or name == _VERDICT_CAUSES[-1]):
            # A handful of failures is a finding, not the answer to where the time went.
            if name == "failed_requests" and cause.severity != "critical":
                continue
            return _capital(cause.title) + "."
    return "Nothing stands out." if not found else ""


def _table_advice(found: Mapping[str, Finding]) -> str:
    """What a table of requests alone allows to say."""
    first, stream, answers = (
        found.get(n) for n in ("slow_first_token", "slow_stream", "long_output")
    )
    if first is not None and PROMPT_ADVICE in first.suggestions:
        text = f"First-token time on long prompts is the problem: try {PROMPT_ADVICE}."
        return text + (" Streams are slow too." if stream is not None else "")
    if first is not None:
        return (
            _capital(first.title)
            + ", and prompt length does not explain it: look at load and queueing."
        )
    if stream is not None:
        return "First tokens are fine; the gaps between tokens grow: look at batch size and prefill interference."
    if answers is not None:
        return f"First tokens and streams are even; {answers.title}."
    return "No request stands out."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
