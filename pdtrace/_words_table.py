"""What a table of requests alone allows to say: the closing sentence, and what lengths drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace._words import Row, sentence
from pdtrace._words_latency import prompt_advice
from pdtrace.numbers import count, duration, plural

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment

FEW = 5  # with fewer values there is no typical one (view request_marks)
PAIRS = 10  # with fewer pairs no correlation is claimed (view token_dependence)
NO_TIMES = "Log at least when each request starts, when its first chunk arrives and when it ends."
FINE_MS = 1_000.0  # first tokens that all come within a second are called fine, not only even


def closing(deployment: Deployment, rows: Mapping[str, Row]) -> str:
    """One sentence that says what to do next."""
    n = deployment.requests["completed"] + deployment.requests["unknown"]
    first, stream = rows.get("slow_first_token"), rows.get("slow_stream")
    failed = rows.get("failed_requests")
    if failed is not None and failed["severity"] == "critical":
        return "See to the failures first: they are in no latency figure."
    given = any(row is not None and row["limit_given"] for row in (first, stream))
    if deployment.slo and not given:
        return _by_limits(deployment)
    if n < FEW and not given:
        return (
            f"{plural(n, 'request')}: too few to call anything slow against the others; add rows "
            "(20 or more) or give limits, such as --slo ttft=500ms,tpot=50ms."
        )
    if first is not None and (first["requests"] or first["prompt_driven"]):
        return sentence(_late(deployment, first), _streams_too(stream))
    if stream is not None and stream["requests"]:
        return _slow_streams(deployment, stream)
    return _even(deployment)


def _by_limits(deployment: Deployment) -> str:
    """How the requests stand to limits that no finding takes."""
    rows = [row for row in deployment.slo if row["metric"] == "all"]
    asked, good, unknown = (
        sum(row[key] for row in rows) for key in ("arrivals", "good", "unknown")
    )
    missed = asked - good - unknown
    rest = f"{missed:,} are known not to." if missed else "and none is known to break one."
    return f"Of {plural(asked, 'request')} {good:,} are known to meet the limits given, {rest}"


def _late(deployment: Deployment, row: Row) -> str:
    """First tokens were late: what to try follows from what they follow."""
    if row["requests"] == 1:
        return _one_late(deployment, row)
    if row["prompt_driven"] and row["cached_known"] and (row["cached_ratio"] or 0) > 0:
        return (
            "First-token time on long prompts that were not in the cache is the problem: reuse more of them "
            f"(try {prompt_advice(row)})."
        )
    if row["prompt_driven"]:
        return f"First-token time on long prompts is the problem: try {prompt_advice(row)}."
    slow = f"First tokens were late on {row['requests']:,} of {plural(row['measured'], 'request')}"
    if not row["prompts_known"]:
        return f"{slow}; prompt lengths are not in these data: add input tokens to tell long prompts from waiting."
    if row["prompts_known"] < PAIRS:
        return (
            f"{slow}; {plural(row['prompts_known'], 'request')} with known prompt lengths are too few "
            "to say whether prompts explain it: add more rows."
        )
    if row["prompt_driven"] is False:
        return (
            f"{slow}, and prompt length explains little of it: look at load and waiting at those times "
            "(arrivals, queue, rate limits) first."
        )
    return (
        f"{slow}, without a clear link to prompt length: look at load and waiting at those times first; "
        "more requests would show whether prompts matter."
    )


def _one_late(deployment: Deployment, row: Row) -> str:
    request, value = _worst(deployment, row)
    prompt = (
        f", and its prompt is long ({count(row['slow_prompt_tokens'])} tokens against {count(row['other_prompt_tokens'])})"
        if row["slow_long_input"]
        else ", and its prompt is no longer than others"
        if row["prompts_known"] >= PAIRS
        else ""
    )
    return (
        f"One request ({request}) waited {duration(value)} for its first token{prompt}; the other "
        f"{row['measured'] - 1:,} are even: look at that one before changing anything."
    )


def _worst(deployment: Deployment, row: Row) -> tuple[str, float]:
    first = row["culprits"][0]
    labels = {mark["request"]: mark["label"] for mark in deployment.marks}
    return labels.get(first["request"], first["request"]), first["value"]


def _streams_too(row: Row | None) -> str | None:
    if row is None or not row["requests"]:
        return None
    return f"Streams are slow too, on {row['requests']:,} of {row['measured']:,}."


def _slow_streams(deployment: Deployment, row: Row) -> str:
    start = _first_tokens(deployment)
    if row["requests"] == 1:
        request, value = _worst(deployment, row)
        return (
            f"{start} one stream ({request}) was slow ({duration(value)} per token), the other "
            f"{row['measured'] - 1:,} are even: look at that one before changing anything."
        )
    if row["output_driven"]:
        return (
            f"{start} the gaps between tokens grow on long answers: cap or shorten them, and look at batch size "
            "and KV-cache pressure while they run."
        )
    which = (
        ", whatever the length of the answer"
        if row["output_driven"] is False
        else ", without a clear link to the length of the answer"
        if row["output_pairs"]
        else ""
    )
    return (
        f"{start} {row['requests']:,} of {row['measured']:,} streams are slow{which}: look at what else ran at those "
        "times (long prompts of others, batch size)."
    )


def _first_tokens(deployment: Deployment) -> str:
    row = _only(deployment, "ttft_ms")
    if row is None:
        return "Of first tokens nothing is known;"
    return "First tokens are fine;" if (row["max"] or 0) <= FINE_MS else "First tokens are even;"


def _only(deployment: Deployment, metric: str) -> Mapping[str, Any] | None:
    rows = [row for row in deployment.latency if row["metric"] == metric and row["count"]]
    return next((row for row in rows if row["headline"]), rows[0] if len(rows) == 1 else None)


def _even(deployment: Deployment) -> str:
    """No request stands out."""
    judged = {m: _only(deployment, m) for m in ("ttft_ms", "tpot_ms", "e2e_ms")}
    long = any(d["measure"] == "e2e" and d["follows"] for d in deployment.dependence)
    if judged["ttft_ms"] is None and judged["tpot_ms"] is None:
        if judged["e2e_ms"] is None:
            return NO_TIMES
        rest = "to tell late first tokens from slow streams, stream the answers and log when the first chunk arrives."
        return f"Total time follows the length of the answers; {rest}" if long else _capital(rest)
    what = " or ".join(
        name
        for name, key in (("first token", "ttft_ms"), ("stream", "tpot_ms"))
        if judged[key] is not None
    )
    follows = ", and total time follows the length of the answers" if long else ""
    return (
        f"No {what} stands out from the others{follows}; whether all of them are too slow only a limit can tell: "
        "give one, such as --slo ttft=500ms,tpot=50ms."
    )


def dependence(rows: Sequence[Row]) -> list[str]:
    """Whether long input drives the first token and long output the total, line by line."""
    lines = []
    for row in rows:
        effect, cause = {
            "ttft": ("TTFT", "the length of the prompt"),
            "e2e": ("total time", "the length of the answer"),
        }.get(row["measure"], (None, None))
        if effect is None:
            continue
        if row["rho"] is None:
            lines.append(f"{effect} against {cause}: all lengths or all times are equal")
            continue
        evidence = f"rank correlation {row['rho']:.2f}, {row['rho_low']:.2f} to {row['rho_high']:.2f}, n = {row['pairs']:,}"
        slope = (
            f"; about {duration(row['slope_ms'])} for each 1,000 tokens"
            if row["follows"] and row["slope_ms"] is not None
            else ""
        )
        verb = {True: "follows", False: "does not follow", None: "has no clear link to"}[
            row["follows"]
        ]
        if row["follows"] is False and row["rho_low"] > 0:
            verb = "follows only weakly"
        lines.append(f"{effect} {verb} {cause} ({evidence}{slope})")
    return lines


def models(pools: Sequence[Row]) -> str:
    """Several models in one table, each judged by itself."""
    parts = [
        f"{p['model']} ({plural(p['requests'], 'request')}"
        + (f", TTFT p50 {duration(p['ttft_p50_ms'])}" if p["ttft_p50_ms"] is not None else "")
        + (f", per token p50 {duration(p['tpot_p50_ms'])}" if p["tpot_p50_ms"] is not None else "")
        + ("" if p["judged"] else ", too few to judge")
        + ")"
        for p in pools[:6]
    ]
    more = f" and {len(pools) - 6} more" if len(pools) > 6 else ""
    return f"{len(pools)} models, each judged by itself, not against the others: {'; '.join(parts)}{more}"


def failures(row: Row) -> str:
    """Failures in one sentence, in front of the figures that they are not in."""
    kinds = ", ".join(f"{e['error']}: {e['requests']:,}" for e in (row["errors"] or [])[:3])
    ended = [f"{row[key]:,} {key}" for key in ("failed", "aborted") if row[key]]
    if not ended:
        return ""
    of = f" of {row['calls']:,} calls" if row["calls"] else f" of {plural(row['seen'], 'request')}"
    if row["calls_whole_log"]:
        of = ", of how many calls is not known"
    return f"{' and '.join(ended)}{of}" + (f" ({kinds})" if kinds else "") + "."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
